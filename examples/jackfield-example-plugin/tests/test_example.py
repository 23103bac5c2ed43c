"""The five plugins keep jackfield's laws."""

from jackfield.testing import AlgorithmConformance, BackendConformance, HooksConformance, RewardConformance, TransportConformance


class TestCentred(AlgorithmConformance):
    algorithm = "centred"


class TestCounting(BackendConformance):
    component = "counting"


class TestBrief(RewardConformance):
    reward = "brief"
    records = [{"response": text} for text in ("one", "one two three four five six seven eight nine ten", "")]


class TestWhole(TransportConformance):
    transport = "whole"


class TestWholeShared(TransportConformance):
    transport = "whole"
    shares = True


class TestStopwatch(HooksConformance):
    plugin = "stopwatch"

"""Built-ins keep the laws that third-party plugins are held to, by the same classes."""

import pytest

from jackfield.testing import (
    DatasetConformance,
    HooksConformance,
    LauncherConformance,
    RewardConformance,
    RolloutConformance,
    TrackerConformance,
    TransportConformance,
)
from jackfield.testing.fakes import FakeDataset, FakeReward

RECORDS = [
    {"prompt": "2 + 2 =", "response": "4", "answer": "4"},
    {"prompt": "2 + 3 =", "response": "it is 6", "answer": "5"},
    {"prompt": "say 7", "response": "7 7 8", "answer": "7"},
]


class TestFakeReward(RewardConformance):
    reward = FakeReward
    records = RECORDS


class TestFunctionReward(RewardConformance):
    records = RECORDS

    @pytest.fixture(autouse=True)
    def _file(self, tmp_path):
        (tmp_path / "longest.py").write_text("def longest(record):\n    return float(len(record['response']))\n")
        self.reward, self.config = "function", {"function": f"{tmp_path}/longest.py:longest"}


class TestFakeDataset(DatasetConformance):
    dataset = FakeDataset


class TestSingleTurn(RolloutConformance):
    rollout = "single_turn"


class TestLocal(LauncherConformance):
    launcher = "local"


class TestAuto(TransportConformance):
    transport = "auto"


class TestLocalTransport(TransportConformance):
    transport = "local"


class TestAlias(TransportConformance):
    transport = "alias"
    shares = True


class TestConsole(TrackerConformance):
    tracker = "console"


class Silent:
    """The smallest hook plugin."""

    class Config:
        def __init__(self, **options):
            assert not options

    def __init__(self, config=None):
        pass


class TestHooks(HooksConformance):
    plugin = Silent

"""Law 17: a reward that raises, lies or hangs costs its own samples, is counted, and stops the run only when it goes on (core side)."""

from __future__ import annotations

import math
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from jackfield.components import Reward
from jackfield.config import RewardSpec
from jackfield.errors import PluginError, ScoreError
from jackfield.rewards import RewardHook, combine


class Rule(Reward):
    """Scores each record with a function; `whole` replaces the result of a call."""

    def __init__(self, one, whole=None):
        super().__init__()
        self.one, self.whole, self.calls = one, whole, []

    def score(self, records):
        self.calls.append(len(records))
        found = [self.one(r) for r in records]
        return self.whole(found) if self.whole else found


class Records(list):
    """A batch as far as scoring looks at it."""

    @property
    def records(self):
        return self


def score(reward, size=8, *, hook=None, **options):
    hook = hook or RewardHook(reward, "rule", **options)
    run = SimpleNamespace(metrics={})
    scores = hook.score(run, Records({"i": i} for i in range(size)))["rule"]
    return scores.tolist(), run.metrics["reward/rule/failed"]


def raises_on(*bad, error=ValueError):
    def one(record):
        if record["i"] in bad:
            raise error(f"cannot score {record['i']}")
        return record["i"] / 10

    return one


def same(scores, expected):
    assert [None if math.isnan(s) else round(s, 4) for s in scores] == expected


def test_one_that_raises_is_found_masked_and_counted():
    reward = Rule(raises_on(3))
    scores, failed = score(reward)
    same(scores, [0.0, 0.1, 0.2, None, 0.4, 0.5, 0.6, 0.7])
    assert failed == 1.0
    assert reward.calls == [8, *[1] * 8], "one call for all, then one for each"


def test_scores_that_need_no_second_call():
    reward = Rule(lambda r: r["i"])
    assert score(reward)[1] == 0.0
    assert reward.calls == [8]


@pytest.mark.parametrize(
    ("value", "score_of_it"),
    [
        (None, None),
        (math.nan, None),
        (math.inf, None),
        ({"score": 1.0}, None),
        ([1.0, 2.0], None),
        ("1.0", None),
        (object(), None),
        (ScoreError("the worker was killed"), None),
        (0.0, 0.0),
        (0, 0.0),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.int64(2), 2.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.75), 0.75),
        (torch.tensor([0.5, 0.5]), None),
    ],
)
def test_odd_values_concern_their_own_sample(value, score_of_it):
    scores, failed = score(Rule(lambda r: value if r["i"] == 2 else 1.0), size=4)
    same(scores, [1.0, 1.0, score_of_it, 1.0])
    assert failed == (score_of_it is None)


@pytest.mark.parametrize(
    "whole", [lambda v: v[:-1], lambda v: [*v, 0.0], lambda v: dict(enumerate(v)), lambda v: "12345678", lambda v: None]
)
def test_a_wrong_number_of_scores_is_an_error_naming_the_reward(whole):
    with pytest.raises(PluginError, match=r"reward 'rule' returned .* scores? for 8 samples"):
        score(Rule(lambda r: 1.0, whole))


@pytest.mark.parametrize("whole", [tuple, np.array, torch.tensor])
def test_any_sequence_will_do(whole):
    same(score(Rule(lambda r: r["i"] * 0.5, whole), size=3)[0], [0.0, 0.5, 1.0])


def test_failures_that_go_on_stop_the_run_with_the_first_traceback():
    reward = Rule(raises_on(*range(5)))
    hook = RewardHook(reward, "rule")
    for _ in range(2):
        assert score(reward, hook=hook)[1] == 5.0
    with pytest.raises(PluginError, match=r"'rule' failed on 5 of 8 samples.*3 batches in a row") as caught:
        score(reward, hook=hook)
    assert "cannot score 0" in str(caught.value)
    assert "test_law_17.py" in str(caught.value), "the traceback shows the line"


def test_failures_that_pass_do_not_stop_the_run():
    hook = RewardHook(None, "rule")
    for bad in (5, 5, 4, 8, 8, 0, 8, 8):
        hook.reward = Rule(raises_on(*range(bad)))
        assert score(hook.reward, hook=hook)[1] == bad


def test_a_reward_that_exits_does_not_end_the_run():
    same(score(Rule(raises_on(1, error=SystemExit)), size=3)[0], [0.0, None, 0.2])


def test_a_reward_that_hangs_costs_its_own_sample():
    forever = threading.Event()

    def one(record):
        if record["i"] == 1:
            forever.wait()
        return 1.0

    scores, failed = score(Rule(one), size=4, deadline=0.2)
    forever.set()
    same(scores, [1.0, None, 1.0, 1.0])
    assert failed == 1.0


def test_a_reward_that_always_hangs_stops_the_run():
    forever = threading.Event()
    with pytest.raises(PluginError, match="'rule' hung on 3 samples in a row"):
        score(Rule(lambda r: forever.wait()), size=50, deadline=0.05)
    forever.set()


def test_records_are_the_rewards_own():
    def one(record):
        record["i"] = 100
        return 1.0

    records = Records({"i": i} for i in range(3))
    RewardHook(Rule(one), "rule").score(SimpleNamespace(metrics={}), records)
    assert [r["i"] for r in records] == [0, 1, 2]


def test_nothing_to_score():
    assert RewardHook(Rule(lambda r: 1.0), "rule").score(SimpleNamespace(metrics={}), Records())["rule"].shape == (0,)


def test_combining():
    nan = math.nan
    scores = {"a": torch.tensor([1.0, nan, 0.0, 2.0]), "b": torch.tensor([1.0, 1.0, nan, 0.0]), "shown": torch.tensor([nan] * 4)}
    rewards, ok = combine(scores, [RewardSpec(name="a", weight=0.5), RewardSpec(name="x", label="shown", weight=0.0)], 4)
    assert rewards.tolist() == [1.5, 0.0, 0.0, 1.0]
    assert ok.tolist() == [True, False, False, True]
    nothing, ok = combine({}, [], 3)
    assert (nothing.tolist(), ok.tolist()) == ([0.0] * 3, [True] * 3)

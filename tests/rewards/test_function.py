"""Reward `function`: the user's own function in worker processes. Laws 17 and 18 for raising, hanging, dying and slow calls."""

from __future__ import annotations

import math
import os
import textwrap
import time
from types import SimpleNamespace

import pytest

from jackfield import registry
from jackfield.config import RunConfig
from jackfield.errors import PluginError, ScoreError
from jackfield.rewards import RewardHook
from jackfield_rewards.function import FunctionReward

FUNCTIONS = """
    import os, sys, time

    number = 3

    def fine(record):
        print("a word on stdout disturbs nobody")
        return record["i"] / 10

    def scaled(record, factor=1.0):
        return record["i"] * factor

    def odd_ones(record):
        if record["i"] == 1:
            raise ValueError("no score for one")
        if record["i"] == 2:
            while True: pass
        if record["i"] == 3:
            os._exit(9)
        if record["i"] == 4:
            return lambda: "cannot be sent back"
        if record["i"] == 5:
            return None
        if record["i"] == 6:
            sys.exit("leaving")
        return float(record["i"])

    def slow_first(record):
        time.sleep(0.3 - 0.1 * record["i"] if record["i"] < 3 else 0)
        return record["i"]

    def batch(records):
        return [r["i"] for r in records]

    def short(records):
        return [1.0] * (len(records) - 1)

    def single(records):
        return 1.0

    def picky(records):
        if any(r["i"] == 2 for r in records):
            raise RuntimeError("not two")
        return [r["i"] for r in records]

    def who(record):
        return os.getpid()

    class NotAReward:
        pass
"""


@pytest.fixture
def file(tmp_path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(FUNCTIONS))
    return str(tmp_path / "mine.py")


@pytest.fixture
def reward(file):
    made = []

    def make(name, **options):
        made.append(FunctionReward(FunctionReward.Config(function=f"{file}:{name}", **options)))
        return made[-1]

    yield make
    for each in made:
        each.pool.close()


def rows(n):
    return [{"i": i} for i in range(n)]


def test_scores_by_index(reward):
    assert reward("fine").score(rows(6)) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]


def test_arguments(reward):
    assert reward("scaled", arguments={"factor": 3.0}).score(rows(3)) == [0.0, 3.0, 6.0]


def test_raising_hanging_and_dying_cost_their_own_sample(reward):
    values = reward("odd_ones", timeout=1.0).score(rows(9))
    assert [v if not isinstance(v, ScoreError) else None for v in values] == [0.0, None, None, None, None, None, None, 7.0, 8.0]
    assert "no score for one" in str(values[1])
    assert "mine.py" in str(values[1])
    assert "no score after 1 s; the worker was killed" in str(values[2])
    assert "died (exit status 9)" in str(values[3])
    assert "pickle" in str(values[4])
    assert values[5] is None
    assert "died (exit status 1)" in str(values[6])


def test_through_the_hook_they_are_masked_and_counted(reward):
    class Records(list):
        records = property(lambda self: self)

    run = SimpleNamespace(metrics={})
    scores = RewardHook(reward("odd_ones", timeout=1.0), "mine").score(run, Records(rows(12)))["mine"]
    assert [i for i, s in enumerate(scores.tolist()) if math.isnan(s)] == [1, 2, 3, 4, 5, 6]
    assert run.metrics == {"reward/mine/failed": 6.0}


def test_reverse_order_of_finish(reward):
    assert reward("slow_first", workers=4).score(rows(6)) == [0, 1, 2, 3, 4, 5]


def test_batched(reward):
    assert reward("batch", batched=True).score(rows(5)) == [0, 1, 2, 3, 4]


def test_batched_that_raises_is_called_with_one_at_a_time(reward):
    values = reward("picky", batched=True).score(rows(4))
    assert [v if not isinstance(v, ScoreError) else None for v in values] == [0, 1, None, 3]
    assert "not two" in str(values[2])


@pytest.mark.parametrize(("name", "words"), [("short", "returned 4 scores for 5 records"), ("single", "returned a float for 5 records")])
def test_batched_with_a_wrong_number_names_the_function(reward, name, words):
    with pytest.raises(PluginError, match=rf"mine\.py:{name}.* {words}"):
        reward(name, batched=True).score(rows(5))


def test_workers_are_kept_between_calls_and_end_with_the_run(reward):
    mine = reward("who", workers=2)
    first = set(mine.score(rows(40)))
    assert set(mine.score(rows(40))) <= first
    assert len(first) <= 2
    assert os.getpid() not in first
    mine.run_end(None)
    for pid in map(int, first):
        for _ in range(100):
            if not os.path.exists(f"/proc/{pid}"):
                break
            time.sleep(0.05)
        else:
            pytest.fail(f"worker {pid} is still there")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nothing", "cannot be imported: AttributeError"),
        ("x", "cannot be imported"),
        ("number", "cannot be imported: .* of type int; name a function"),
        (None, "FileNotFoundError"),
    ],
)
def test_a_function_that_cannot_be_imported_is_an_error_before_the_run(file, name, words):
    function = f"{file}:{name}" if name else "nowhere.py:fn"
    mine = FunctionReward(FunctionReward.Config(function=function))
    with pytest.raises(PluginError, match=words):
        mine.configure(None)


def config(*rewards):
    return RunConfig(policy={"model": "none"}, algorithm="x", dataset="y", rewards=rewards)


def test_short_form_is_this_reward(file):
    (spec,) = config({"name": f"{file}:fine", "timeout": 3, "weight": 2.0}).rewards
    assert (spec.label, spec.weight, spec.options) == ("fine", 2.0, {"timeout": 3})
    built = registry.build("reward", spec)
    assert isinstance(built, FunctionReward)
    assert built.config.timeout == 3.0
    assert built.score(rows(2)) == [0.0, 0.1]
    built.pool.close()


def test_labels():
    specs = config("exact", {"name": "function", "function": "a/b.py:fn"}, {"name": "regex", "label": "form"}, "pack.age:fn").rewards
    assert [s.label for s in specs] == ["exact", "fn", "form", "fn"]


def test_a_class_that_is_no_reward_is_refused(file):
    (spec,) = config(f"{file}:NotAReward").rewards
    with pytest.raises(PluginError, match="derive it from"):
        registry.build("reward", spec)

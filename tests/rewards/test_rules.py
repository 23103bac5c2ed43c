"""The rewards that come with jackfield, value by value."""

from __future__ import annotations

import pytest

from jackfield import registry
from jackfield.config import ComponentSpec
from jackfield.errors import ConfigError, ScoreError


@pytest.fixture
def score():
    made = []

    def run(name, response, right="4", *, fields=None, **options):
        made.append(registry.build("reward", ComponentSpec(name=name, options=options)))
        (value,) = made[-1].score([{"response": response, "answer": right, **(fields or {})}])
        return value

    yield run
    for reward in made:
        if hasattr(reward, "pool"):
            reward.pool.close()


@pytest.mark.parametrize(
    ("response", "answer", "options", "expected"),
    [
        ("4", "4", {}, 1.0),
        (" 4.\n", "4", {}, 1.0),
        ("four", "4", {}, 0.0),
        ("Yes", "yes", {}, 0.0),
        ("Yes", "yes", {"ignore_case": True}, 1.0),
        ("4.", "4", {"strip": " "}, 0.0),
        ("", "4", {}, 0.0),
        ("7", 7, {}, 1.0),
    ],
)
def test_exact(score, response, answer, options, expected):
    assert score("exact", response, answer, **options) == expected


@pytest.mark.parametrize(
    ("response", "answer", "expected"),
    [
        ("2 + 2 = 4", "4", 1.0),
        ("4, or is it 5?", "4", 0.0),
        ("The answer is 4.", "4", 1.0),
        ("It costs 1,234.50 dollars", "1234.5", 1.0),
        ("-4", "4", 0.0),
        ("2 - -4", "-4", 1.0),
        ("no number", "4", 0.0),
        ("10-3", "-3", 1.0),
        ("4.0", 4, 1.0),
        ("4", "four", None),
    ],
)
def test_last_number(score, response, answer, expected):
    assert score("last_number", response, answer) == expected


@pytest.mark.parametrize(("response", "expected"), [("t4 t4 t1 t4", 0.75), ("", 0.0), ("t4", 1.0), ("t44", 0.0)])
def test_share(score, response, expected):
    assert score("share", response, "t4") == expected


@pytest.mark.parametrize(
    ("options", "length", "expected"),
    [
        ({"target": 10}, 10, 1.0),
        ({"target": 10}, 5, 0.5),
        ({"target": 10}, 40, 0.0),
        ({"limit": 20, "buffer": 10}, 10, 0.0),
        ({"limit": 20, "buffer": 10}, 15, -0.5),
        ({"limit": 20, "buffer": 10}, 20, -1.0),
        ({"limit": 20, "buffer": 10}, 99, -1.0),
        ({"limit": 20}, 20, 0.0),
        ({"limit": 20}, 21, -1.0),
    ],
)
def test_length(score, options, length, expected):
    assert score("length", "x " * length, fields={"response_tokens": length}, **options) == expected
    assert score("length", "x " * length, unit="words", **options) == expected
    assert score("length", "x" * length, unit="characters", **options) == expected


@pytest.mark.parametrize("options", [{}, {"target": 1, "limit": 2}, {"limit": 2, "buffer": 3}])
def test_length_settings_that_do_not_fit(score, options):
    with pytest.raises(ConfigError, match="reward 'length'"):
        score("length", "x", **options)


def test_regex(score):
    assert score("regex", "<answer>4</answer>", pattern="<answer>.*</answer>", mode="fullmatch") == 1.0
    assert score("regex", "so <answer>4</answer>", pattern="<answer>.*</answer>", mode="fullmatch") == 0.0
    assert score("regex", "so <answer> 4 </answer>", pattern="<answer>(.*?)</answer>", answer="answer") == 1.0
    assert score("regex", "so <answer>5</answer>", pattern="<answer>(.*?)</answer>", answer="answer") == 0.0
    assert score("regex", "1+1 is 2", "1+1", pattern=r"^{answer} is", answer="answer") == 1.0


def test_regex_that_backtracks_for_ever_costs_its_sample(score):
    value = score("regex", "a" * 40 + "b", pattern="(a+)+$", timeout=0.5)
    assert isinstance(value, ScoreError)


def test_regex_that_is_none(score):
    with pytest.raises(ConfigError, match="not a regular expression"):
        score("regex", "x", pattern="(")


@pytest.mark.slow
def test_math(score):
    pairs = [
        (r"So $x = \frac{1}{2}$", "0.5", 1.0),
        (r"\boxed{\frac{2}{4}}", r"\frac{1}{2}", 1.0),
        ("The answer is 12", "12", 1.0),
        (r"\boxed{13}", "12", 0.0),
        ("no idea", "12", 0.0),
        (r"$\{1, 2\}$", r"$\{2, 1\}$", 1.0),
    ]
    reward = registry.build("reward", ComponentSpec(name="math", options={"timeout": 60.0}))
    got = reward.score([{"response": response, "answer": answer} for response, answer, _ in pairs])
    assert got == [expected for *_, expected in pairs]
    (bad,) = reward.score([{"response": "1", "answer": ""}])
    assert isinstance(bad, ScoreError)
    reward.pool.close()


@pytest.mark.slow
def test_reasoning_gym_scores_its_own_rows():
    data = registry.build("dataset", ComponentSpec(name="reasoning_gym", options={"task": "chain_sum", "size": 3}))
    rows = [data[i] for i in range(3)]
    reward = registry.build("reward", ComponentSpec(name="reasoning_gym", options={"extract": "last_number", "timeout": 60.0}))
    assert reward.score([{**r, "response": f"It is {r['answer']}."} for r in rows]) == [1.0] * 3
    assert reward.score([{**r, "response": "It is 10000000."} for r in rows]) == [0.0] * 3
    reward.pool.close()

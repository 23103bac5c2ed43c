"""Reward `math`: math-verify decides whether the response's final expression equals the answer."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from math_verify import parse, verify

from jackfield.components import ComponentConfig
from jackfield.hookspecs import hookimpl
from jackfield_rewards.function import PoolConfig, PooledReward
from jackfield_rewards.text import AnsweredReward


class MathConfig(PoolConfig):
    """Settings of `math`."""

    answer: str = "answer"
    """The row's field that holds the right answer, as LaTeX or plain; `$` or `\\boxed` around it are welcome."""


class Math(PooledReward, AnsweredReward):
    """1 where the response's answer is mathematically equal to the row's, else 0; a sample whose row cannot be parsed has no score."""

    Config: type[ComponentConfig] = MathConfig
    pool_function = "jackfield_rewards.math_verify:equal"

    @hookimpl
    def configure(self, run: Any) -> None:
        """See AnsweredReward and PooledReward."""
        AnsweredReward.configure(self, run)
        super().configure(run)


@lru_cache(maxsize=4096)
def _gold(answer: str) -> tuple[Any, ...]:
    # Plain `1/2` parses as an expression, `\frac12` only inside $...$. No timeouts here: the pool has its own.
    return tuple(parse(answer, parsing_timeout=None) or parse(f"${answer}$", parsing_timeout=None))


def equal(record: dict[str, Any], *, answer: str) -> float:
    """`math` for one record. Raises ValueError where the row's answer is no mathematics."""
    gold = _gold(str(record[answer]))
    if not gold:
        raise ValueError(f"the row's {answer!r} is {record[answer]!r:.100}, which math-verify cannot parse")
    return float(verify(list(gold), parse(record["response"], parsing_timeout=None), timeout_seconds=None))

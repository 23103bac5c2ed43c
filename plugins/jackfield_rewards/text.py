"""Rewards that compare texts: exact, regex, last_number, share, length."""

from __future__ import annotations

import re
from collections.abc import Sequence
from decimal import Decimal, InvalidOperation
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from jackfield.components import ComponentConfig, Reward
from jackfield.errors import DataError
from jackfield.hookspecs import hookimpl
from jackfield_rewards.function import PoolConfig, PooledReward

NUMBER = re.compile(r"[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|[-+]?\.\d+")
"""A decimal number, with or without thousands separators."""


class AnswerConfig(ComponentConfig):
    """Rewards that compare the response with a field of the row."""

    answer: str = "answer"
    """The row's field that holds the right answer."""


class AnsweredReward(Reward):
    """Base of rewards that read a right answer from the row."""

    config: Any

    @hookimpl
    def configure(self, run: Any) -> None:
        """Raise DataError where the first row has no answer; a rollout with an environment may still put it there."""
        row = run.prompts.dataset[0]
        if run.config.rollout.name == "single_turn" and isinstance(row, dict) and self.config.answer not in row:
            raise DataError(
                f"reward {type(self).__name__} reads field {self.config.answer!r}, which row 0 lacks: it has {', '.join(map(str, row))}; "
                "name another as the reward's `answer`, or map one with dataset.columns"
            )


class ExactConfig(AnswerConfig):
    """Settings of `exact`."""

    strip: str = " \t\n."
    """Characters taken off both ends of response and answer first."""
    ignore_case: bool = False
    """Compare case-insensitively."""


class Exact(AnsweredReward):
    """1 where the response is the answer, else 0."""

    Config: type[ComponentConfig] = ExactConfig
    config: Any

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score."""

        def plain(text: Any) -> str:
            stripped = str(text).strip(self.config.strip)
            return stripped.casefold() if self.config.ignore_case else stripped

        return [float(plain(r["response"]) == plain(r[self.config.answer])) for r in records]


class LastNumber(AnsweredReward):
    """1 where the last number in the response equals the answer, else 0 (also where there is no number)."""

    Config: type[ComponentConfig] = AnswerConfig
    config: Any

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score; None where the row's answer is no number."""
        return [self._one(r["response"], str(r[self.config.answer])) for r in records]

    def _one(self, response: str, answer: str) -> float | None:
        try:
            wanted = Decimal(answer.replace(",", "").strip())
        except InvalidOperation:
            return None
        found = NUMBER.findall(response)
        return float(bool(found) and Decimal(found[-1].replace(",", "")) == wanted)


class Share(AnsweredReward):
    """The share of the response's words that equal the answer; 0 for an empty response."""

    Config: type[ComponentConfig] = AnswerConfig
    config: Any

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score."""
        words = [(r["response"].split(), r[self.config.answer]) for r in records]
        return [said.count(answer) / max(len(said), 1) for said, answer in words]


class LengthConfig(ComponentConfig):
    """Settings of `length`."""

    unit: Literal["tokens", "words", "characters"] = "tokens"
    """What is counted in the response."""
    target: int | None = Field(default=None, gt=0)
    """Score max(0, 1 - |length - target| / target)."""
    limit: int | None = Field(default=None, gt=0)
    """Score 0 up to limit - buffer, falling linearly to -1 at the limit and beyond (DAPO, arXiv 2503.14476, equation 13)."""
    buffer: int = Field(default=0, ge=0)
    """Width of that fall."""

    @model_validator(mode="after")
    def _one_of(self) -> LengthConfig:
        if (self.target is None) == (self.limit is None):
            raise ValueError("give either target or limit")
        if self.limit is not None and self.buffer > self.limit:
            raise ValueError(f"buffer {self.buffer} exceeds limit {self.limit}")
        return self


class Length(Reward):
    """A score for the response's length: closeness to a target, or a penalty for coming near a limit."""

    Config: type[ComponentConfig] = LengthConfig
    config: Any

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score."""
        return [self._one(self._count(r)) for r in records]

    def _count(self, record: dict[str, Any]) -> int:
        match self.config.unit:
            case "tokens":
                return int(record["response_tokens"])
            case "words":
                return len(record["response"].split())
        return len(record["response"])

    def _one(self, length: int) -> float:
        target, limit, buffer = self.config.target, self.config.limit, self.config.buffer
        if target is not None:
            return max(0.0, 1 - abs(length - target) / target)
        over = length - (limit - buffer)
        if over <= 0:
            return 0.0
        return -1.0 if over >= buffer else -over / buffer


class RegexConfig(PoolConfig):
    """Settings of `regex`."""

    pattern: str
    """Python regular expression. `{answer}` in it stands for the row's answer, escaped, if `answer` is set."""
    answer: str | None = None
    """The row's field that holds the answer. If the pattern has a group, the group must equal the answer."""
    mode: Literal["search", "fullmatch"] = "search"
    """Match anywhere, or the whole response (blanks at its ends aside)."""
    dotall: bool = True
    """`.` matches line breaks too."""

    @field_validator("pattern")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern.replace("{answer}", ""))
        except re.error as error:
            raise ValueError(f"not a regular expression: {error}") from error
        return pattern


class Regex(PooledReward):
    """1 where the response matches, else 0. In a worker process: a pattern that backtracks for ever costs its sample only."""

    Config: type[ComponentConfig] = RegexConfig
    pool_function = "jackfield_rewards.text:match"


def match(record: dict[str, Any], *, pattern: str, answer: str | None, mode: str, dotall: bool) -> float:
    """`regex` for one record."""
    wanted = None if answer is None else str(record[answer]).strip()
    compiled = re.compile(pattern.replace("{answer}", re.escape(wanted or "")), re.DOTALL if dotall else 0)
    found = getattr(compiled, mode)(record["response"].strip())
    if not found:
        return 0.0
    if wanted is None or not compiled.groups:
        return 1.0
    return float((found[1] or "").strip() == wanted)

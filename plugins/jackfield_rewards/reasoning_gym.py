"""Reward `reasoning_gym`: the task's own scoring of rows from the dataset of the same name."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal

from reasoning_gym import get_score_answer_fn

from jackfield.components import ComponentConfig
from jackfield_rewards.function import PoolConfig, PooledReward


class ReasoningGymConfig(PoolConfig):
    """Settings of `reasoning_gym`."""

    extract: Literal["all", "tag", "last_number", "last_line"] = "all"
    """What of the response is the answer: all of it, the last <answer>...</answer>, the last number, or the last line."""
    strip: str = " \t\n."
    """Characters taken off both ends of the answer."""


class ReasoningGym(PooledReward):
    """The score in [0, 1] that the task of the row gives to the answer."""

    Config: type[ComponentConfig] = ReasoningGymConfig
    pool_function = "jackfield_rewards.reasoning_gym:score"


@lru_cache(maxsize=256)
def _scorer(task: str) -> Any:
    return get_score_answer_fn(task)


def score(record: dict[str, Any], *, extract: str, strip: str) -> float:
    """`reasoning_gym` for one record, which needs the row's `answer` and `metadata`."""
    text = record["response"]
    match extract:
        case "tag":
            found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
        case "last_number":
            found = re.findall(r"-?\d+(?:\.\d+)?", text)
        case "last_line":
            found = text.strip().splitlines()
        case _:
            found = [text]
    answer = found[-1].strip(strip) if found else None
    return float(_scorer(record["metadata"]["source_dataset"])(answer, record))

"""Dataset `reasoning_gym`: over a hundred procedural tasks by name."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import Field
from reasoning_gym import create_dataset
from reasoning_gym.factory import DATASETS

from jackfield.components import ComponentConfig, Dataset
from jackfield.errors import DataError


class ReasoningGymConfig(ComponentConfig):
    """Settings of `reasoning_gym`."""

    task: str
    """Name of the task, such as `chain_sum`."""
    options: dict[str, Any] = {}
    """The task's own settings, such as `{min_terms: 2, max_terms: 2}`."""
    size: int = Field(default=1000, gt=0)
    """Rows."""
    seed: int = 0
    """Draws the rows; give the hook plugin `evaluate` another."""


class ReasoningGym(Dataset):
    """Rows have `prompt`, `answer` (text) and the task's `metadata`; reward `reasoning_gym` scores them by the task's own rule."""

    Config: type[ComponentConfig] = ReasoningGymConfig
    config: Any

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        task = self.config.task
        if task not in DATASETS:
            near = difflib.get_close_matches(task, DATASETS, n=3)
            raise DataError(f"dataset.task: reasoning-gym has no {task!r}; {_hint(near)}")
        try:
            self.data = create_dataset(task, size=self.config.size, seed=self.config.seed, **self.config.options)
        except (TypeError, AssertionError, ValueError) as error:
            raise DataError(f"dataset.options do not fit reasoning-gym's {task!r}: {' '.join(str(error).split())}") from error

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> dict[str, Any]:
        entry = self.data[index]
        answer = entry["answer"]
        return {**entry, "prompt": entry["question"], "answer": answer if answer is None else str(answer)}


def _hint(near: list[str]) -> str:
    return f"did you mean {' or '.join(near)}?" if near else f"it has: {', '.join(sorted(DATASETS)[:12])}, ..."

"""Datasets `arithmetic` and `copy`: rows made by rule, for examples and tests."""

from __future__ import annotations

import itertools
import random
from typing import Any, Literal

from pydantic import Field

from jackfield.components import ComponentConfig, Dataset


class ArithmeticConfig(ComponentConfig):
    """Settings of `arithmetic`."""

    split: Literal["train", "held_out", "all"] = "train"
    """Which of the 81 questions: the two first are disjoint, and together all."""
    held_out: int = Field(default=16, ge=0, lt=81)
    """Questions kept for `held_out`."""
    split_seed: int = 0
    """Draws which ones; the same here and in the hook plugin `evaluate`."""
    question: str = "What is {a} + {b}?"
    """The prompt."""


class Arithmetic(Dataset):
    """Single-digit addition: a and b from 1 to 9, `answer` their sum."""

    Config: type[ComponentConfig] = ArithmeticConfig
    config: Any

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        pairs = list(itertools.product(range(1, 10), repeat=2))
        random.Random(self.config.split_seed).shuffle(pairs)
        cut = self.config.held_out
        self.pairs = sorted({"train": pairs[cut:], "held_out": pairs[:cut], "all": pairs}[self.config.split])

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> dict[str, Any]:
        a, b = self.pairs[index]
        return {"prompt": self.config.question.format(a=a, b=b), "answer": str(a + b)}


class CopyConfig(ComponentConfig):
    """Settings of `copy`."""

    size: int = Field(default=512, gt=0)
    """Rows."""
    words: int = Field(default=4, gt=0)
    """Words in a prompt."""
    vocabulary: int = Field(default=10, gt=0)
    """Different words: t0, t1, ... of the tiny model's tokenizer."""
    seed: int = 0
    """Draws the words."""


class Copy(Dataset):
    """Random words; `answer` is the first of them. With reward `share` a model learns to look back and repeat it."""

    Config: type[ComponentConfig] = CopyConfig
    config: Any

    def __len__(self) -> int:
        return self.config.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = random.Random(f"{self.config.seed}:{index}")
        words = [f"t{draw.randrange(self.config.vocabulary)}" for _ in range(self.config.words)]
        return {"prompt": " ".join(words), "answer": words[0]}

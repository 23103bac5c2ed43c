"""Scoring: reward components isolated sample by sample, and their weighted sum."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jackfield.hookspecs import hookimpl

if TYPE_CHECKING:
    from jackfield.batch import Batch
    from jackfield.components import Reward


class RewardHook:
    """A reward component as a `score` hook."""

    def __init__(self, reward: Reward, label: str) -> None:
        self.reward, self.label = reward, label

    @hookimpl
    def score(self, run: Any, batch: Batch) -> dict[str, Tensor]:
        """Float32 [B] under the reward's label."""
        found = self.reward.score(list(batch.records))
        return {self.label: torch.tensor([math.nan if v is None else float(v) for v in found])}


def combine(scores: dict[str, Tensor], weights: dict[str, float], size: int) -> tuple[Tensor, Tensor]:
    """Weighted sum [B] of the scores, and bool [B]: which samples every reward could score."""
    total, ok = torch.zeros(size), torch.ones(size, dtype=torch.bool)
    for name, values in scores.items():
        ok &= values.isfinite()
        total += weights.get(name, 1.0) * values.nan_to_num()
    return total, ok

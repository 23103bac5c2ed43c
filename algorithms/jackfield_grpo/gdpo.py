"""GDPO, group reward-decoupled normalisation policy optimisation: Liu et al., arXiv 2601.05242.

    A[k, i] = (r[k, i] - mean(r[k])) / (std(r[k]) + eps), for each reward k over the group on its own
    A[i] = sum over k of w[k] A[k, i], then (A - mean) / (std + eps) over the batch's samples

GRPO on the sum of several rewards lets the one that varies most drown the others and gives many different combinations one advantage.
Loss as in GRPO. The weights are the rewards' own (`rewards[].weight`). Departures: a sample that any reward failed to score is left
out; a group without any difference keeps advantage exactly 0 (law 14); `batch_norm: tokens` normalises over tokens, as some
implementations do; KL in reward is a further reward of weight 1, not normalised.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, Needs, hookimpl
from jackfield.algorithm import Reduction
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


class GDPO(ClippedAlgorithm):
    """GRPO with each reward normalised apart."""

    class Config(ClippedConfig):
        """Settings of GDPO."""

        reduction: Reduction = "seq-mean-token-mean"
        """How per-token losses become one number."""
        batch_norm: Literal["samples", "tokens", "none"] = "samples"
        """What the second normalisation counts."""
        eps: float = Field(default=1e-6, ge=0)
        """Added to the standard deviations."""

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.weights: dict[str, float] = {}

    @hookimpl
    def configure(self, run: Any) -> None:
        """Take the rewards' weights from the run."""
        self.weights = {spec.label or spec.name: spec.weight for spec in run.config.rewards}

    @property
    def needs(self) -> Needs:
        """Two samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=2)

    def decoupled(self, scores: dict[str, Tensor], group_ids: Tensor, valid: Tensor) -> Tensor:
        """The weighted sum [B] of the rewards, each normalised within its group; names without a weight have weight 1."""
        parts = [
            self.weights.get(name, 1.0) * F.group_center(values, group_ids, valid, std=True, eps=self.config.eps)
            for name, values in scores.items()
        ]
        return torch.stack(parts).sum(0) if parts else torch.zeros(len(group_ids))

    def advantage(self, batch: Batch) -> Batch:
        """Normalise by reward and group, then over the batch."""
        assert batch.scores is not None
        valid, mask = F.trained(batch), batch.loss_mask
        scores = {name: values for name, values in batch.scores.items() if isinstance(values, Tensor)}
        values = self.decoupled(scores, batch.group_ids, valid)
        if batch.token_rewards is not None:
            values = values + torch.where(mask, batch.token_rewards, 0).sum(-1)
        flat = F.group_stats(values, batch.group_ids, valid).flat
        if self.config.batch_norm == "tokens":
            return batch.replace(advantages=F.masked_whiten(F.spread(values, mask), mask).masked_fill_(flat[:, None], 0))
        if self.config.batch_norm == "samples":
            values = F.group_center(values, torch.zeros_like(batch.group_ids), valid, std=True, eps=self.config.eps)
        return F.with_advantages(batch, torch.where(flat, 0, values))

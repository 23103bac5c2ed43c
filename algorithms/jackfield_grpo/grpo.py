"""GRPO, group relative policy optimisation: Shao et al., DeepSeekMath, arXiv 2402.03300.

    A[i] = (r[i] - mean(r)) / (std(r) + eps), over the group of samples of one prompt          (outcome supervision)
    loss = mean over samples of the mean over tokens of PPO's clipped loss + beta KL(pi || ref), by k3

std is the unbiased one. Departures: a group whose rewards are all equal has advantage exactly 0, where rounding and a small
eps would make it large (law 14); without `kl.coef` (the paper: 0.04) there is no reference policy.
"""

from __future__ import annotations

import dataclasses

from pydantic import Field

import jackfield_estimators as F
from jackfield import Batch, Needs
from jackfield.algorithm import Reduction
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


class GRPO(ClippedAlgorithm):
    """Group relative policy optimisation."""

    class Config(ClippedConfig):
        """Settings of GRPO."""

        reduction: Reduction = "seq-mean-token-mean"
        """How per-token losses become one number; the paper's mean of each sample's mean."""
        std: bool = True
        """Divide by the group's standard deviation."""
        eps: float = Field(default=1e-6, ge=0)
        """Added to the standard deviation."""

    config: Config

    @property
    def needs(self) -> Needs:
        """Two samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=2)

    def advantage(self, batch: Batch) -> Batch:
        """Rewards relative to the group's."""
        rewards = F.outcomes(batch)
        return F.with_advantages(
            batch, F.group_center(rewards, batch.group_ids, F.trained(batch), std=self.config.std, eps=self.config.eps)
        )

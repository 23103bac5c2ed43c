"""GPG, group policy gradient: Chu et al., arXiv 2504.02546.

    loss = token-mean of -A log pi;  A[i] = alpha (r[i] - mean(r)) / F_norm, over the group
    alpha = samples / samples in groups whose rewards differ: the gradient is not diluted by groups that have none

The objective itself: no ratio, clip, reference or critic. Departures: F_norm is 1 or, with `std`, the group's standard deviation. (Some
implementations count samples of non-zero reward in alpha, which is not what the paper derives.)
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

import jackfield_estimators as F
from jackfield import Algorithm, AlgorithmConfig, Batch, LossOutput, Needs, Outputs


def gpg_advantages(rewards: Tensor, group_ids: Tensor, valid: Tensor, *, std: bool = False) -> Tensor:
    """alpha (r - mean) / F_norm, float32 [B]; exactly 0 in a group of equal rewards and where not `valid`."""
    telling = (valid & ~F.group_stats(rewards, group_ids, valid).flat).sum().clamp(min=1)
    return F.group_center(rewards, group_ids, valid, std=std) * (valid.sum() / telling)


class GPG(Algorithm):
    """Group policy gradient."""

    class Config(AlgorithmConfig):
        """Settings of GPG."""

        std: bool = False
        """F_norm: divide by the group's standard deviation instead of by 1."""

    config: Config

    @property
    def needs(self) -> Needs:
        """Two samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=2)

    def advantage(self, batch: Batch) -> Batch:
        """Group-centred rewards, scaled up by the share of groups that say something."""
        values = gpg_advantages(F.outcomes(batch), batch.group_ids, F.trained(batch), std=self.config.std)
        return F.with_advantages(batch, values)

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """REINFORCE."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        return LossOutput(-batch.advantages * outputs.log_probs, {"policy_kl": batch.old_log_probs - outputs.log_probs})

"""OPO, on-policy RL with the optimal reward baseline: Hao et al., arXiv 2505.23585.

    A[i] = r[i] - sum of length * r / sum of length, over the group: the baseline of least variance when a gradient's
    square grows with the answer's length
    loss = token-mean of -A log pi, exactly on-policy, without KL or entropy terms

Departures: where a batch takes several optimizer steps, PPO's clipped ratio stands in for log pi (its gradient is the same on the policy
itself); the paper takes one.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, Needs
from jackfield_estimators import ClippedAlgorithm


def opo_advantages(rewards: Tensor, lengths: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """Rewards [B] less their group's length-weighted mean; exactly 0 in a group of equal rewards and where not `valid`."""
    index, groups = F.group_index(group_ids)
    weight = torch.where(valid, lengths, 0).double()
    weighted = F.group_sum(torch.where(valid, rewards, 0).double() * weight, index, groups)
    baseline = weighted / F.group_sum(weight, index, groups).clamp(min=1)
    flat = F.group_stats(rewards, group_ids, valid).flat
    return torch.where(valid & ~flat, rewards - baseline[index], 0).to(rewards.dtype)


class OPO(ClippedAlgorithm):
    """REINFORCE with the length-weighted mean of the group as the baseline."""

    @property
    def needs(self) -> Needs:
        """Two samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=2)

    def advantage(self, batch: Batch) -> Batch:
        """Rewards less the optimal baseline."""
        lengths = batch.loss_mask.sum(-1)
        return F.with_advantages(batch, opo_advantages(F.outcomes(batch), lengths, batch.group_ids, F.trained(batch)))

"""Pass@k GRPO, which trains the best of k samples: Tang et al., arXiv 2503.19595; k < n by Walder & Karkhanis, arXiv 2505.15201.

    A[i] = mean over the k-subsets S of the group that hold i of  max r(S) - max r(S without i)

With k the whole group (the default, arXiv 2503.19595 with the leave-one-out baseline) only the best sample earns
something: its lead over the second. With k < n it is the estimator `sloo minus one` of arXiv 2505.15201: r sorted upwards,
A[m] = sum over j < m of (r[m] - r[j]) C(j - 1, k - 2) / C(n - 1, k - 1), j and m counted from 1.

Departures: `std` divides by the group's standard deviation, as GRPO does and neither paper; off by default.
"""

from __future__ import annotations

import dataclasses

import torch
from pydantic import Field
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, Needs
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


def best_of_k_advantages(rewards: Tensor, group_ids: Tensor, valid: Tensor, k: int | None = None) -> Tensor:
    """A[i] above, float32 [B]; 0 where not `valid`. A group with fewer than k valid samples uses all it has."""
    index, groups = F.group_index(group_ids)
    kept = valid.nonzero().squeeze(-1)
    by_reward = kept[rewards[kept].double().argsort(stable=True)]
    order = by_reward[index[by_reward].argsort(stable=True)]
    count = F.group_sum(valid.long(), index, groups)
    start = count.cumsum(0) - count
    rank = torch.arange(len(order), device=rewards.device) - start[index[order]]
    table = rewards.new_zeros((groups, int(count.max()) if groups else 0), dtype=torch.float64)
    table[index[order], rank] = rewards[order].double()

    n = count.double()[:, None]
    size = n if k is None else n.clamp(max=k)
    below = torch.arange(table.shape[1], device=rewards.device, dtype=torch.float64).expand_as(table)
    weight = torch.where((below >= size - 2) & (below < n), (_log_choose(below, size - 2) - _log_choose(n - 1, size - 1)).exp(), 0)
    sums = torch.nn.functional.pad(weight.cumsum(1), (1, 0))[:, :-1], torch.nn.functional.pad((weight * table).cumsum(1), (1, 0))[:, :-1]
    result = torch.zeros_like(rewards)
    result[order] = (table * sums[0] - sums[1])[index[order], rank].to(rewards.dtype)
    return torch.where(F.group_stats(rewards, group_ids, valid).flat, 0, result)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """log of the binomial coefficient; anything where k is not within 0 and n."""
    k = k.clamp(min=0)
    return torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma((n - k).clamp(min=0) + 1)


class PassKGRPO(ClippedAlgorithm):
    """Policy gradient of the best of k samples."""

    class Config(ClippedConfig):
        """Settings of pass@k GRPO."""

        k: int | None = Field(default=None, ge=2)
        """Samples of which the best counts; None: the whole group."""
        std: bool = False
        """Divide by the group's standard deviation."""
        eps: float = Field(default=1e-6, ge=0)
        """Added to the standard deviation."""

    config: Config

    @property
    def needs(self) -> Needs:
        """k samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=self.config.k or 2)

    def advantage(self, batch: Batch) -> Batch:
        """Each sample's share in the best of k."""
        rewards, valid = F.outcomes(batch), F.trained(batch)
        values = best_of_k_advantages(rewards, batch.group_ids, valid, self.config.k)
        if self.config.std:
            values = (values / (F.group_stats(rewards, batch.group_ids, valid).std + self.config.eps)).float()
        return F.with_advantages(batch, values)

"""Statistics over the samples of one prompt. B samples; samples that are not `valid` count nowhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jackfield.functional import group_index


@dataclass(frozen=True)
class GroupStats:
    """Statistics of each sample's group over its valid samples, [B] each; float64, so that equal rewards stay equal."""

    count: Tensor
    """Valid samples."""
    mean: Tensor
    std: Tensor
    """Unbiased standard deviation; 0 for fewer than two."""
    flat: Tensor
    """bool: the group says nothing, since all its valid values are equal or there are fewer than two (law 14)."""


def group_sum(x: Tensor, index: Tensor, groups: int) -> Tensor:
    """Sums of the rows of `x` [B, ...] by group: [groups, ...]."""
    return x.new_zeros((groups, *x.shape[1:])).index_add_(0, index, x)


def group_stats(x: Tensor, group_ids: Tensor, valid: Tensor) -> GroupStats:
    """Statistics of `x` [B] by group. Samples that are not `valid` count nowhere, so that a masked one equals an absent one (law 4)."""
    index, groups = group_index(group_ids)
    clean = torch.where(valid, x, 0).double()
    count = group_sum(valid.double(), index, groups)
    mean = group_sum(clean, index, groups) / count.clamp(min=1)
    squares = torch.where(valid, clean - mean[index], 0).square()
    std = (group_sum(squares, index, groups) / (count - 1).clamp(min=1)).sqrt()
    low, high = (clean.new_full((groups,), fill) for fill in (torch.inf, -torch.inf))
    low.scatter_reduce_(0, index, torch.where(valid, clean, torch.inf), "amin")
    high.scatter_reduce_(0, index, torch.where(valid, clean, -torch.inf), "amax")
    return GroupStats(count[index], mean[index], std[index], ~(high > low)[index])


def group_center(x: Tensor, group_ids: Tensor, valid: Tensor, *, std: bool = False, eps: float = 1e-6) -> Tensor:
    """`x` [B] less its group's mean, over (the unbiased std + eps) if `std`; exactly 0 in a flat group and where not `valid`."""
    stats = group_stats(x, group_ids, valid)
    centered = x.double() - stats.mean
    if std:
        centered = centered / (stats.std + eps)
    return torch.where(valid & ~stats.flat, centered, 0).to(x.dtype)


def leave_one_out(x: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """`x` [B] less the mean of the group's other samples; exactly 0 in a flat group and where not `valid`."""
    stats = group_stats(x, group_ids, valid)
    scaled = (x.double() - stats.mean) * stats.count / (stats.count - 1).clamp(min=1)
    return torch.where(valid & ~stats.flat, scaled, 0).to(x.dtype)

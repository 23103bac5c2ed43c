"""What Clip-Cov and KL-Cov share: the covariance by token, and an order of tokens that does not depend on how a batch is sorted."""

from __future__ import annotations

import torch
from torch import Tensor

import jackfield_estimators as F


def token_covariance(log_probs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """Token-wise covariance of arXiv 2505.22617: (log pi - mean log pi) (A - mean A), means over the mask. float64 [B, T]; -inf outside."""
    x, y = log_probs.detach().double(), advantages.double()
    product = (x - F.masked_mean(x, mask)) * (y - F.masked_mean(y, mask))
    return torch.where(mask, product, -torch.inf)


def random_order(sample_ids: Tensor, width: int, seed: int) -> Tensor:
    """int64 [B, width]: a random number for each token, drawn from its sample's id, its place and `seed` (the finaliser of splitmix64)."""
    x = sample_ids[:, None] * 1_000_003 + torch.arange(width, device=sample_ids.device) + seed * 7_777_777_777
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ ((x >> shift) & ((1 << (64 - shift)) - 1))) * factor
    return (x ^ ((x >> 31) & ((1 << 33) - 1))) & ((1 << 62) - 1)


def first(chosen: Tensor, order: Tensor, count: int) -> Tensor:
    """bool like `chosen` (bool [B, T]): the `count` of its tokens that come first by `order`, smallest first."""
    places = chosen.flatten().nonzero().squeeze(-1)
    picked = places[order.flatten()[places].argsort(stable=True)[:count]]
    result = torch.zeros_like(chosen)
    result.view(-1)[picked] = True
    return result

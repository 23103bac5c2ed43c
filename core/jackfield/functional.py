"""Pure functions that algorithms and backends share. Shapes: B samples, T tokens, V vocabulary. No function reads behind its mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jackfield.batch import Batch


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` where `mask` (same shape, bool); 0 for an empty mask."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, *, shift: bool = True, eps: float = 1e-8) -> Tensor:
    """`x` with mean 0 (if `shift`) and unbiased variance 1 over `mask`, 0 outside; unchanged where fewer than two are valid (law 14)."""
    count = int(mask.sum())
    clean = torch.where(mask, x, 0)
    if count < 2:
        return clean
    mean = clean.sum() / count
    variance = torch.where(mask, (x - mean).square(), 0).sum() / (count - 1)
    white = (x - mean) * torch.rsqrt(variance + eps)
    return torch.where(mask, white if shift else white + mean, 0)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str) -> Tensor:
    """Per-token estimate of KL(pi || ref) from samples of pi; http://joschu.net/blog/kl-approx.html.

    With d = log_probs - ref_log_probs: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d. Differentiated as written, in expectation over
    samples of pi, k1 gives gradient 0, k2 the exact gradient of KL(pi || ref), k3 that of the forward KL(ref || pi). `k3+` has k3's
    value and k2's gradient. `unbiased` has k1's value and, through the score function, the exact gradient:
    grad = d * grad log pi, which is k2's. Both are offered since the value is what gets reported.
    """
    d = log_probs - ref_log_probs
    match estimator:
        case "k1":
            return d
        case "k2":
            return d.square() / 2
        case "k3":
            return torch.expm1(-d) + d
        case "k3+":
            k2 = d.square() / 2
            return (torch.expm1(-d) + d).detach() + k2 - k2.detach()
        case "unbiased":
            k2 = d.square() / 2
            return d.detach() + k2 - k2.detach()
    raise ValueError(f"unknown KL estimator {estimator!r}; choose k1, k2, k3, k3+ or unbiased")


def adaptive_kl_multiplier(kl: float, target: float, samples: int, horizon: int) -> float:
    """Factor on the KL coefficient after a step that saw `kl` over `samples` (arXiv 1909.08593, section 2.2)."""
    return 1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon


def group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    """Dense group numbers int64 [B] and their count."""
    _, index = torch.unique(group_ids, return_inverse=True)
    return index, int(index.max()) + 1 if index.numel() else 0


def split_groups(batch: Batch, parts: int, *, seed: int) -> Iterator[Batch]:
    """Up to `parts` mini-batches of whole groups, as even as they come, in an order drawn from `seed`; one part keeps the order."""
    if parts == 1:
        yield batch
        return
    index, groups = group_index(batch.group_ids)
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))
    for chosen in torch.tensor_split(order, min(parts, max(groups, 1))):
        yield batch[torch.isin(index, chosen)]

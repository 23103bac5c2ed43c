"""Masked means and whitening; no function reads behind its mask."""

from __future__ import annotations

import torch
from torch import Tensor


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` where `mask` (same shape, bool); 0 for an empty mask."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] to [B, 1]: mean of each sample over its mask; 0 for a sample without tokens."""
    return torch.where(mask, x, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, *, shift: bool = True, eps: float = 1e-8) -> Tensor:
    """`x` with mean 0 (if `shift`) and unbiased variance 1 over `mask`, 0 outside.

    Unchanged where fewer than two are valid; exactly 0 (or the mean) where all valid ones are equal (law 14). `eps` is in the variance.
    """
    count = int(torch.count_nonzero(mask))  # mask.sum() would make an int64 copy of the mask first
    clean = torch.where(mask, x, 0)
    if count < 2:
        return clean
    mean = (clean.sum(-1).sum(dtype=torch.float64) / count).to(x.dtype)
    clean.sub_(mean).masked_fill_(~mask, 0)
    variance = torch.linalg.vector_norm(clean, dim=-1).double().square().sum() / (count - 1)
    # Of a bool tensor any() takes many times as long as amax() of its bytes.
    first = x.flatten()[mask.flatten().view(torch.uint8).argmax()]
    clean.mul_(torch.rsqrt(variance + eps).to(x.dtype) * ((x != first) & mask).view(torch.uint8).amax())
    return clean if shift else clean.add_(mean).masked_fill_(~mask, 0)

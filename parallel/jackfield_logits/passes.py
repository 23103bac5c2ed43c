"""One pass over a chunk of logits forward, one backward: each a function that is one kernel where there is a compiler for it (CUDA)."""

from __future__ import annotations

import torch
from torch import Tensor

LOW = -1e30
"""Stands for -inf where the difference of two -inf would be NaN."""


def _scan(logits: Tensor, local: Tensor, scale: float, real: int, more: bool) -> Tensor:
    """With z the scaled logits and e = exp(z - max): max, sum e, z at `local`, and if `more` sum e z, sum e^2; float32 [5, n]."""
    z = logits.float().mul(scale) if logits.dtype == torch.float32 else logits.float().mul_(scale)
    if real < z.shape[1]:
        z[:, real:] = -torch.inf
    top = z.amax(-1, keepdim=True).clamp_(min=LOW)
    at = z.gather(-1, local[:, None])[:, 0]
    e = (z - top).exp_()
    total = e.sum(-1)
    weighted, squares = total, total
    if more:
        weighted = z.clamp_(min=LOW).mul_(e).sum(-1)
        squares = e.square_().sum(-1)
    return torch.stack((top[:, 0], total, at, weighted, squares))


def concluded(scanned: Tensor) -> tuple[Tensor, Tensor]:
    """From `scan` of the whole vocabulary: (log-prob, entropy, sum p^2) [3, n], the last two only where it was told `more`, and the log of
    the normaliser [n]."""
    top, total, at, weighted, squares = scanned
    normaliser = top + total.log()
    return torch.stack((at - normaliser, normaliser - weighted / total, squares / total.square())), normaliser


def _slopes(
    logits: Tensor, local: Tensor, numbers: Tensor, scale: float, real: int, factor: float, more: bool, dtype: torch.dtype
) -> Tensor:
    """The gradient of the logits [n, v] from `numbers` [6, n]: log of the normaliser, entropy, sum p^2, and the three gradients.

    With p the probabilities: d log-prob = onehot - p, d entropy = -p (log p + entropy), d sum p^2 = 2 p (p - sum p^2). `local` is -1
    where another rank holds the label; `factor` is the inverse temperature.
    """
    normaliser, entropy, squares, grad_log_prob, grad_entropy, grad_squares = numbers.unsqueeze(-1)
    z = logits.float().mul(scale) if logits.dtype == torch.float32 else logits.float().mul_(scale)
    if real < z.shape[1]:
        z[:, real:] = -torch.inf
    log_p = z.sub_(normaliser).clamp_(min=LOW)
    p = log_p.exp()
    if more:
        slope = log_p.add_(entropy).mul_(-grad_entropy).sub_(grad_log_prob)
        slope += (p - squares).mul_(2 * grad_squares)
        grad = p.mul_(slope)
    else:
        grad = p.mul_(-grad_log_prob)
    if grad.is_cuda:  # one fused kernel; a scatter would split it in two
        grad = grad + torch.where(torch.arange(z.shape[1], device=z.device) == local[:, None], grad_log_prob, 0)
    else:
        grad.scatter_add_(-1, local.clamp(min=0)[:, None], torch.where(local[:, None] >= 0, grad_log_prob, 0))
    return grad.mul_(factor).to(dtype)


scan = torch.compile(_scan, dynamic=True) if torch.cuda.is_available() else _scan
slopes = torch.compile(_slopes, dynamic=True) if torch.cuda.is_available() else _slopes

"""Collectives with the gradients that this backend needs."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _GatherSequence(torch.autograd.Function):
    """All-gather along dimension 0; the gradient is summed over ranks and scattered."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        out = grad.new_empty((grad.shape[0] // ctx.group.size(), *grad.shape[1:]))
        dist.reduce_scatter_tensor(out, grad.contiguous(), group=ctx.group)
        return out, None


def gather_sequence(x: Tensor, group: Any) -> Tensor:
    """`x` [s, ...] of every rank, one after the other: [s x ranks, ...]. Backward: reduce-scatter."""
    return x if group.size() == 1 else _GatherSequence.apply(x, group)


class _SumReplicated(torch.autograd.Function):
    """All-reduce whose result every rank uses in the same way; each rank's gradient is then its own, so backward is the identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        x = x.clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def sum_replicated(x: Tensor, group: Any) -> Tensor:
    """Sum of `x` over ranks, for a result that all ranks feed into the same computation (law 3: its gradient counts once)."""
    return x if group.size() == 1 else _SumReplicated.apply(x, group)

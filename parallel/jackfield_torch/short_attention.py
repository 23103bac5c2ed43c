"""Causal attention in bfloat16 for samples of a few hundred tokens on a CPU, by plain matrix products.

PyTorch's CPU kernel multiplies in small tiles, without the machine's matrix instructions in its backward pass: 4 to 8 times slower here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jackfield_torch.packing import Layout


class ShortAttention(torch.autograd.Function):
    """[1, H, N, D] and twice [1, K, N, D] packed (or [B, H or K, L, D] padded), bfloat16, to [1, N, H, D] (or [B, L, H, D]).

    Scores and softmax are float32; the probabilities are kept for backward in bfloat16, as fused kernels round them. B samples of at
    most L tokens, H heads over K key heads, N rows.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: Layout, scale: float) -> Tensor:
        samples, width = layout.rows.shape
        heads, kv_heads, size = query.shape[1], key.shape[1], query.shape[3]
        query_rows, key_rows = _rows(layout.rows, heads), _rows(layout.rows, kv_heads)
        shape = (samples * kv_heads, -1, size)
        q = _flat(query).index_select(0, query_rows).view(shape)
        k, v = (_flat(x).index_select(0, key_rows).view(shape) for x in (key, value))
        hidden = torch.full((width, width), -torch.inf).triu_(1).repeat(heads // kv_heads, 1)
        scores = torch.baddbmm(hidden, q.float(), k.float().transpose(1, 2), alpha=scale)
        weights = scores.softmax(-1).to(query.dtype)
        out = torch.bmm(weights, v)
        ctx.save_for_backward(q, k, v, weights, key_rows)
        ctx.outputs, ctx.scale, ctx.rows = _outputs(layout, heads), scale, key.shape[0] * key.shape[2]
        ctx.like = query.shape, key.shape
        return out.view(-1, size).index_select(0, ctx.outputs).view(query.shape[0], query.shape[2], heads, size)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        """With P the weights and G the gradient: dV = P'G, dS = P (GV' - rowsum(P GV')), dQ = dS K, dK = dS'Q, the last two scaled."""
        q, k, v, weights, key_rows = ctx.saved_tensors
        query_shape, key_shape = ctx.like
        size = q.shape[-1]
        grad_out = torch.zeros_like(q)
        grad_out.view(-1, size).index_copy_(0, ctx.outputs, grad.reshape(-1, size))
        grad_v = torch.bmm(weights.transpose(1, 2), grad_out)
        grad_weights = torch.bmm(grad_out, v.transpose(1, 2))
        slope = torch._softmax_backward_data(grad_weights, weights, -1, weights.dtype)
        grad_q = torch.bmm(slope, k).view(-1, size).index_select(0, ctx.outputs).mul_(ctx.scale)
        grad_k = torch.bmm(slope.transpose(1, 2), q)

        def gathered(x: Tensor, scale: float) -> Tensor:
            total = torch.zeros(ctx.rows * key_shape[1], size).index_add_(0, key_rows, x.view(-1, size).float())
            return _heads(total.mul_(scale).to(x.dtype), key_shape)

        return _heads(grad_q, query_shape), gathered(grad_k, ctx.scale), gathered(grad_v, 1.0), None, None


def _flat(x: Tensor) -> Tensor:
    """[B, H, N, D] as [B * N * H, D]: without a copy where the heads of a token lie together, as they do."""
    return x.transpose(1, 2).reshape(-1, x.shape[-1])


def _heads(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The inverse of `_flat`."""
    return x.view(shape[0], shape[2], shape[1], shape[3]).transpose(1, 2)


def _rows(rows: Tensor, heads: int) -> Tensor:
    """int64 [B * H * L]: where head h of token l of sample b stands in `_flat`."""
    return (rows[:, None] * heads + torch.arange(heads)[:, None]).flatten()


def _outputs(layout: Layout, heads: int) -> Tensor:
    """int64 [N * H]: where head h of row n stands in attention's [B, H, L]."""
    samples, width = layout.rows.shape
    source = torch.arange(samples * width) if layout.source is None else layout.source
    sample, token = source // width, source % width
    return ((sample[:, None] * heads + torch.arange(heads)) * width + token[:, None]).flatten()

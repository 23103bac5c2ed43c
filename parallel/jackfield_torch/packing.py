"""Micro-batches without padding: one row of tokens, shared prompts once, and the attention that keeps samples apart.

Linear layers, norms and the head see only real tokens. Attention gathers each sample's own tokens from that row, so it costs what
it costs padded; what is packed away there is everything else. Samples that begin with the same prompt tokens share them: the prompt
runs once, and the gradients of its keys and values add up over the samples (exact, since a causal model's prompt does not see responses).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface

from jackfield.batch import Batch
from jackfield_torch.short_attention import ShortAttention

NAME = "jackfield"
"""Name of this attention in transformers' registry."""
_NARROW = 256
"""Longest samples, in tokens, for which all scores are held at once; PyTorch's kernel is as quick from about there on."""


@dataclass
class Layout:
    """One micro-batch as the model sees it: N rows of tokens, from B samples of at most L tokens."""

    tokens: Tensor
    """int64 [1, N] packed, or [B, L] padded."""
    positions: Tensor
    """int64, the shape of `tokens`: each token's position in its own sample."""
    rows: Tensor
    """int64 [B, L]: where token t of sample b stands in the flattened `tokens`; padding points at the sample's first token."""
    source: Tensor | None = None
    """int64 [N]: the element of the flattened [B, L] from which attention's output for each row is taken; None where padded."""


def layout(batch: Batch, *, pack: bool, share: bool) -> Layout:
    """Lay out a trimmed micro-batch; `share` merges equal prompts. Tokens behind `lengths` are never looked at.

    A sample's last token is left out: it is scored, but nothing that follows it is.
    """
    inputs = (batch.lengths - 1).clamp(min=1)
    lengths = inputs.tolist()
    size, width = len(lengths), max(lengths)
    device = batch.tokens.device
    column = torch.arange(width, device=device)
    if not pack:
        tokens = torch.where(column < inputs[:, None], batch.tokens[:, :width], 0)
        rows = torch.arange(size * width, device=device).view(size, width)
        return Layout(tokens, column.expand(size, width), rows)
    keys = [tuple(t[:n]) for t, n in zip(batch.tokens.tolist(), batch.prompt_lengths.tolist(), strict=True)] if share else []
    first: dict[Any, int] = {}
    flat: list[Tensor] = []  # elements of [B, L] in packed order
    rows = torch.empty(size, width, dtype=torch.int64)
    start = 0
    for b, length in enumerate(lengths):
        own = 0
        if share and keys[b]:
            owner = first.get(keys[b])
            if owner is None or lengths[owner] < len(keys[b]):  # a sample without a response has not all of its prompt here
                first[keys[b]] = b
            else:
                own = min(len(keys[b]), length)
                rows[b, :own] = rows[owner, :own]
        rows[b, own:length] = torch.arange(start, start + length - own)
        rows[b, length:] = rows[b, 0]
        flat.append(torch.arange(b * width + own, b * width + length))
        start += length - own
    source = torch.cat(flat).to(device)
    tokens = batch.tokens[:, :width].reshape(-1)[source]
    return Layout(tokens[None], (source % width)[None], rows.to(device), source)


class _Gather(torch.autograd.Function):
    """x[:, :, rows]: [1, H, N, D] to [1, H, B * L, D]. Backward adds up what the samples of a shared prompt and padding give."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(2, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_add_(2, rows, grad), None


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    jackfield_layout: Layout | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Causal attention in transformers' calling convention: [1, heads, N, D] each, to [1, N, heads, D].

    Right padding needs no mask under causality. Raises ValueError on what it does not know (logit caps, sinks): the backend then
    finds out at setup and uses the model's own attention.
    """
    odd = [n for n in ("softcap", "s_aux", "position_bias") if unknown.get(n) is not None]
    if odd or attention_mask is not None or jackfield_layout is None:
        raise ValueError(f"attention features {odd or 'mask or missing layout'} are not supported when packing")
    samples, width = jackfield_layout.rows.shape
    dtype, cpu = query.dtype, query.device.type == "cpu"
    if cpu and dtype == torch.bfloat16 and width <= _NARROW and not dropout and not sliding_window:
        scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
        return ShortAttention.apply(query, key, value, jackfield_layout, scaling), None
    if jackfield_layout.source is not None:
        rows = jackfield_layout.rows.reshape(-1)
        query, key, value = (
            _Gather.apply(x, rows).view(x.shape[1], samples, width, x.shape[3]).transpose(0, 1) for x in (query, key, value)
        )
    narrow = cpu and dtype != torch.float32
    if narrow:  # CPU kernels for attention in bfloat16 are slower than the casts, in the backward pass four times
        query, key, value = query.float(), key.float(), value.float()
    mask = None
    if sliding_window is not None and width > sliding_window:
        column = torch.arange(width, device=query.device)
        distance = column[:, None] - column
        mask = (distance >= 0) & (distance < sliding_window)
    out = F.scaled_dot_product_attention(
        query, key, value, mask, dropout, is_causal=mask is None, scale=scaling, enable_gqa=key.shape[1] != query.shape[1]
    )
    out = out.transpose(1, 2)
    if narrow:
        out = out.to(dtype)
    if jackfield_layout.source is not None:
        heads, size = out.shape[2:]
        out = out.reshape(1, samples * width, heads, size).index_select(1, jackfield_layout.source)
    return out, None


AttentionInterface.register(NAME, attention)

"""From a micro-batch [b, T] to what one rank's model reads, and back: padding or packing, context-parallel slices, labels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jackfield.batch import Batch
from jackfield_megatron.attention import Geometry

_PACKED_MULTIPLE = 64
"""Packed micro-batches are rounded up to this many tokens on CUDA: matrix products of odd sizes are slow."""


@dataclass(frozen=True)
class Rope:
    """Rotary embedding of a model."""

    frequencies: Tensor
    """float32 [head_dim / 2]"""
    scaling: float
    dtype: torch.dtype

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [s, 1, 1, head_dim] for positions [s]."""
        angles = torch.outer(positions.float(), self.frequencies).repeat(1, 2)[:, None, None, :]
        return (angles.cos() * self.scaling).to(self.dtype), (angles.sin() * self.scaling).to(self.dtype)


@dataclass
class Inputs:
    """One micro-batch for one rank."""

    batch: Batch
    tokens: Tensor
    """int64 [b, s], or [1, s] packed."""
    geometry: Geometry
    wanted: Tensor
    """int64 [N]: positions in [s x b] whose next token's output is needed."""
    labels: Tensor
    """int64 [N]: those next tokens."""
    columns: Tensor
    """int64 [N]: where their outputs stand in the flattened [b x T]."""

    def spread(self, values: Tensor) -> Tensor:
        """Outputs [N] as [b, T] with 0 where nothing was asked for."""
        b, t = self.batch.tokens.shape
        return values.new_zeros(b * t).index_put((self.columns,), values).view(b, t)


def prepare(batch: Batch, mask: Tensor, rope: Rope, *, packed: bool, sequence_split: int = 1, cp_size: int = 1, cp_rank: int = 0) -> Inputs:
    """Inputs that yield outputs for the tokens in `mask` (bool [b, T]). `sequence_split`: the TP size under sequence parallelism."""
    mask = mask & batch.attention_mask
    mask[:, :1] = False
    if packed:
        return _packed(batch, mask, rope, sequence_split)
    b, t = batch.tokens.shape
    multiple = sequence_split * (2 * cp_size if cp_size > 1 else 1)
    width = max(-(-t // multiple), 1) * multiple
    tokens = torch.nn.functional.pad(torch.where(batch.attention_mask, batch.tokens, 0), (0, width + 1 - t))
    needed = torch.nn.functional.pad(mask, (0, width + 1 - t))[:, 1:]
    positions = torch.arange(width, device=tokens.device)
    if cp_size > 1:
        chunks = positions.chunk(2 * cp_size)
        positions = torch.cat((chunks[cp_rank], chunks[2 * cp_size - 1 - cp_rank]))
    wanted = needed[:, positions].t().flatten().nonzero().squeeze(1)
    where, row = positions[wanted // max(b, 1)], wanted % max(b, 1)
    cos, sin = rope.at(positions)
    return Inputs(batch, tokens[:, positions], Geometry(cos, sin), wanted, tokens[row, where + 1], row * t + where + 1)


def _packed(batch: Batch, mask: Tensor, rope: Rope, sequence_split: int) -> Inputs:
    t = batch.tokens.shape[1]
    flat = batch.attention_mask.flatten().nonzero().squeeze(1)
    lengths = [n for n in batch.lengths.tolist() if n]
    multiple = sequence_split * (_PACKED_MULTIPLE if batch.tokens.is_cuda else 1)
    total = max(-(-len(flat) // multiple), 1) * multiple
    extra = total - len(flat)
    positions = torch.cat((flat % max(t, 1), torch.arange(extra, device=flat.device)))
    tokens = torch.cat((batch.tokens.flatten()[flat], flat.new_zeros(extra)))
    lengths += [extra] if extra else []
    cu = torch.tensor([0, *lengths], device=flat.device).cumsum(0).int()
    wanted = mask.flatten()[flat].nonzero().squeeze(1) - 1
    cos, sin = rope.at(positions)
    geometry = Geometry(cos, sin, cu, tuple(lengths), max(lengths))
    return Inputs(batch, tokens[None], geometry, wanted, tokens[wanted + 1], flat[wanted + 1])

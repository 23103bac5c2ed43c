"""Tensors that are spread alike, planned as one: what makes a plan's cost independent of the number of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jackfield.errors import ConfigError
from jackfield.shard import Shard
from jackfield_reshard.canonical import Piece, align
from jackfield_reshard.families import Tensor
from jackfield_reshard.layout import Layout
from jackfield_reshard.sides import Holding, depth_of, holding, stages

ITEM = {
    **dict.fromkeys(("float64", "int64"), 8),
    **dict.fromkeys(("float32", "int32"), 4),
    **dict.fromkeys(("bfloat16", "float16", "int16"), 2),
    **dict.fromkeys(("float8_e4m3fn", "uint8", "int8", "bool"), 1),
}
"""Bytes of an element, by torch's name of the type; here because planning imports no torch."""


Rows = tuple[tuple[int, ...], ...]
"""(rank, offset..., size...) of each box."""


@dataclass(frozen=True)
class TensorClass:
    """Tensors of one shape whose boxes are on the same ranks, on both sides."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    source_dtype: str
    dtype: str
    """The destination's type."""
    source: Holding
    destination: Holding
    interleaved: bool = False
    """Whether the source's layout keeps it from being a contiguous part of the destination's tensor (Megatron's fused QKV)."""

    @property
    def wire_bytes(self) -> int:
        """Bytes of an element on the wire: the narrower type travels."""
        return min(ITEM[self.source_dtype], ITEM[self.dtype])


def between(
    table: Sequence[Tensor],
    source: Layout,
    destination: Layout,
    source_dtype: str = "bfloat16",
    dtype: str = "bfloat16",
    fused_qkv: bool = True,
) -> list[TensorClass]:
    """The classes of a model between two layouts, in closed form: no list of shards is built.

    `fused_qkv` says whether a Megatron side interleaves query, key and value by group.
    """
    depth = depth_of(list(table))
    groups = next((t.units for t in table if t.cut == "kv"), 1)
    merged: dict[tuple[object, ...], tuple[Tensor, tuple[int, ...], tuple[int, ...], list[str]]] = {}
    for tensor in table:
        to = [(set(held), where) for held, where in stages(tensor, destination, depth)]
        for held, where in stages(tensor, source, depth):
            for wanted, there in to:
                names = [tensor.name.format(layer) for layer in held if layer in wanted]
                if names:
                    mixed = tensor.cut in ("heads", "kv")
                    key = (tensor.shape, tensor.cut, tensor.units, tensor.expert, tensor.dtype, where, there, mixed)
                    merged.setdefault(key, (tensor, where, there, []))[3].extend(names)
    out = []
    for tensor, where, there, names in merged.values():
        have, need = holding(tensor, source, where), holding(tensor, destination, there)
        fused = fused_qkv and source.kind == "megatron" and tensor.cut in ("heads", "kv") and groups // source.tp > 1
        types = (tensor.dtype, tensor.dtype) if tensor.dtype else (source_dtype, dtype)
        out.append(TensorClass(tuple(names), tensor.shape, *types, have, need, fused))
    return out


def _gather(ranks: Sequence[Sequence[Piece]]) -> dict[str, tuple[list[tuple[int, ...]], Piece]]:
    out: dict[str, tuple[list[tuple[int, ...]], Piece]] = {}
    for rank, pieces in enumerate(ranks):
        for piece in pieces:
            rows = out.setdefault(piece.name, ([], piece))[0]
            rows.append((rank, *piece.offset, *piece.size))
    return out


def of(
    source: Sequence[Sequence[Shard]], destination: Sequence[Sequence[Shard]]
) -> tuple[list[TensorClass], list[list[Piece]], list[list[Piece]]]:
    """The classes of real shards (one list a rank), and the canonical pieces of both sides.

    Raises ConfigError where the destination needs a tensor that no source rank has.
    """
    mine, theirs = align(source, destination)
    have, need = _gather(mine), _gather(theirs)
    merged: dict[tuple[tuple[int, ...], str, str, Rows, Rows], list[str]] = {}
    for name, (rows, piece) in need.items():
        if name not in have:
            raise ConfigError(
                f"weight {name}: the engine needs it and the training backend has no such tensor (it has {len(have)} others, such as "
                f"{next(iter(have), 'none')}); both sides must be the same model"
            )
        held, origin = have[name]
        key = (piece.shape, origin.dtype, piece.dtype, tuple(dict.fromkeys(held)), tuple(dict.fromkeys(rows)))
        merged.setdefault(key, []).append(name)
    out = [
        TensorClass(tuple(names), shape, source_dtype, dtype, _rows(holders), _rows(needers))
        for (shape, source_dtype, dtype, holders, needers), names in merged.items()
    ]
    return out, mine, theirs


def _rows(rows: Rows) -> Holding:
    table = np.array(rows, dtype=np.int64)
    dimensions = (table.shape[1] - 1) // 2
    return Holding(table[:, 0], table[:, 1 : 1 + dimensions], table[:, 1 + dimensions :])

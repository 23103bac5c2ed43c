"""Views: parts of shards' tensors, and one side's shards seen in the other side's storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from jackfield.shard import Shard
from jackfield_reshard.boxes import Box, contains
from jackfield_reshard.canonical import Piece, align
from jackfield_reshard.cover import by_name, cover


@dataclass(frozen=True)
class Part:
    """A box of a piece: what one copy or one message moves."""

    piece: Piece
    box: Box

    def view(self, shards: Sequence[Shard]) -> Tensor:
        """The part as a view [*box size] of its shard's tensor."""
        tensor = shards[self.piece.shard].tensor
        assert tensor is not None
        return self.of(tensor)

    def of(self, tensor: Tensor) -> Tensor:
        """The part as a view of the given tensor of its shard."""
        view = self.piece.view(tensor)
        for dimension, (at, n) in enumerate(zip(*self.box, strict=True)):
            if n != view.shape[dimension]:
                view = view.narrow(dimension, at - self.piece.offset[dimension], n)
        return view


def views_in(wanted: Sequence[Shard], owner: Sequence[Shard]) -> list[Shard | None]:
    """For each wanted shard a view of the owner's storage that is exactly its box, or None where layouts or types differ."""
    (mine,), (theirs,) = align([owner], [wanted])
    held = by_name(mine)
    wants: dict[int, list[Piece]] = {}
    for piece in theirs:
        wants.setdefault(piece.shard, []).append(piece)
    out: list[Shard | None] = []
    own: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for shard in owner:
        own.setdefault((shard.name, shard.shape), []).append(shard)
    for index, shard in enumerate(wanted):
        view = _same(shard, own.get((shard.name, shard.shape), ()))
        out.append(_view(shard, wants.get(index, []), held, owner) if view is None else replace(shard, tensor=view))
    return out


def _same(shard: Shard, owned: Sequence[Shard]) -> Tensor | None:
    """The view, where the owner writes the tensor the same way."""
    for own in owned:
        if own.tensor is not None and own.dtype == shard.dtype and contains((own.offset, own.size), (shard.offset, shard.size)):
            view = own.tensor
            for dimension, (at, n) in enumerate(zip(shard.offset, shard.size, strict=True)):
                view = view.narrow(dimension, at - own.offset[dimension], n)
            return view
    return None


def _view(shard: Shard, wants: Sequence[Piece], held: dict[str, list[Piece]], owner: Sequence[Shard]) -> Shard | None:
    """The shard in the owner's storage, put together from the pieces that it and the owner write differently."""
    blank = torch.empty(shard.size, device="meta")
    parts = []
    for want in wants:
        alike = [p for p in held.get(want.name, ()) if owner[p.shard].dtype == shard.dtype and owner[p.shard].tensor is not None]
        found, missing = cover(want.box, alike, lambda piece: piece.box)
        if missing:
            return None
        parts += [(Part(want, box).of(blank), Part(piece, box).view(owner)) for piece, box in found]
    view = _assemble(blank, parts)
    return None if view is None else replace(shard, tensor=view)


def _assemble(blank: Tensor, parts: Sequence[tuple[Tensor, Tensor]]) -> Tensor | None:
    """One strided view of one storage that puts every part where `blank` has it; None where there is none.

    Each part is (view of `blank`, view of the storage), of equal shape. Steps in `blank` and in the storage must be proportional in
    every dimension of `blank`: where no part extends along a dimension, its stride follows from two parts' offsets.
    """
    if not parts:
        return None
    first = parts[0][1]
    dims = [d for d in range(blank.dim()) if blank.shape[d] > 1]
    strides: dict[int, int] = {}
    places: list[list[int]] = []
    for place, view in parts:
        if view.untyped_storage().data_ptr() != first.untyped_storage().data_ptr() or view.dtype != first.dtype:
            return None
        for n, step, stride in zip(place.shape, place.stride(), view.stride(), strict=True):
            if n == 1:
                continue
            d = next(d for d in dims if blank.stride(d) <= step)
            factor = step // blank.stride(d)
            if stride % factor or strides.setdefault(d, stride // factor) != stride // factor:
                return None
        at = int(place.storage_offset())
        places.append([at // blank.stride(d) % blank.shape[d] for d in range(blank.dim())])
    starts = [int(view.storage_offset()) for _, view in parts]
    for own, start in zip(places, starts, strict=True):
        unknown = [d for d in dims if own[d] != places[0][d] and d not in strides]
        if len(unknown) == 1:
            d = unknown[0]
            known = sum((own[e] - places[0][e]) * strides[e] for e in dims if e in strides)
            strides[d] = (start - starts[0] - known) // (own[d] - places[0][d])
    if any(d not in strides or strides[d] <= 0 for d in dims):
        return None
    base = starts[0] - sum(places[0][d] * strides[d] for d in dims)
    for own, start in zip(places, starts, strict=True):
        if start != base + sum(own[d] * strides[d] for d in dims):
            return None
    return first.as_strided(blank.shape, [strides.get(d, 1) for d in range(blank.dim())], base)

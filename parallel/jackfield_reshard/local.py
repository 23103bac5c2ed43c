"""Views: parts of shards' tensors, and one side's shards seen in the other side's storage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from jackfield.shard import Shard
from jackfield_reshard.boxes import Box, contains
from jackfield_reshard.canonical import Piece, align
from jackfield_reshard.cover import by_name


@dataclass(frozen=True)
class Part:
    """A box of a piece: what one copy or one message moves."""

    piece: Piece
    box: Box

    def view(self, shards: Sequence[Shard]) -> Tensor:
        """The part as a view [*box size] of its shard's tensor."""
        tensor = shards[self.piece.shard].tensor
        assert tensor is not None
        view = self.piece.view(tensor)
        for dimension, (at, n) in enumerate(zip(*self.box, strict=True)):
            if n != view.shape[dimension]:
                view = view.narrow(dimension, at - self.piece.offset[dimension], n)
        return view


def views_in(wanted: Sequence[Shard], owner: Sequence[Shard]) -> list[Shard | None]:
    """For each wanted shard a view of the owner's storage that is exactly its box, or None where layouts or types differ."""
    (mine,), (theirs,) = align([owner], [wanted])
    held, wants = by_name(mine), {}
    for piece in theirs:
        wants.setdefault(piece.shard, []).append(piece)
    out: list[Shard | None] = []
    own: dict[tuple[str, tuple[int, ...]], list[Shard]] = {}
    for shard in owner:
        own.setdefault((shard.name, shard.shape), []).append(shard)
    for index, shard in enumerate(wanted):
        pieces = wants.get(index, [])
        view = _same(shard, own.get((shard.name, shard.shape), ()))
        if view is None and len(pieces) == 1:
            view = _view(shard, pieces[0], held, owner)
        out.append(None if view is None else replace(shard, tensor=view))
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


def _view(shard: Shard, want: Piece, held: dict[str, list[Piece]], owner: Sequence[Shard]) -> Tensor | None:
    for piece in held.get(want.name, ()):
        if contains(piece.box, want.box) and owner[piece.shard].dtype == shard.dtype and owner[piece.shard].tensor is not None:
            try:
                return Part(piece, want.box).view(owner).view(shard.size)
            except RuntimeError:  # merging interleaved dimensions is not a view
                return None
    return None

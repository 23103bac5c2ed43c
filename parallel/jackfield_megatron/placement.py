"""Where every Hugging Face tensor lies in this rank's Megatron parameters: the tables of families.py applied to one layout."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from jackfield.shard import Shard
from jackfield_megatron.families import ENDS, VALUE_END, Piece, Row, Shape

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_EXPERT = re.compile(r"local_experts\.(\d+)\.")


@dataclass(frozen=True)
class Ranks:
    """This rank's coordinates."""

    tp: int
    tp_size: int
    ep: int = 0
    ep_size: int = 1
    etp: int = 0
    etp_size: int = 1


@dataclass(frozen=True)
class Place:
    """A box of an HF tensor and the block of a local parameter that holds it."""

    name: str
    """Canonical HF name."""
    file: str
    """Name in checkpoint files that store experts one by one; equal to `name` for everything else."""
    shape: tuple[int, ...]
    """HF shape."""
    offset: tuple[int, ...]
    size: tuple[int, ...]
    file_shape: tuple[int, ...]
    """Shape of the tensor called `file`."""
    file_offset: tuple[int, ...]
    """First index of the box in the tensor called `file`."""
    split: str
    """How the row of the table says that the parameter is split."""
    parameter: Tensor = field(repr=False)
    rows: slice
    """Rows (first dimension) of the parameter."""

    @property
    def tensor(self) -> Tensor:
        """View of the parameter's block in the box's shape."""
        return self.parameter.data[self.rows].view(self.size)


def places(modules: Sequence[tuple[str, Tensor, int]], shape: Shape, ranks: Ranks, *, head: str) -> Iterator[Place]:
    """The places in these parameters, in order; each is (name in the model chunk, parameter, number of the chunk's first layer)."""
    ends = {row.parameter: row for row in ENDS}
    if head == "value":
        ends["output_layer.weight"] = VALUE_END
    elif shape.tied:
        ends["output_layer.weight"] = Row("output_layer.weight", "vocab", ends["embedding.word_embeddings.weight"].pieces)
    for name, parameter, first_layer in modules:
        match = _LAYER.fullmatch(name)
        if match is None:
            yield from _place(ends[name], parameter, shape, ranks, "", 0)
            continue
        layer, rest = int(match[1]) + first_layer, match[2]
        expert = 0
        if found := _EXPERT.search(rest):
            expert = int(found[1]) + ranks.ep * (shape.experts // ranks.ep_size)
            rest = _EXPERT.sub("local_experts.{e}.", rest)
        row = next(r for r in shape.layer(layer) if r.parameter == rest)
        yield from _place(row, parameter, shape, ranks, f"model.layers.{layer}.", expert)


def _place(row: Row, parameter: Tensor, shape: Shape, ranks: Ranks, prefix: str, expert: int) -> Iterator[Place]:
    is_expert = row.split.startswith("expert")
    rank, parts = (ranks.etp, ranks.etp_size) if is_expert else (ranks.tp, ranks.tp_size)
    start = 0
    for piece in row.pieces:
        sizes = [shape.sizes[d] for d in piece.dims.split()]
        lead, matrix = (sizes[:1], sizes[1:]) if is_expert else ([], sizes)
        first = shape.sizes[piece.first] if piece.first else 0
        extent = [shape.sizes[piece.rows] if piece.rows else matrix[0], *matrix[1:]]
        offset = [first] + [0] * (len(matrix) - 1)
        within = [0] * len(matrix)
        if row.split.endswith("rows"):
            extent[0] //= parts
            within[0] = rank * extent[0]
        elif row.split.endswith("columns"):
            extent[1] //= parts
            within[1] = rank * extent[1]
        elif row.split == "vocab":
            local = parameter.shape[0]
            within[0] = min(rank * local, matrix[0])
            extent[0] = min(local, matrix[0] - within[0])
        offset = [o + w for o, w in zip(offset, within, strict=True)]
        rows = slice(start, start + extent[0])
        start += extent[0]
        if extent[0] == 0:
            continue
        name = prefix + piece.name
        by_expert = bool(piece.file)
        yield Place(
            name=name,
            file=prefix + piece.file.format(e=expert) if by_expert else name,
            shape=tuple(sizes),
            offset=tuple(([expert] if lead else []) + offset),
            size=tuple([1] * len(lead) + extent),
            file_shape=tuple([shape.sizes[piece.rows] if piece.rows else matrix[0], *matrix[1:]] if by_expert else sizes),
            file_offset=tuple(within if by_expert else offset),
            split=row.split,
            parameter=parameter,
            rows=rows,
        )


def shards(items: Sequence[Place]) -> list[Shard]:
    """The contract's view of the places."""
    return [Shard(p.name, p.shape, p.offset, p.size, str(p.parameter.dtype).removeprefix("torch."), p.tensor) for p in items]


def fuse(tensors: Sequence[Tensor]) -> Tensor | None:
    """One tensor over blocks of rows that follow one another in the same storage, or None where they do not."""
    first = tensors[0]
    expected = first.storage_offset()
    for t in tensors:
        same = t.untyped_storage().data_ptr() == first.untyped_storage().data_ptr() and t.dtype == first.dtype
        if not same or t.storage_offset() != expected or not t.is_contiguous() or t.shape[1:] != first.shape[1:]:
            return None
        expected += t.numel()
    rows = sum(t.shape[0] for t in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride(), first.storage_offset())


__all__ = ["Piece", "Place", "Ranks", "fuse", "places", "shards"]

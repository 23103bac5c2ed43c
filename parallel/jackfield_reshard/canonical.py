"""One name and one logical shape for every element, whichever way its owner likes to write it.

Backends and engines name weights as Hugging Face does, but that leaves freedom: a query weight may come as `[heads x head size,
hidden]` or with its groups unflattened; an expert's weights by themselves or stacked; gate and up apart or in one tensor. Here every
shard becomes *pieces* in the one form that all planning is done in:

- experts are stacked, gate and up apart: `model.layers.0.mlp.experts.gate_proj.weight [experts, intermediate, hidden]`;
- a Mixtral checkpoint's `block_sparse_moe` and `w1 w3 w2` are `mlp` and `gate_proj up_proj down_proj`;
- shapes are the coarsest that every owner can be cut along (`boxes.refine`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from jackfield.errors import ConfigError
from jackfield.shard import Shard
from jackfield_reshard.boxes import Box, Ints, recut, refine

if TYPE_CHECKING:
    import torch

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)\.weight")
_STACK = re.compile(r"(.*\.experts)\.(gate_up_proj|gate_proj|up_proj|down_proj)(?:\.weight)?")
_MIXTRAL = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@dataclass(frozen=True)
class Piece:
    """A part of one shard in canonical form."""

    name: str
    shape: Ints
    offset: Ints
    size: Ints
    dtype: str
    shard: int
    """Index of the shard in its owner's list."""
    start: Ints
    """Where the piece begins inside the shard's tensor."""
    extent: Ints
    """Its extent inside the shard's tensor; as many elements as `size`."""

    @property
    def box(self) -> Box:
        return self.offset, self.size

    def view(self, tensor: torch.Tensor) -> torch.Tensor:
        """The piece as a view [*size] of its shard's tensor."""
        for dimension, (at, n) in enumerate(zip(self.start, self.extent, strict=True)):
            if n != tensor.shape[dimension]:
                tensor = tensor.narrow(dimension, at, n)
        return tensor if tensor.shape == self.size else tensor.view(self.size)


def _named(index: int, shard: Shard) -> list[Piece]:
    """The shard's pieces under canonical names, in its own shape; an expert's number of experts is still 0."""
    zero = (0,) * len(shard.size)
    name = shard.name.replace("block_sparse_moe.", "mlp.")
    if single := _EXPERT.fullmatch(name):
        prefix, expert, part = single.groups()
        name = f"{prefix}.{_MIXTRAL.get(part, part)}.weight"
        return [Piece(name, (0, *shard.shape), (int(expert), *shard.offset), (1, *shard.size), shard.dtype, index, zero, shard.size)]
    stack = _STACK.fullmatch(name)
    if stack is None:
        return [Piece(name, shard.shape, shard.offset, shard.size, shard.dtype, index, zero, shard.size)]
    prefix, part = stack.groups()
    if part != "gate_up_proj":
        return [Piece(f"{prefix}.{part}.weight", shard.shape, shard.offset, shard.size, shard.dtype, index, zero, shard.size)]
    experts, hidden = shard.shape[0], shard.shape[-1]
    elements = 1
    for n in shard.shape[1:-1]:
        elements *= n
    finer = refine(shard.shape, (experts, 2, elements // 2, hidden)) or shard.shape
    pieces = []
    for (start, extent), (offset, size) in recut((shard.offset, shard.size), shard.shape, finer):
        for half in range(offset[1], offset[1] + size[1]):
            at = tuple(s - o for s, o in zip(start, shard.offset, strict=True))
            inside = extent
            if size[1] == 2:  # both halves: along the dimension of the shard that holds the 2
                if len(shard.shape) == len(finer):
                    at, inside = (at[0], half - offset[1], *at[2:]), (extent[0], 1, *extent[2:])
                else:
                    at, inside = (at[0], at[1] + (half - offset[1]) * size[2], *at[2:]), (extent[0], size[2], *extent[2:])
            box = (offset[0], *offset[2:]), (size[0], *size[2:])
            part = ("gate_proj", "up_proj")[half]
            shape = (finer[0], *finer[2:])
            pieces.append(Piece(f"{prefix}.{part}.weight", shape, *box, shard.dtype, index, at, inside))
    return pieces


def named(shards: Sequence[Shard]) -> list[Piece]:
    """All pieces of one rank's shards under canonical names, empty ones left out."""
    return [piece for index, shard in enumerate(shards) if all(shard.size) for piece in _named(index, shard)]


def shapes(ranks: Iterable[Sequence[Piece]]) -> dict[str, Ints]:
    """For each canonical name the coarsest shape that all ranks' pieces can be cut along.

    Raises ConfigError naming the tensor where two owners disagree about it.
    """
    seen: dict[str, set[Ints]] = {}
    experts: dict[str, int] = {}
    for pieces in ranks:
        for piece in pieces:
            seen.setdefault(piece.name, set()).add(piece.shape)
            if piece.shape[:1] == (0,):
                experts[piece.name] = max(experts.get(piece.name, 0), piece.offset[0] + 1)
    out: dict[str, Ints] = {}
    for name, own in seen.items():
        stacked = [shape[0] for shape in own if shape[:1] != (0,)]
        count = max([experts.get(name, 0), *stacked[:1]])
        whole = {shape if shape[:1] != (0,) else (count, *shape[1:]) for shape in own}
        common = whole.pop()
        for shape in sorted(whole):
            finer = refine(common, shape)
            if finer is None:
                raise ConfigError(
                    f"{name}: one side has logical shape {list(common)}, the other {list(shape)}, "
                    "and no common refinement exists; both must describe the same Hugging Face tensor"
                )
            common = finer
        out[name] = common
    return out


def canonical(pieces: Sequence[Piece], common: dict[str, Ints]) -> list[Piece]:
    """Cut pieces to the common shapes."""
    out = []
    for piece in pieces:
        finer = common[piece.name]
        shape = piece.shape if piece.shape[:1] != (0,) else (finer[0], *piece.shape[1:])
        if shape == finer:
            out.append(piece if shape == piece.shape else replace(piece, shape=shape))
            continue
        for (offset, size), box in recut(piece.box, shape, finer):
            shift = tuple(o - p for o, p in zip(offset, piece.offset, strict=True))
            if len(piece.start) == len(shift):
                start, extent = tuple(s + o for s, o in zip(piece.start, shift, strict=True)), size
            elif len(piece.start) == len(shift) - 1:  # one expert by itself: its tensor lacks the dimension of experts
                start, extent = tuple(s + o for s, o in zip(piece.start, shift[1:], strict=True)), size[1:]
            else:
                raise ConfigError(f"{piece.name}: cannot cut a fused tensor of shape {list(shape)} along {list(finer)}")
            out.append(replace(piece, shape=finer, offset=box[0], size=box[1], start=start, extent=extent))
    return out


def align(source: Sequence[Sequence[Shard]], destination: Sequence[Sequence[Shard]]) -> tuple[list[list[Piece]], list[list[Piece]]]:
    """Canonical pieces of all source ranks and of all destination ranks, in common shapes.

    A destination that names a head which no source has gets the embedding: the weights are tied.
    """
    sources, destinations = [named(shards) for shards in source], [named(shards) for shards in destination]
    held = {piece.name for pieces in sources for piece in pieces}
    if HEAD not in held and EMBEDDING in held:
        destinations = [[replace(p, name=EMBEDDING) if p.name == HEAD else p for p in pieces] for pieces in destinations]
    common = shapes([*sources, *destinations])
    return [canonical(pieces, common) for pieces in sources], [canonical(pieces, common) for pieces in destinations]

"""Made-up weights in a layout's own storage, fused as the side fuses them: for tests, benches and dry runs without a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from zlib import crc32

import torch

from jackfield.shard import Shard
from jackfield_reshard.families import Tensor
from jackfield_reshard.layout import Layout
from jackfield_reshard.sides import shards

Values = Callable[[str, tuple[int, ...]], torch.Tensor]


def drawn(seed: int = 0) -> Values:
    """Full tensors by canonical name, the same in every process: normal numbers drawn from the name and the seed."""

    def values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(crc32(name.encode()) + seed)
        return torch.randn(shape, generator=generator)

    return values


def _fused(shard: Shard) -> tuple[str, int] | None:
    """The fused tensor that a shard is a part of, and its place in it."""
    for part, place in (("q_proj", 0), ("k_proj", 1), ("v_proj", 2)):
        if f".self_attn.{part}." in shard.name:
            return shard.name.replace(part, "qkv"), place
    for part, place in (("gate_proj", 0), ("up_proj", 1)):
        if f".{part}." in shard.name:
            return shard.name.replace(part, "gate_up"), place
    return None


def materialise(
    table: list[Tensor], layout: Layout, rank: int, values: Values | None, dtype: str = "float32", device: str = "cpu", fuse: bool = True
) -> list[Shard]:
    """One rank's shards with tensors: zeros where `values` is None.

    Megatron keeps query, key and value of each group together (`[groups, all rows of a group, hidden]`), vLLM one after the other
    (`[all rows, hidden]`); both keep gate and up of an expert one after the other. torch and FSDP2 fuse nothing here.
    """
    own = shards(table, layout, rank, dtype)
    fused: dict[str, list[tuple[int, int]]] = {}
    for index, shard in enumerate(own):
        if fuse and layout.kind in ("megatron", "vllm") and (place := _fused(shard)):
            fused.setdefault(place[0], []).append((place[1], index))
    tensors: list[torch.Tensor | None] = [None] * len(own)
    for parts in fused.values():
        parts.sort()
        members = [own[index] for _, index in parts]
        for (_, index), part in zip(parts, _views(members, layout, device), strict=True):
            tensors[index] = part
    out = []
    for shard, view in zip(own, tensors, strict=True):
        tensor = torch.zeros(shard.size, dtype=getattr(torch, shard.dtype), device=device) if view is None else view
        if values is not None:
            full = values(shard.name, _flat(table, shard)).view(shard.shape)
            for dimension, (at, n) in enumerate(zip(shard.offset, shard.size, strict=True)):
                full = full.narrow(dimension, at, n)
            tensor.copy_(full)
        out.append(replace(shard, tensor=tensor))
    return out


def _flat(table: Sequence[Tensor], shard: Shard) -> tuple[int, ...]:
    for tensor in table:
        if shard.name in tensor.names:
            return tensor.shape
    raise KeyError(shard.name)


def _views(members: Sequence[Shard], layout: Layout, device: str) -> list[torch.Tensor]:
    """Views of the members in one new tensor."""
    dtype = getattr(torch, members[0].dtype)
    attention = "self_attn" in members[0].name
    if attention and layout.kind == "megatron":
        rows = [m.size[1] for m in members]
        storage = torch.zeros(members[0].size[0], sum(rows), *members[0].size[2:], dtype=dtype, device=device)
        return list(torch.split(storage, rows, dim=1))
    if attention:
        rows = [m.size[0] * m.size[1] for m in members]
        storage = torch.zeros(sum(rows), *members[0].size[2:], dtype=dtype, device=device)
        return [part.view(m.size) for part, m in zip(torch.split(storage, rows), members, strict=True)]
    along = len(members[0].size) - 2 if members[0].name.endswith("weight") else 0
    lead = members[0].size[:along]
    rows = [m.size[along] for m in members]
    storage = torch.zeros(*lead, sum(rows), *members[0].size[along + 1 :], dtype=dtype, device=device)
    return list(torch.split(storage, rows, dim=along))


class Weights:
    """Stands for a backend or an engine where only its weights matter: `shards`, `adopt` and `weights_updated`."""

    def __init__(self, held: Sequence[Shard], adopts: bool = True) -> None:
        self.held, self.adopts, self.version = list(held), adopts, -1

    def shards(self) -> list[Shard]:
        """The shards."""
        return list(self.held)

    def adopt(self, shards: Sequence[Shard]) -> bool:
        """Move into the given storage, values included, where told to be willing."""
        if not self.adopts:
            return False
        given = {(s.name, s.offset, s.size): s.tensor for s in shards}
        for index, old in enumerate(self.held):
            tensor = given.get((old.name, old.offset, old.size))
            if tensor is not None and old.tensor is not None:
                tensor.copy_(old.tensor)
                self.held[index] = replace(old, tensor=tensor)
        return True

    def weights_updated(self, version: int) -> None:
        """Serve the version."""
        self.version = version

"""Adapters (LoRA, arXiv 2106.09685): the base travels once, later syncs bring the adapters alone, and the engine's side adds their product.

A backend that trains adapters offers `adapters()`, which transports ask for where it exists. The engine's side keeps the base of each
adapted weight, in the engine's type, and writes base + scale x B A into the engine's weight at every sync: from the base each time and
not on top of what is there, so that fifty syncs leave what one leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jackfield.components import Engine
from jackfield.shard import Shard

DOWN, UP = ".lora_A", ".lora_B"
"""What the name of an adapted weight gets to name its factors: A [r, in] and B [out, r]."""


@dataclass
class Adapters:
    """A backend's weights before its adapters are added, and the adapters; all on this rank, as views of the storage in use."""

    shards: list[Shard]
    """The base under its usual names and, by `DOWN` and `UP`, the factors."""
    scale: dict[str, float]
    """Factor on B A for each adapted weight; the same on every rank."""


class Apart:
    """A backend as a transport sees it that brings adapters: base and factors are its shards."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def shards(self) -> list[Shard]:
        """See Backend."""
        found: list[Shard] = self.backend.adapters().shards
        return found


class Merging:
    """An engine as such a transport sees it: it receives the base of adapted weights beside its own storage, and the factors."""

    def __init__(self, engine: Engine, scale: Mapping[str, float], factors: Mapping[str, Shard], device: torch.device) -> None:
        """`factors`: metadata of every factor, by name, whole."""
        self.engine, self.scale = engine, scale
        self.factors = {
            name: replace(
                shard, offset=(0, 0), size=shard.shape, tensor=torch.zeros(shard.shape, dtype=getattr(torch, shard.dtype), device=device)
            )
            for name, shard in factors.items()
            if any(own.name == name.removesuffix(DOWN).removesuffix(UP) for own in engine.shards())
        }
        self.bases: dict[int, Tensor] = {}

    def shards(self) -> list[Shard]:
        """See Engine."""
        return [*self._needs(), *self.factors.values()]

    def _needs(self) -> Iterator[Shard]:
        for index, shard in enumerate(self.engine.shards()):
            if shard.name not in self.scale or shard.tensor is None:
                yield shard
                continue
            if index not in self.bases:
                self.bases[index] = torch.empty_like(shard.tensor, memory_format=torch.contiguous_format)
            yield replace(shard, tensor=self.bases[index])

    @torch.no_grad()
    def weights_updated(self, version: int) -> None:
        """Merge, then see Engine."""
        for index, shard in enumerate(self.engine.shards()):
            if (base := self.bases.get(index)) is None:
                continue
            up, down = (self.factors[shard.name + side].tensor for side in (UP, DOWN))
            assert shard.tensor is not None and up is not None and down is not None
            rows = tuple(slice(o, o + n) for o, n in zip(shard.offset[:-1], shard.size[:-1], strict=True))
            columns = slice(shard.offset[-1], shard.offset[-1] + shard.size[-1])
            product = up.view(*shard.shape[:-1], up.shape[-1])[rows].float() @ down[:, columns].float()
            shard.tensor.copy_(base.float() + self.scale[shard.name] * product)
        self.engine.weights_updated(version)


def apart(
    source: Any, destination: Engine | None, world_size: int, group: Any, device: torch.device
) -> tuple[Any, Any, frozenset[str]] | None:
    """Both sides for a transport that brings adapters, and the factors' names; None where there are none, or an engine cannot merge.

    Collective. An engine can where it has storage of its own for every adapted weight, whose last dimension is the weight's inputs.
    """
    mine = source.adapters() if hasattr(source, "adapters") else None
    factors = {} if mine is None else {s.name: replace(s, tensor=None) for s in mine.shards if s.name.endswith((DOWN, UP))}
    own = None if destination is None else [replace(s, tensor=None) for s in destination.shards() if s.tensor is not None]
    entry = (None if mine is None else mine.scale, factors, own)
    everyone: list[Any] = [entry]
    if world_size > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, entry, group=group)
    scale = next((found for found, _, _ in everyone if found), None)
    if scale is None:
        return None
    whole: dict[str, Shard] = {name: shard for _, found, _ in everyone for name, shard in found.items()}
    needs = [shard for _, _, shards in everyone for shard in shards or ()]
    fit = all(shard.shape[-1] == whole[shard.name + DOWN].shape[-1] for shard in needs if shard.name in scale)
    if not fit or not scale.keys() <= {shard.name for shard in needs}:
        return None
    return (
        None if source is None else Apart(source),
        None if destination is None else Merging(destination, scale, whole, device),
        frozenset(whole),
    )

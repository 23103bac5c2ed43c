"""The common way to bring weights from a trainer's layout to an engine's: full tensors everywhere, buckets, slices.

Written as plainly as it is done: every rank takes part in an all-gather of every tensor over the ranks that share it and a broadcast
from its pipeline stage, concatenates, fills buckets, and each engine rank copies its slice out of the full tensor. Benchmarks hold our
plans against it, on the same processes and weights.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from jackfield.shard import Shard
from jackfield_reshard.families import Tensor
from jackfield_reshard.layout import Layout
from jackfield_reshard.sides import shards, stages


class Gather:
    """One rank's side; making it is collective (process groups), and so is `run`."""

    def __init__(self, table: list[Tensor], train: Layout, source: list[Shard], engine: list[Shard], rank: int, bucket: int) -> None:
        self.held = {shard.name: shard for shard in source}
        self.engine: dict[str, list[Shard]] = {}
        for shard in engine:
            self.engine.setdefault(shard.name, []).append(shard)
        first = next(shard.tensor for shard in source if shard.tensor is not None)
        self.dtype, self.device, self.limit = first.dtype, first.device, bucket
        axes, everyone = train.axes(), range(train.world)
        inside = ("dp",) if train.kind == "fsdp" else ("tp",)
        self.sharers, self.group = self._group(train, rank, inside, axes, everyone)
        self.pipeline, self.pipe_group = self._group(train, rank, ("pp",), axes, everyone)
        self.sharded = train.kind == "fsdp"
        self.boxes: dict[str, list[tuple[slice, ...]]] = {}
        for sharer in self.sharers:
            for shard in shards(table, train, sharer, "float32"):
                box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.size, strict=True))
                self.boxes.setdefault(shard.name, []).append(box)
        depth = 1 + max(layer for t in table for layer in t.layers)
        self.names = [(t, t.name.format(layer), where[0]) for t in table for held, where in stages(t, train, depth) for layer in held]
        self.stage = int(axes["pp"][rank])
        self.bucket: list[tuple[str, torch.Tensor]] = []
        self.bytes_received = 0

    @staticmethod
    def _group(train: Layout, rank: int, along: tuple[str, ...], axes: dict, everyone: range) -> tuple[list[int], dist.ProcessGroup]:
        """The ranks that differ from this one along these axes alone, in order; every rank makes all groups."""
        fixed = [name for name in axes if name not in along]
        members: dict[tuple[int, ...], list[int]] = {}
        for r in everyone:
            members.setdefault(tuple(int(axes[name][r]) for name in fixed), []).append(r)
        made = {key: dist.new_group(ranks) for key, ranks in members.items()}
        mine = tuple(int(axes[name][rank]) for name in fixed)
        return members[mine], made[mine]

    def run(self) -> None:
        """One sync."""
        self.bytes_received = 0
        for tensor, name, stage in self.names:
            full = self._gather(tensor, name) if self.stage == stage else torch.empty(tensor.shape, dtype=self.dtype, device=self.device)
            if len(self.pipeline) > 1:
                dist.broadcast(full, self.pipeline[stage], group=self.pipe_group)
                self.bytes_received += 0 if self.stage == stage else full.nbytes
            self.bucket.append((name, full))
            if sum(t.nbytes for _, t in self.bucket) >= self.limit:
                self._flush()
        self._flush()

    def _gather(self, tensor: Tensor, name: str) -> torch.Tensor:
        shard = self.held.get(name)
        if shard is not None and shard.full:
            assert shard.tensor is not None
            return shard.tensor.detach().reshape(tensor.shape).clone()
        count = len(self.sharers)
        if self.sharded:  # rows of the first dimension, the last rank's padded
            rows = -(-tensor.shape[0] // count)
            own = torch.zeros(rows, *tensor.shape[1:], dtype=self.dtype, device=self.device)
            if shard is not None and shard.tensor is not None:
                own[: shard.size[0]] = shard.tensor
            parts = self._all_gather(own)
            return torch.cat(parts)[: tensor.shape[0]].contiguous()
        assert shard is not None
        assert shard.tensor is not None
        parts = self._all_gather(shard.tensor.detach().contiguous())
        full = torch.empty(shard.shape, dtype=self.dtype, device=self.device)
        for part, box in zip(parts, self.boxes[name], strict=True):
            full[box] = part
        return full.reshape(tensor.shape)

    def _all_gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(own) for _ in self.sharers]
        dist.all_gather(parts, own, group=self.group)
        self.bytes_received += (len(parts) - 1) * own.nbytes
        return parts

    def _flush(self) -> None:
        if not self.bucket:
            return
        flat = torch.cat([t.reshape(-1) for _, t in self.bucket])
        at = 0
        for name, full in self.bucket:
            values = flat[at : at + full.numel()].view(full.shape)
            at += full.numel()
            for shard in self.engine.get(name, ()):
                assert shard.tensor is not None
                box = tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.size, strict=True))
                shard.tensor.copy_(values.view(shard.shape)[box])
        self.bucket = []

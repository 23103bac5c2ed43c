"""Transfers between processes: bucketed, packed and unpacked beside the wire, double-buffered, from buffers allocated once.

Between each pair of ranks flows one stream of boxes in the plan's order. It is cut into buckets of equal capacity; in round k every
rank packs its k-th bucket for each peer and posts all sends and receives, and unpacks round k - 1 while they are under way. On CUDA
the rounds alternate between two side streams, so that packing overlaps the wire; with gloo the posts are asynchronous.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jackfield.shard import Shard
from jackfield_reshard.boxes import Box, split
from jackfield_reshard.copies import CopyList
from jackfield_reshard.exchange import Agreement
from jackfield_reshard.plan import Move

ALIGNMENT = 16


@dataclass
class Item:
    """A box in a bucket: `at` is its byte offset there."""

    name: str
    box: Box
    at: int
    dtype: torch.dtype


@dataclass
class Round:
    """One exchange with all peers."""

    pack: CopyList
    unpack: CopyList
    sends: list[tuple[int, Tensor]] = field(default_factory=list)
    receives: list[tuple[int, Tensor]] = field(default_factory=list)


def buckets(moves: Iterable[Move], dtypes: dict[str, torch.dtype], capacity: int) -> list[tuple[list[Item], int]]:
    """Cut a pair's stream into buckets of at most `capacity` bytes; both ends get the same. Returns (items, bytes used) each."""
    out: list[tuple[list[Item], int]] = []
    for move in moves:
        dtype = dtypes[move.name]
        for offset, size in split(move.box[1], max(1, capacity // dtype.itemsize)):
            box = tuple(a + b for a, b in zip(move.box[0], offset, strict=True)), size
            amount = torch.Size(size).numel() * dtype.itemsize
            at = -(-out[-1][1] // ALIGNMENT) * ALIGNMENT if out else 0
            if not out or at + amount > capacity:
                out.append(([], 0))
                at = 0
            items, _ = out[-1]
            items.append(Item(move.name, box, at, dtype))
            out[-1] = items, at + amount
    return out


def meet(device: torch.device, world_size: int, group: Any = None) -> None:
    """Have NCCL connect the group now (collective). It does so at a group's first transfer, where it waits for every rank of the group:
    in a sync, a rank that has nothing to send or receive would not come."""
    if world_size > 1 and device.type != "cpu":
        dist.all_reduce(torch.zeros(1, device=device), group=group)


def wire_types(agreement: Agreement) -> dict[str, torch.dtype]:
    """The narrower of both sides' types for each tensor: what travels."""
    out = {}
    for tensors in agreement.plan.classes:
        pair = getattr(torch, tensors.source_dtype), getattr(torch, tensors.dtype)
        out.update(dict.fromkeys(tensors.names, min(pair, key=lambda t: t.itemsize)))
    return out


def by_peer(
    agreement: Agreement, tiers: Sequence[int] = (1, 2), names: Container[str] | None = None
) -> tuple[dict[int, list[Move]], dict[int, list[Move]]]:
    """This rank's (sends, receives) of the given tiers (and weights) by the peer's group rank, each in the order that both ends share."""
    sends: dict[int, list[Move]] = {}
    receives: dict[int, list[Move]] = {}
    if agreement.source is not None:
        for move in agreement.plan.moves(source=agreement.source):
            if move.tier in tiers and (names is None or move.name in names):
                sends.setdefault(agreement.destinations[move.destination], []).append(move)
    if agreement.destination is not None:
        for move in agreement.plan.moves(destination=agreement.destination):
            if move.tier in tiers and (names is None or move.name in names):
                receives.setdefault(agreement.sources[move.source], []).append(move)
    return sends, receives


class Wire:
    """The compiled transfers of one rank."""

    def __init__(
        self,
        agreement: Agreement,
        source: Sequence[Shard],
        destination: Sequence[Shard],
        device: torch.device,
        bucket_bytes: int,
        group: Any = None,
        pool: dict[tuple[str, int, int], Tensor] | None = None,
        tiers: Sequence[int] = (1, 2),
        names: Container[str] | None = None,
    ) -> None:
        self.group, self.device = group, device
        self.pool: dict[tuple[str, int, int], Tensor] = {} if pool is None else pool
        self.capacity = self.capacity_of(agreement, bucket_bytes)
        dtypes = wire_types(agreement)
        sends, receives = by_peer(agreement, tiers, names)
        out = {peer: buckets(moves, dtypes, self.capacity) for peer, moves in sends.items()}
        into = {peer: buckets(moves, dtypes, self.capacity) for peer, moves in receives.items()}
        self.bytes = sum(move.bytes for moves in sends.values() for move in moves)
        self.rounds: list[Round] = []
        for k in range(max((len(b) for b in (*out.values(), *into.values())), default=0)):
            made = Round(CopyList([], []), CopyList([], []))
            packs: tuple[list[Tensor], list[Tensor]] = ([], [])
            unpacks: tuple[list[Tensor], list[Tensor]] = ([], [])
            for peer, streams in out.items():
                if k < len(streams):
                    items, used = streams[k]
                    buffer = self._buffer("send", peer, k, streams)
                    for item in items:
                        packs[0].append(_slot(buffer, item))
                        packs[1].append(agreement.origin(item.name, item.box).view(source))
                    made.sends.append((peer, buffer[:used]))
            for peer, streams in into.items():
                if k < len(streams):
                    items, used = streams[k]
                    buffer = self._buffer("receive", peer, k, streams)
                    for item in items:
                        for target in agreement.targets(item.name, item.box):
                            unpacks[0].append(target.view(destination))
                            unpacks[1].append(_slot(buffer, item))
                    made.receives.append((peer, buffer[:used]))
            made.pack, made.unpack = CopyList(*packs, graph=False), CopyList(*unpacks, graph=False)
            self.rounds.append(made)
        self._streams: list[Any] = [torch.cuda.Stream(device) for _ in range(2)] if device.type == "cuda" else []  # type: ignore[no-untyped-call]

    @staticmethod
    def capacity_of(agreement: Agreement, bucket_bytes: int) -> int:
        """Bytes of one bucket, so that two buffers for each peer and direction stay within `bucket_bytes`; equal on all ranks."""
        pairs = agreement.plan.pair_bytes() > 0
        local = torch.tensor(agreement.sources)[:, None] == torch.tensor(agreement.destinations)[None, :]
        pairs &= ~local.numpy()
        peers = int(max(pairs.sum(axis=0).max(initial=0), pairs.sum(axis=1).max(initial=0), 1))
        return max(bucket_bytes // (4 * peers) // ALIGNMENT * ALIGNMENT, ALIGNMENT)

    def _buffer(self, way: str, peer: int, k: int, streams: Sequence[tuple[list[Item], int]]) -> Tensor:
        """One of the two buffers for a peer and direction, as large as its largest bucket; allocated once."""
        key, size = (way, peer, k % 2), max(used for _, used in streams[k % 2 :: 2])
        if key not in self.pool or self.pool[key].numel() < size:
            self.pool[key] = torch.empty(size, dtype=torch.uint8, device=self.device)
        return self.pool[key]

    @property
    def pool_bytes(self) -> int:
        """Memory of the buffers."""
        return sum(buffer.numel() for buffer in self.pool.values())

    def _post(self, made: Round) -> list[Any]:
        operations = [dist.P2POp(dist.isend, buffer, self._global(peer), self.group) for peer, buffer in made.sends]
        operations += [dist.P2POp(dist.irecv, buffer, self._global(peer), self.group) for peer, buffer in made.receives]
        return list(dist.batch_isend_irecv(operations)) if operations else []

    def _global(self, peer: int) -> int:
        return peer if self.group is None else dist.get_global_rank(self.group, peer)

    def run(self, meanwhile: Any = None) -> None:
        """Send and receive everything; `meanwhile()` is called once when the first round is under way."""
        flying: tuple[Round, list[Any], Any] | None = None
        main = torch.cuda.current_stream(self.device) if self._streams else None
        for stream in self._streams:
            assert main is not None
            stream.wait_stream(main)
        for k, made in enumerate(self.rounds):
            context = torch.cuda.stream(self._streams[k % 2]) if self._streams else nullcontext()
            with context:
                made.pack.run()
                works = self._post(made)
            if k == 0 and meanwhile is not None:
                meanwhile()
            if flying is not None:
                self._finish(*flying)
            flying = made, works, context
        if flying is not None:
            self._finish(*flying)
        elif meanwhile is not None:
            meanwhile()
        for stream in self._streams:
            assert main is not None
            main.wait_stream(stream)

    @staticmethod
    def _finish(made: Round, works: list[Any], context: Any) -> None:
        with context:
            for work in works:
                work.wait()
            made.unpack.run()


def _slot(buffer: Tensor, item: Item) -> Tensor:
    amount = torch.Size(item.box[1]).numel() * item.dtype.itemsize
    return buffer[item.at : item.at + amount].view(item.dtype).view(item.box[1])

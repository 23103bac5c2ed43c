"""The plan: who sends what to whom, decided on metadata alone, with its proof."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from jackfield_reshard.assign import assign
from jackfield_reshard.boxes import Box
from jackfield_reshard.classes import TensorClass
from jackfield_reshard.cover import cover
from jackfield_reshard.flows import Flow, fill, flows
from jackfield_reshard.topology import Topology


@dataclass(frozen=True)
class Move:
    """One box of one tensor, from a source rank to a destination rank."""

    name: str
    box: Box
    source: int
    destination: int
    tier: int
    """0 the same GPU, 1 the same node, 2 another node."""
    bytes: int


@dataclass(frozen=True)
class Proof:
    """What a plan shows about itself; `errors` is empty when all of it holds."""

    received: np.ndarray
    """Bytes that each destination rank receives."""
    bound: np.ndarray
    """Bytes that it needs and does not hold: no plan can send less."""
    imbalance: float
    """The largest sender's bytes over the mean of those that hold anything sent; 1 where nothing is sent."""
    least_imbalance: float
    """What no choice of senders can go below: some weights are held by few ranks only (an embedding by its pipeline stage)."""
    errors: tuple[str, ...]


@dataclass
class Plan:
    """Flows of every class with senders chosen."""

    classes: Sequence[TensorClass]
    topology: Topology
    assignment: np.ndarray
    """The GPU of each destination rank."""
    flows: list[Flow]

    def __post_init__(self) -> None:
        sources, destinations = len(self.topology.source), len(self.topology.destination)
        self.sent = np.zeros((3, sources), dtype=np.int64)
        """Bytes by tier and source rank; tier 0 is what it shares or copies on its own GPU."""
        self.received = np.zeros((3, destinations), dtype=np.int64)
        self.aliased = np.zeros(destinations, dtype=np.int64)
        """Bytes of tier 0 that need no copy, where both sides agree to share."""
        for flow in self.flows:
            amount = len(self.classes[flow.tensor_class].names) * flow.bytes
            self.received[flow.tier, flow.needers] += amount
            if flow.tier:
                self.sent[flow.tier, flow.holders] += flow.counts * flow.bytes
            else:
                np.add.at(self.sent[0], flow.holders, amount)
                if flow.whole:
                    self.aliased[flow.needers] += amount

    @property
    def bytes_sent(self) -> int:
        """Bytes between processes, over all ranks."""
        return int(self.received[1:].sum())

    @property
    def bytes_local(self) -> int:
        """Bytes that stay on their GPU, over all ranks."""
        return int(self.received[0].sum())

    @property
    def imbalance(self) -> float:
        """The largest sender's bytes over the mean of all that hold something that is sent."""
        sent = self.sent[1:].sum(axis=0)[self._able()]
        return float(sent.max() / sent.mean()) if len(sent) and sent.any() else 1.0

    def _able(self) -> np.ndarray:
        able = np.zeros(self.sent.shape[1], dtype=bool)
        for flow in self.flows:
            if flow.tier:
                able[flow.holders] = True
        return able

    def _least_imbalance(self) -> float:
        """The bytes that a set of ranks alone holds, over the ranks of the set, at their largest, over the mean."""
        forced: dict[bytes, tuple[np.ndarray, int]] = {}
        for flow in self.flows:
            if flow.tier:
                holders, before = forced.get(flow.holders.tobytes(), (flow.holders, 0))
                forced[flow.holders.tobytes()] = holders, before + int(flow.counts.sum()) * flow.bytes
        if not forced:
            return 1.0
        group = np.arange(self.sent.shape[1])  # ranks that share any weight end up with one group number
        for _ in range(2):
            for holders, _bytes in forced.values():
                least = group[holders].min()
                group[np.isin(group, group[holders])] = least
        able = self._able()
        mean = sum(amount for _, amount in forced.values()) / able.sum()
        sets = [(np.flatnonzero(able & (group == g)), True) for g in np.unique(group[able])]
        sets += [(holders, len(forced) <= 256) for holders, _ in forced.values()]
        largest = 0.0
        for ranks, inside in sets:
            chosen = np.zeros(len(group), dtype=bool)
            chosen[ranks] = True
            if inside:
                total = sum(amount for holders, amount in forced.values() if chosen[holders].all())
            else:
                total = forced[ranks.tobytes()][1]
            largest = max(largest, total / len(ranks))
        return float(largest / mean)

    def moves(self, source: int | None = None, destination: int | None = None) -> Iterator[Move]:
        """The moves of one source rank, of one destination rank, or all, in an order that both ends share."""
        for flow in self.flows:
            names = self.classes[flow.tensor_class].names
            if destination is not None and destination not in flow.needers:
                continue
            if source is not None and source not in flow.holders:
                continue
            n = len(flow.needers)
            box = flow.offset, flow.size
            if not flow.tier:
                for to, origin in zip(flow.needers, flow.holders, strict=True):
                    if (destination is None or to == destination) and (source is None or origin == source):
                        yield from (Move(name, box, int(origin), int(to), 0, flow.bytes) for name in names)
                continue
            count = len(names)
            units = np.arange(count * n)
            if destination is not None:
                units = units[int(np.flatnonzero(flow.needers == destination)[0]) * count :][:count]
            elif source is not None:
                ends = np.cumsum(flow.counts)
                at = int(np.flatnonzero(flow.holders == source)[0])
                units = units[ends[at] - flow.counts[at] : ends[at]]
            senders = flow.sender(units)
            for unit, sender in zip(units, senders, strict=True):
                if source is None or sender == source:
                    yield Move(names[unit % count], box, int(sender), int(flow.needers[unit // count]), flow.tier, flow.bytes)

    def pair_bytes(self) -> np.ndarray:
        """Bytes from each source rank to each destination rank, tier 0 included: an int array [sources, destinations]."""
        out = np.zeros((len(self.topology.source), len(self.topology.destination)), dtype=np.int64)
        for flow in self.flows:
            count, n = len(self.classes[flow.tensor_class].names), len(flow.needers)
            if flow.tier:
                senders = flow.sender(np.arange(count * n))
                np.add.at(out, (senders, np.repeat(flow.needers, count)), flow.bytes)
            else:
                np.add.at(out, (flow.holders, flow.needers), flow.bytes * count)
        return out

    def prove(self) -> Proof:
        """Recompute from the boxes alone what each rank must receive, and compare."""
        bound = np.zeros(len(self.topology.destination), dtype=np.int64)
        errors = []
        written = np.zeros_like(bound)
        for flow in self.flows:
            written[flow.needers] += len(self.classes[flow.tensor_class].names) * flow.bytes
            if flow.tier and int(flow.counts.sum()) != len(flow.needers) * len(self.classes[flow.tensor_class].names):
                errors.append(
                    f"{self.classes[flow.tensor_class].names[0]}: {flow.counts.sum()} units sent of those wanted at {flow.offset}"
                )
        needed = np.zeros_like(bound)
        for tensors in self.classes:
            need, missing = _missing(tensors, self.topology.source, self.assignment)
            scale = len(tensors.names) * tensors.wire_bytes
            np.add.at(needed, need[0], need[1] * scale)
            np.add.at(bound, need[0], missing * scale)
        received = self.received[1:].sum(axis=0)
        if (written != needed).any():
            rank = int(np.flatnonzero(written != needed)[0])
            errors.append(f"destination rank {rank} is written {written[rank]} bytes and needs {needed[rank]}")
        if (received != bound).any():
            rank = int(np.flatnonzero(received != bound)[0])
            errors.append(f"destination rank {rank} receives {received[rank]} bytes; the lower bound is {bound[rank]}")
        return Proof(received, bound, self.imbalance, self._least_imbalance(), tuple(errors))


def _missing(tensors: TensorClass, source: np.ndarray, destination: np.ndarray) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray]:
    """For each distinct destination box: its (rank, elements), and the elements that its GPU does not hold."""
    have, need = tensors.source, tensors.destination
    wanted = np.unique(np.concatenate([need.ranks[:, None], need.offset, need.size], axis=1), axis=0)
    held = np.unique(np.concatenate([source[have.ranks][:, None], have.offset, have.size], axis=1), axis=0)
    d = need.offset.shape[1]
    volume = wanted[:, 1 + d :].prod(axis=1)
    gpus = destination[wanted[:, 0]]
    first, last = np.searchsorted(held[:, 0], gpus, "left"), np.searchsorted(held[:, 0], gpus, "right")
    missing = volume.copy()
    one = last - first == 1
    mine = held[first[one]]
    low = np.maximum(wanted[one, 1 : 1 + d], mine[:, 1 : 1 + d])
    high = np.minimum(wanted[one, 1 : 1 + d] + wanted[one, 1 + d :], mine[:, 1 : 1 + d] + mine[:, 1 + d :])
    missing[one] -= np.maximum(high - low, 0).prod(axis=1)
    for row in np.flatnonzero(last - first > 1):
        boxes = [(tuple(b[1 : 1 + d].tolist()), tuple(b[1 + d :].tolist())) for b in held[first[row] : last[row]]]
        box = tuple(wanted[row, 1 : 1 + d].tolist()), tuple(wanted[row, 1 + d :].tolist())
        rest = cover(box, boxes, lambda b: b)[1]
        missing[row] = sum(int(np.prod(size)) for _, size in rest)
    return (wanted[:, 0], volume), missing


def plan(classes: Sequence[TensorClass], topology: Topology, assignment: str = "identity", split_bytes: int = 1 << 20) -> Plan:
    """Decide every move.

    `assignment` is "identity" (engine rank r stays where the topology puts it) or "overlap" (engine ranks are placed on the engine's
    GPUs so that they find most of what they need there). A box of at least `split_bytes` is cut where its senders cannot share
    whole ones evenly. Raises ConfigError where a needed element is held by nobody.
    """
    destination = topology.destination if assignment == "identity" else assign(classes, topology)
    found = [flow for index, tensors in enumerate(classes) for flow in flows(index, tensors, topology, destination, split_bytes)]
    load = np.zeros((3, len(topology.source)), dtype=np.int64)
    remote = [flow for flow in found if flow.tier]
    for flow in sorted(remote, key=lambda f: (len(f.holders), -f.bytes)):
        units = len(flow.needers) * len(classes[flow.tensor_class].names)
        own = load[flow.tier]
        flow.counts = fill(own[flow.holders], units, flow.bytes) if len(flow.holders) > 1 else np.array([units])
        own[flow.holders] += flow.counts * flow.bytes
    return Plan(classes, topology, destination, found)

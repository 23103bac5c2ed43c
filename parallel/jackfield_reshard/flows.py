"""From boxes to flows: for each class, which cells of the source each destination box is made of, and who may send them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import gcd

import numpy as np

from jackfield.errors import ConfigError
from jackfield_reshard.classes import TensorClass
from jackfield_reshard.sides import Holding
from jackfield_reshard.topology import Topology


@dataclass
class Flow:
    """One box of every tensor of a class, needed by some ranks and held by others.

    The units to send are (needer, tensor) in that order; the first `counts[0]` of them are sent by `holders[0]` and so on, so that
    who sends what to whom follows from a few numbers, however many ranks there are, and a needer has few senders.
    """

    tensor_class: int
    offset: tuple[int, ...]
    size: tuple[int, ...]
    needers: np.ndarray
    holders: np.ndarray
    """Source ranks; for a local flow `holders[i]` is on the GPU of `needers[i]`."""
    tier: int
    """0 the same GPU, 1 the same node, 2 another node."""
    bytes: int
    """Bytes of one unit."""
    whole: bool = False
    """Local flows: the box is all that one of the two sides holds, so that storage can be shared."""
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))

    def sender(self, units: np.ndarray) -> np.ndarray:
        """The source rank that sends each unit."""
        return self.holders[np.searchsorted(np.cumsum(self.counts), units, side="right")]


def _unique(own: Holding) -> tuple[np.ndarray, list[np.ndarray]]:
    """Distinct boxes [m, 2 x dimensions] and the sorted distinct ranks of each."""
    rows, inverse = np.unique(np.concatenate([own.offset, own.size], axis=1), axis=0, return_inverse=True)
    order = np.argsort(inverse.reshape(-1), kind="stable")
    ends = np.cumsum(np.bincount(inverse.reshape(-1), minlength=len(rows)))
    return rows, [np.unique(part) for part in np.split(own.ranks[order], ends[:-1])]


def _overlap(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Pairs of boxes of `a` and `b` that meet: (indices, offsets, sizes)."""
    d = a.shape[1] // 2
    offset = np.maximum(a[:, None, :d], b[None, :, :d])
    size = np.minimum(a[:, None, :d] + a[:, None, d:], b[None, :, :d] + b[None, :, d:]) - offset
    pairs = np.argwhere((size > 0).all(axis=2))
    return pairs, offset[pairs[:, 0], pairs[:, 1]], size[pairs[:, 0], pairs[:, 1]]


def cells(own: Holding) -> tuple[np.ndarray, list[np.ndarray]]:
    """Disjoint boxes that make up all boxes of a side, each with the ranks that hold it.

    Boxes of one layout are disjoint or equal already; where boxes of different extent overlap they are cut along each other's borders.
    """
    boxes, ranks = _unique(own)
    pairs, _, _ = _overlap(boxes, boxes)
    if len(pairs) == len(boxes):
        return boxes, ranks
    d = boxes.shape[1] // 2
    cuts = [np.unique(np.concatenate([boxes[:, i], boxes[:, i] + boxes[:, d + i]])) for i in range(d)]
    grid = np.stack(np.meshgrid(*[c[:-1] for c in cuts], indexing="ij"), axis=-1).reshape(-1, d)
    extent = np.stack(np.meshgrid(*[np.diff(c) for c in cuts], indexing="ij"), axis=-1).reshape(-1, d)
    fine = np.concatenate([grid, extent], axis=1)
    pairs, _, _ = _overlap(fine, boxes)
    holders: dict[int, list[np.ndarray]] = {}
    for cell, box in pairs:
        holders.setdefault(int(cell), []).append(ranks[box])
    return fine[list(holders)], [np.unique(np.concatenate(held)) for held in holders.values()]


def _parts(offset: np.ndarray, size: np.ndarray, parts: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Cut a box into nearly equal parts along its longest dimension."""
    along = int(np.argmax(size))
    edges = [int(size[along]) * i // parts for i in range(parts + 1)]
    for low, high in itertools.pairwise(edges):
        if high > low:
            start, extent = offset.copy(), size.copy()
            start[along] += low
            extent[along] = high - low
            yield start, extent


def flows(index: int, tensors: TensorClass, topology: Topology, destination: np.ndarray, split_bytes: int) -> Iterator[Flow]:
    """All flows of a class; `destination[r]` is the GPU of engine rank r. Senders are not chosen yet.

    Raises ConfigError where part of a needed box is held by nobody.
    """
    have, holders = cells(tensors.source)
    need, needers = _unique(tensors.destination)
    pairs, offsets, sizes = _overlap(need, have)
    d = need.shape[1] // 2
    covered = np.zeros(len(need), dtype=np.int64)
    np.add.at(covered, pairs[:, 0], sizes.prod(axis=1))
    for row in np.flatnonzero(covered != need[:, d:].prod(axis=1)):
        raise ConfigError(
            f"weight {tensors.names[0]}: no source shard covers all of offset {need[row, :d].tolist()} size {need[row, d:].tolist()} "
            f"of {list(tensors.shape)} ({covered[row]} of {need[row, d:].prod()} elements are held); "
            "the backend's shards() must cover the whole tensor"
        )
    count = len(tensors.names)
    ordered = bool((np.diff(topology.source) > 0).all())  # then holders, which are sorted, have sorted GPUs
    for (to, origin), offset, size in zip(pairs, offsets, sizes, strict=True):
        wanting, holding = needers[to], holders[origin]
        gpus, theirs = topology.source[holding], destination[wanting]
        order = slice(None) if ordered else np.argsort(gpus, kind="stable")
        position = np.minimum(np.searchsorted(gpus[order], theirs), len(gpus) - 1)
        local = gpus[order][position] == theirs
        box = tuple(offset.tolist()), tuple(size.tolist())
        volume = int(size.prod())
        if local.any():
            whole = box[1] in (tuple(have[origin, d:].tolist()), tuple(need[to, d:].tolist())) and not tensors.interleaved
            same = whole and tensors.dtype == tensors.source_dtype
            size_bytes = volume * tensors.wire_bytes
            yield Flow(index, *box, wanting[local], holding[order][position[local]], 0, size_bytes, same)
        far = wanting[~local]
        if not len(far):
            continue
        nodes, at = topology.node(gpus), topology.node(destination[far])
        present = np.zeros(int(max(nodes.max(), at.max())) + 1, dtype=bool)
        present[nodes] = True
        near = present[at]
        groups = [(far[at == node], holding[nodes == node], 1) for node in np.unique(at[near])]
        if not near.all():
            groups.append((far[~near], holding, 2))
        for want, hold, tier in groups:
            units, parts = len(want) * count, 1
            if len(hold) > 1 and units % len(hold) and units < 20 * len(hold) and volume * tensors.wire_bytes >= split_bytes:
                parts = min(len(hold) // gcd(units, len(hold)), 16)
            for start, extent in _parts(offset, size, parts) if parts > 1 else [(offset, size)]:
                amount = int(extent.prod()) * tensors.wire_bytes
                yield Flow(index, tuple(start.tolist()), tuple(extent.tolist()), want, hold, tier, amount)


def fill(load: np.ndarray, units: int, weight: int) -> np.ndarray:
    """Share equal units over senders so that the largest load stays smallest: how many each sends.

    `load` is what each sends already, in bytes; a unit is `weight` bytes.
    """
    least, most = int(load.min()), int(load.max())
    if least == most:
        counts = np.full(len(load), units // len(load), dtype=np.int64)
        counts[: units % len(load)] += 1
        return counts
    order = np.argsort(load, kind="stable")
    level = load[order] / weight
    total = np.cumsum(level)
    n = np.arange(1, len(level) + 1)
    active = int(np.searchsorted(level * n - total, units, side="right"))
    top = (units + total[active - 1]) / active
    counts = np.maximum(np.floor(top - level[:active] + 1e-9), 0).astype(np.int64)
    while (rest := units - int(counts.sum())) != 0:
        step = 1 if rest > 0 else -1
        by_level = np.argsort(step * (level[:active] + counts), kind="stable")
        by_level = by_level[(counts[by_level] + step) >= 0]
        counts[by_level[: abs(rest)]] += step
    out = np.zeros(len(load), dtype=np.int64)
    out[order[:active]] = counts
    return out

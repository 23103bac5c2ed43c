"""Which GPU each engine rank should have, so that it finds most of what it needs there: an assignment problem."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jackfield.errors import ConfigError
from jackfield_reshard.classes import TensorClass
from jackfield_reshard.sides import Holding
from jackfield_reshard.topology import Topology


def _kinds(holdings: Sequence[Holding], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Ranks that hold the same boxes of every class are of one kind: (kind of each rank, one rank of each kind)."""
    key = np.full((count, len(holdings)), -1, dtype=np.int64)
    for column, own in enumerate(holdings):
        _, inverse = np.unique(np.concatenate([own.offset, own.size], axis=1), axis=0, return_inverse=True)
        mixed = np.zeros(count, dtype=np.int64)
        np.add.at(mixed, own.ranks, (inverse.reshape(-1) + 1) * 1_000_003)
        np.add.at(mixed, own.ranks, (inverse.reshape(-1) + 1) ** 2)
        key[:, column] = mixed
    _, first, inverse = np.unique(key, axis=0, return_index=True, return_inverse=True)
    return inverse.reshape(-1), first


def overlap(classes: Sequence[TensorClass], topology: Topology) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Bytes that each kind of engine rank would find on each kind of source rank, and both sides' kinds by rank."""
    source_kind, source_first = _kinds([c.source for c in classes], len(topology.source))
    kind, first = _kinds([c.destination for c in classes], len(topology.destination))
    out = np.zeros((len(source_first), len(first)))
    for tensors in classes:
        have, have_kind = _of(tensors.source, source_kind, source_first)
        need, need_kind = _of(tensors.destination, kind, first)
        d = have.offset.shape[1]
        volume = np.ones((len(have_kind), len(need_kind)))
        for axis in range(d):
            low = np.maximum(have.offset[:, None, axis], need.offset[None, :, axis])
            end = np.minimum((have.offset + have.size)[:, None, axis], (need.offset + need.size)[None, :, axis])
            volume *= np.maximum(end - low, 0)
        np.add.at(out, (have_kind[:, None], need_kind[None, :]), volume * len(tensors.names) * tensors.wire_bytes)
    return out, source_kind, kind


def _of(own: Holding, kind: np.ndarray, first: np.ndarray) -> tuple[Holding, np.ndarray]:
    """The boxes of the first rank of each kind, equal ones once."""
    keep = first[kind[own.ranks]] == own.ranks
    rows = np.unique(np.concatenate([own.ranks[keep, None], own.offset[keep], own.size[keep]], axis=1), axis=0)
    d = own.offset.shape[1]
    return Holding(rows[:, 0], rows[:, 1 : 1 + d], rows[:, 1 + d :]), kind[rows[:, 0]]


def assign(classes: Sequence[TensorClass], topology: Topology) -> np.ndarray:
    """The GPU of each engine rank that makes the bytes found in place greatest.

    Engine ranks keep together: the ranks that the topology puts on one node stay on one node (their tensor-parallel
    traffic needs it). Ranks are permuted inside nodes, and nodes among each other, each by an exact assignment; with all GPUs in one
    node this is the optimum. The result is never worse than the topology's own placement.
    """
    try:
        from scipy.optimize import linear_sum_assignment
    except ImportError:
        raise ConfigError("placing engine ranks by overlap needs scipy: pip install 'jackfield[reshard]'") from None
    table, source_kind, kind = overlap(classes, topology)
    on_gpu = np.full(int(max(topology.source.max(), topology.destination.max())) + 1, -1)
    on_gpu[topology.source] = source_kind
    gain = np.concatenate([table, np.zeros((1, table.shape[1]))])  # the last row: a GPU without a source rank
    nodes = topology.node(topology.destination)
    ranks = [np.flatnonzero(nodes == node) for node in np.unique(nodes)]
    gpus = [topology.destination[r] for r in ranks]
    solved: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[float, np.ndarray]] = {}

    def inside(block: int, place: int) -> tuple[float, np.ndarray]:
        key = tuple(kind[ranks[block]].tolist()), tuple(on_gpu[gpus[place]].tolist())
        if key not in solved:
            value = gain[np.ix_(np.array(key[1]), np.array(key[0]))]
            rows, columns = linear_sum_assignment(value, maximize=True)
            where = np.empty(len(columns), dtype=np.int64)
            where[columns] = rows
            if value[rows, columns].sum() <= np.trace(value):
                where = np.arange(len(columns))
            solved[key] = float(value[where, np.arange(len(where))].sum()), where
        return solved[key]

    blocks = len(ranks)
    place = np.arange(blocks)
    if blocks > 1 and len({len(r) for r in ranks}) == 1 and blocks <= 512:
        value = np.array([[inside(b, p)[0] for p in range(blocks)] for b in range(blocks)])
        rows, columns = linear_sum_assignment(value, maximize=True)
        if value[rows, columns].sum() > np.trace(value):
            place = columns
    out = topology.destination.copy()
    for block in range(blocks):
        where = inside(block, int(place[block]))[1]
        out[ranks[block]] = gpus[int(place[block])][where]
    return out

"""The collective part of planning: every rank tells all others what it holds and needs; all compute the same plan."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch.distributed as dist

from jackfield.errors import ConfigError
from jackfield.shard import Shard
from jackfield_reshard.boxes import Box, contains
from jackfield_reshard.canonical import Piece
from jackfield_reshard.classes import of
from jackfield_reshard.cover import by_name
from jackfield_reshard.local import Part
from jackfield_reshard.plan import Plan, plan
from jackfield_reshard.topology import Topology


@dataclass
class Agreement:
    """The plan and this rank's place in it."""

    plan: Plan
    sources: list[int]
    """Group rank of each source rank of the plan."""
    destinations: list[int]
    source: int | None
    """This rank's number among the sources, None where it only receives."""
    destination: int | None
    held: dict[str, list[Piece]]
    """This rank's source pieces by name."""
    needed: dict[str, list[Piece]]

    def origin(self, name: str, box: Box) -> Part:
        """Where this rank holds a box."""
        return Part(next(piece for piece in self.held[name] if contains(piece.box, box)), box)

    def targets(self, name: str, box: Box) -> list[Part]:
        """Every place where this rank needs a box: more than one where weights are tied but stored twice."""
        return [Part(piece, box) for piece in self.needed[name] if contains(piece.box, box)]


def _metadata(shards: Sequence[Shard] | None) -> list[Shard] | None:
    return None if shards is None else [replace(shard, tensor=None) for shard in shards]


def agree(
    source: Sequence[Shard] | None,
    destination: Sequence[Shard] | None,
    world_size: int = 1,
    group: Any = None,
    problem: str | None = None,
    split_bytes: int = 1 << 20,
    apart: bool = False,
) -> Agreement:
    """Exchange metadata over the group (collective) and plan.

    A rank without a source (or destination) passes None; one that cannot go on passes its `problem`. Raises the same ConfigError on
    every rank where one has a problem or a weight is missing. With `apart` the destinations are nowhere near any source (a disk).
    """
    mine = (_metadata(source), _metadata(destination), socket.gethostname(), problem)
    everyone: list[Any] = [mine]
    if world_size > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, mine, group=group)
    me = dist.get_rank(group) if world_size > 1 else 0
    for rank, entry in enumerate(everyone):
        if entry[3] is not None:
            raise ConfigError(entry[3] if world_size == 1 else f"rank {rank}: {entry[3]}")
    sources = [rank for rank, entry in enumerate(everyone) if entry[0] is not None]
    destinations = [rank for rank, entry in enumerate(everyone) if entry[1] is not None]
    hosts = {host: number for number, host in enumerate(dict.fromkeys(entry[2] for entry in everyone))}
    nodes = np.array([hosts[entry[2]] for entry in everyone])
    classes, have, need = of([everyone[r][0] for r in sources], [everyone[r][1] for r in destinations])
    places = np.array(destinations)
    if apart:
        places, nodes = places + len(everyone), np.concatenate([nodes, np.full(len(everyone), len(hosts))])
    made = plan(classes, Topology(np.array(sources), places, nodes=nodes), "identity", split_bytes)
    as_source = sources.index(me) if me in sources else None
    as_destination = destinations.index(me) if me in destinations else None
    held = by_name(have[as_source]) if as_source is not None else {}
    needed = by_name(need[as_destination]) if as_destination is not None else {}
    return Agreement(made, sources, destinations, as_source, as_destination, held, needed)

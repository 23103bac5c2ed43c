"""Proof after the fact: every box that was shared, copied or sent has the same checksum on both sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from jackfield.errors import WorkerError
from jackfield.shard import Shard
from jackfield_reshard.checksum import checksum
from jackfield_reshard.exchange import Agreement
from jackfield_reshard.plan import Move
from jackfield_reshard.wire import by_peer, wire_types


def verify(agreement: Agreement, source: Sequence[Shard], destination: Sequence[Shard], world_size: int = 1, group: Any = None) -> int:
    """Compare checksums of every move, in the type that travels (collective); returns how many boxes were compared on this rank.

    Raises WorkerError on all ranks, naming the first weight that differs.
    """
    types = wire_types(agreement)
    sends, receives = by_peer(agreement)
    me = dist.get_rank(group) if world_size > 1 else 0
    if agreement.source is not None and agreement.destination is not None:
        own = [m for m in agreement.plan.moves(source=agreement.source, destination=agreement.destination) if not m.tier]
        sends[me] = receives[me] = own

    def held(move: Move) -> int:
        return checksum(agreement.origin(move.name, move.box).view(source).to(types[move.name]))

    mine = {peer: [held(move) for move in moves] for peer, moves in sends.items()}
    everyone: list[Any] = [mine]
    if world_size > 1:
        everyone = [None] * world_size
        dist.all_gather_object(everyone, mine, group=group)
    wrong, compared = [], 0
    for peer, moves in receives.items():
        for move, expected in zip(moves, everyone[peer][me], strict=True):
            for part in agreement.targets(move.name, move.box):
                compared += 1
                if checksum(part.view(destination).to(types[move.name])) != expected:
                    wrong.append(f"{move.name} offset {list(move.box[0])} size {list(move.box[1])} from rank {peer} to rank {me}")
    found: list[Any] = [wrong]
    if world_size > 1:
        found = [None] * world_size
        dist.all_gather_object(found, wrong, group=group)
    every = [line for lines in found for line in lines]
    if every:
        raise WorkerError(f"weights differ after the sync: {every[0]}" + (f" and {len(every) - 1} more boxes" if len(every) > 1 else ""))
    return compared

"""Transport `overlap`: begins with the first layers while the optimizer still works on the rest.

The backend says which weights are final as its optimizer goes: it calls its attribute `updated`, if it offers one, with their names.
Weights are in groups of layers; a thread takes the groups in one order that all ranks share, waits until this rank's weights of a
group are final (a rank that holds none only receives), and copies and sends them: on CUDA in a stream of its own behind an event of the
optimizer's, between processes through a process group
of its own. `sync` waits for what is left. With several optimizer steps before a sync all but the last move weights in vain, so this is
for one optimizer step a sync. The engine must not generate during the optimizer step, as a colocated one does not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from threading import Event, Thread
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field

from jackfield.components import Backend, Engine, WorkerContext
from jackfield.errors import WorkerError
from jackfield.shard import Shard, SyncReport
from jackfield_reshard.transports import Auto, Resharding, message_device
from jackfield_reshard.wire import meet

_LAYER = re.compile(r".*\.layers\.(\d+)\.")


class Flight:
    """One run over all groups, in a thread."""

    def __init__(self, work: Any, waiting: Sequence[set[str]], cuda: bool) -> None:
        self.waiting = [set(names) for names in waiting]
        self.final: set[str] = set()
        self.ready = [Event() for _ in waiting]
        self.events: list[Any] = [None] * len(waiting)
        self.spans: list[tuple[float, float]] = []
        self.error: BaseException | None = None
        self._cuda, self._work = cuda, work
        self.thread = Thread(target=self._run, name="jackfield-overlap", daemon=True)
        for group, names in enumerate(self.waiting):
            if not names:
                self._release(group)
        self.thread.start()

    def _release(self, group: int) -> None:
        if self._cuda:
            self.events[group] = torch.cuda.current_stream().record_event()
        self.ready[group].set()

    def mark(self, names: Sequence[str]) -> None:
        """These weights are final."""
        self.final.update(names)
        for group, waiting in enumerate(self.waiting):
            if not waiting.isdisjoint(names):
                waiting.difference_update(names)
                if not waiting:
                    self._release(group)

    def finish(self) -> None:
        """All weights are final: wait for the thread. Raises what it raised."""
        for group, event in enumerate(self.ready):
            if not event.is_set():
                self._release(group)
        self.thread.join()
        if self.error is not None:
            raise WorkerError(f"transport overlap: sending weights beside the optimizer failed: {self.error}") from self.error

    def _run(self) -> None:
        try:
            for group, event in enumerate(self.ready):
                event.wait()
                begin = perf_counter()
                self._work(group, self.events[group])
                self.spans.append((begin, perf_counter()))
        except BaseException as error:  # noqa: BLE001 - raised by `finish` in the caller's thread
            self.error = error


class Overlap(Auto):
    """As `auto`, ahead of the sync where the backend allows it."""

    class Config(Resharding.Config):
        """Settings of `overlap`."""

        groups: int = Field(default=8, gt=0)
        """Groups of layers that travel one after the other."""

    config: Config
    merges = False

    def connect(self, source: Backend | None, destination: Engine | None, context: WorkerContext) -> None:
        """See Resharding. The backend is asked to call back during its optimizer step."""
        self._flight: Flight | None = None
        self._own_group = context.group
        if context.world_size > 1 and context.group is None:
            self._own_group = dist.new_group(list(range(context.world_size)))
            meet(context.device, context.world_size, self._own_group)
        super().connect(source, destination, context)
        if source is not None and len(self.agreement.sources) == context.world_size:  # engines elsewhere are busy generating
            setattr(source, "updated", self._updated)  # noqa: B010 (no part of the contract: a backend may offer it)

    def _compile(self, have: Sequence[Shard], need: Sequence[Shard]) -> None:
        self._views, self._unshared = (have, need), None
        names = [name for tensors in self.agreement.plan.classes for name in tensors.names]
        layers = {name: int(match[1]) for name in names if (match := _LAYER.match(name))}
        depth, count = 1 + max(layers.values(), default=0), max(self.config.groups - 1, 1)
        groups: list[set[str]] = [set() for _ in range(count + 1)]
        for name in names:
            groups[1 + layers[name] * count // depth if name in layers else 0].add(name)
        groups = [group for group in groups if group]
        self._parts = [self._compiled(self._own_group, group) for group in groups]
        canonical: dict[str, set[str]] = {}
        for name, pieces in self.agreement.held.items():
            canonical.setdefault(name, set()).update(have[piece.shard].name for piece in pieces)
        buffers = {shard.name for shard in have if shard.buffer}
        self._waiting = [{own for name in group for own in canonical.get(name, ())} - buffers for group in groups]
        self._stream = torch.cuda.Stream(self.context.device) if self.context.device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def _updated(self, names: Sequence[str]) -> None:
        """The optimizer has finished these weights; the first call of a step starts a run."""
        if self._flight is not None and not self._flight.final.isdisjoint(names):
            self._flight.finish()  # another step before a sync: what was sent is old
            self._flight = None
        if self._flight is None:
            self._flight = Flight(self._group, self._waiting, self._stream is not None)
        self._flight.mark(names)

    def _group(self, number: int, event: Any) -> None:
        """Copy and send one group, in the thread."""
        _, copies, wire = self._parts[number]
        stream = self._stream
        if stream is not None:
            stream.wait_event(event)
        with torch.cuda.stream(stream) if stream is not None else nullcontext():
            wire.run(copies.run)
        if stream is not None:
            stream.synchronize()

    def sync(self, version: int) -> SyncReport:
        """Collective: what was sent ahead counts only if it was on every rank, from storage that is still in use."""
        begin = perf_counter()
        useless = torch.tensor(int(self._flight is None or self._moved()))
        if self.context.world_size > 1:
            useless = useless.to(message_device(self.context.device, self.group))
            dist.all_reduce(useless, dist.ReduceOp.MAX, group=self.group)
        if useless.item() and self._flight is not None:
            self._flight.finish()
            self._flight = None
        self._begin = begin
        return super().sync(version)

    def _move(self, report: SyncReport) -> None:
        begin = perf_counter()
        flight = self._flight or Flight(self._group, [set() for _ in self._waiting], self._stream is not None)
        self._flight = None
        flight.finish()
        report.seconds["hidden"] = sum(max(0.0, min(end, self._begin) - start) for start, end in flight.spans)
        report.seconds["wire"] = perf_counter() - begin
        report.bytes_aliased = sum(aliased for aliased, _, _ in self._parts)
        report.bytes_copied = sum(copies.bytes for _, copies, _ in self._parts)
        report.bytes_sent = sum(wire.bytes for _, _, wire in self._parts)

"""Transports for a backend and an engine in one process: `alias`, `local`, and `auto`, which takes the cheapest that works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch

from jackfield.components import Backend, ComponentConfig, Engine, Transport, WorkerContext
from jackfield.errors import ConfigError
from jackfield.shard import Shard, SyncReport
from jackfield_reshard.canonical import align
from jackfield_reshard.copies import CopyList, same_storage
from jackfield_reshard.local import pairs, split_aliased, views_in


@contextmanager
def phase(report: SyncReport, name: str, device: torch.device) -> Iterator[None]:
    """Add the wall time of the block, device work included, to the report's phase."""
    begin = perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    report.seconds[name] = report.seconds.get(name, 0.0) + perf_counter() - begin


def nbytes(shards: Sequence[Shard]) -> int:
    """Bytes of the shards' boxes in their own types."""
    total = 0
    for shard in shards:
        count = getattr(torch, shard.dtype).itemsize
        for n in shard.size:
            count *= n
        total += count
    return total


def adopt(source: Backend, destination: Engine) -> bool:
    """Make both sides share storage as far as they can; True if the engine took all of it from the backend.

    First the engine is asked to serve from the backend's storage; else the backend to train in the engine's, for all its
    shards that the engine holds in the same layout and type.
    """
    have, need = source.shards(), destination.shards()
    views = views_in(need, have)
    if all(view is not None for view in views) and destination.adopt([view for view in views if view is not None]):
        return True
    if any(shard.tensor is not None for shard in need):
        inside = [view for view in views_in(have, need) if view is not None]
        if inside:
            source.adopt(inside)
    return False


class Local(Transport):
    """Copies every weight within the device, in batches of strided copies (on CUDA a captured graph)."""

    class Config(ComponentConfig):
        """Settings of `local`."""

        graph: bool = True
        """Capture the copies as a CUDA graph, where there is CUDA."""

    def connect(self, source: Backend, destination: Engine, context: WorkerContext) -> None:
        begin = perf_counter()
        self.source, self.destination, self.context = source, destination, context
        self.shared_bytes: int | None = None
        self._share()
        self._compile()
        self._plan_seconds = perf_counter() - begin

    def _share(self) -> None:
        """Nothing is shared by `local`; subclasses try."""

    def _compile(self) -> None:
        have, need = self.source.shards(), self.destination.shards()
        self._stamp = self._pointers(have, need)
        if self.shared_bytes is not None:
            self._aliased, self._copies = self.shared_bytes, CopyList([], [])
            return
        (mine,), (theirs,) = align([have], [need])
        moves = pairs(mine, theirs)
        for shard in need:
            if shard.tensor is None:
                raise ConfigError(
                    f"weight {shard.name}: {type(self.destination).__name__} can only adopt the backend's storage, and "
                    f"{type(self.source).__name__} holds {self._other(shard.name, have)}; give both the same dtype and layout"
                )
        self._aliased, targets, sources = split_aliased(moves, have, need)
        self._copies = CopyList(targets, sources, graph=getattr(self.config, "graph", True))

    @staticmethod
    def _other(name: str, have: Sequence[Shard]) -> str:
        return next((f"it as {s.dtype} {list(s.size)} of {list(s.shape)}" for s in have if s.name == name), "no tensor of that name")

    @staticmethod
    def _pointers(*sides: Sequence[Shard]) -> list[int]:
        """Where the storages are: when they move (offload and onload), the copies are compiled again."""
        return [0 if s.tensor is None else s.tensor.data_ptr() for side in sides for s in side]

    def sync(self, version: int) -> SyncReport:
        report = SyncReport(version)
        with phase(report, "pause", self.context.device):
            pass  # waits for the device: the last optimizer step may still be running
        begin = perf_counter()
        if self._pointers(self.source.shards(), self.destination.shards()) != self._stamp:
            self._share()
            self._compile()
        report.seconds["plan"] = self._plan_seconds + perf_counter() - begin
        self._plan_seconds = 0.0
        with phase(report, "copy", self.context.device):
            self._copies.run()
        report.bytes_aliased, report.bytes_copied = self._aliased, self._copies.bytes
        with phase(report, "resume", self.context.device):
            self.destination.weights_updated(version)
        return report


class Auto(Local):
    """Shares what can be shared, copies the rest."""

    def _share(self) -> None:
        if adopt(self.source, self.destination):
            self.shared_bytes = nbytes(self.destination.shards())


class Alias(Auto):
    """Shares everything, or says what stands in the way."""

    def _compile(self) -> None:
        super()._compile()
        if self._copies.bytes:
            have, need = self.source.shards(), self.destination.shards()
            (mine,), (theirs,) = align([have], [need])
            to, origin = next(m for m in pairs(mine, theirs) if not same_storage(m[0].view(need), m[1].view(have)))
            engine, backend = need[to.piece.shard], have[origin.piece.shard]
            raise ConfigError(
                f"transport alias: {self._copies.bytes:,} of {self._copies.bytes + self._aliased:,} bytes cannot be shared, such as "
                f"{engine.name} (engine {engine.dtype} {list(engine.size)}; backend {backend.name} {backend.dtype} {list(backend.size)}); "
                "use transport auto, which copies them"
            )

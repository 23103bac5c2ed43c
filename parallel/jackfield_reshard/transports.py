"""Transports: `auto` takes for every weight the cheapest way that works; `alias`, `local` and `p2p` insist on one way."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from pydantic import Field

from jackfield.components import Backend, ComponentConfig, Engine, Transport, WorkerContext
from jackfield.errors import ConfigError
from jackfield.shard import Shard, SyncReport
from jackfield_reshard.adapters import apart
from jackfield_reshard.copies import CopyList, same_storage
from jackfield_reshard.exchange import Agreement, agree
from jackfield_reshard.local import Part, views_in
from jackfield_reshard.verify import verify
from jackfield_reshard.wire import Wire, meet


@contextmanager
def phase(report: SyncReport, name: str, device: torch.device) -> Iterator[None]:
    """Add the wall time of the block, device work included, to the report's phase."""
    begin = perf_counter()
    yield
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    report.seconds[name] = report.seconds.get(name, 0.0) + perf_counter() - begin


def message_device(device: torch.device, group: Any) -> torch.device:
    """Where small collectives' tensors must be: NCCL wants them on the GPU."""
    return device if dist.get_backend(group) == "nccl" else torch.device("cpu")


def adopt(source: Backend, destination: Engine, have: list[Shard], need: list[Shard]) -> tuple[list[Shard], list[Shard]]:
    """Make both sides of a process, whose shards are given, share storage as far as they can; returns their shards afterwards.

    First the engine is asked to serve from the backend's storage, which needs all of it: then its shards are views of that. Else the
    backend is asked to train in the engine's, with those of its shards that the engine holds in the same layout and type.
    """
    views = [view for view in views_in(need, have) if view is not None]
    if len(views) == len(need) and destination.adopt(views):
        return have, views
    if any(shard.tensor is not None for shard in need):
        inside = [view for view in views_in(have, need) if view is not None]
        if inside:
            source.adopt(inside)
            return source.shards(), need
    return have, need


def _pointers(sides: Sequence[Sequence[Shard]]) -> list[int]:
    return [0 if shard.tensor is None else shard.tensor.data_ptr() for side in sides for shard in side]


class Resharding(Transport):
    """What all transports between processes and devices share: plan once, then run the compiled plan at every sync."""

    class Config(ComponentConfig):
        """Settings of every resharding transport."""

        graph: bool = True
        """Capture the copies on a device as a CUDA graph, where there is CUDA."""
        bucket_bytes: int = Field(default=256 << 20, gt=0)
        """Memory of all transfer buffers of a rank together, in bytes; allocated once."""
        verify: bool = False
        """Compare checksums of both sides after every sync (reads all weights once more)."""

    config: Config
    shares = False
    """Whether storage may be shared."""
    merges = False
    """Whether adapters may travel by themselves where weights would have to (jackfield_reshard.adapters)."""
    wired: tuple[int, ...] = (1, 2)
    """Which tiers go through buckets: ranks of the same node (1), of other nodes (2)."""

    def connect(self, source: Backend | None, destination: Engine | None, context: WorkerContext) -> None:
        """Plan once (collective). A worker of a separate trainer has no engine and one of a separate engine no backend: None."""
        begin = perf_counter()
        self.source, self.destination, self.context = source, destination, context
        self.group: Any = getattr(context, "group", None)
        self._pool: dict[tuple[str, int, int], torch.Tensor] = {}
        self._factors: frozenset[str] = frozenset()
        self._names: frozenset[str] | None = None
        have, need = self._agree()
        if self.merges and self.agreement.plan.bytes_sent:
            parted = apart(source, destination, context.world_size, self.group, context.device)
            if parted is not None:
                (self.source, self.destination, self._factors), self.shares = parted, False
                have, need = self._agree()
        self._check(self.agreement)
        meet(context.device, context.world_size, self.group)
        self._compile(have, need)
        self._loads = self._by_name(have, need)
        self._plan_seconds = perf_counter() - begin

    def _agree(self) -> tuple[list[Shard], list[Shard]]:
        """Plan, on all ranks together; both sides' shards here."""
        have, need = self._sides()
        self.agreement = agree(
            None if self.source is None else have,
            None if self.destination is None else need,
            self.context.world_size,
            self.group,
            self._problem(have, need),
        )
        return have, need

    def _sides(self) -> tuple[list[Shard], list[Shard]]:
        """Both sides' shards, after sharing what may be shared. A side is asked once, and again where it has taken other storage."""
        have = self.source.shards() if self.source else []
        need = own = self.destination.shards() if self.destination else []
        if self.shares and self.source and self.destination:
            have, need = adopt(self.source, self.destination, have, own)
            own = own if need is own else self.destination.shards()
        self._remember([side for side, held in ((have, self.source), (own, self.destination)) if held is not None])
        return have, need

    def _by_name(self, have: Sequence[Shard], need: Sequence[Shard]) -> bool:
        """Whether the engine has no shards for this architecture and takes full tensors by name (`Engine.load_weights`)."""
        if self.destination is None or not have or need:
            return False
        if part := next((shard for shard in have if not shard.full), None):
            raise ConfigError(
                f"weight {part.name}: {type(self.destination).__name__} takes this architecture's weights by name only, whole, and "
                f"{type(self.source).__name__} holds {list(part.size)} of {list(part.shape)}; use a backend that holds whole tensors"
            )
        return True

    def _problem(self, have: Sequence[Shard], need: Sequence[Shard]) -> str | None:
        locked = next((shard for shard in need if shard.tensor is None), None)
        if locked is None:
            return None
        held = next((f"it as {s.dtype} {list(s.size)} of {list(s.shape)}" for s in have if s.name == locked.name), "no tensor of that name")
        return (
            f"weight {locked.name}: {type(self.destination).__name__} can only adopt the backend's storage, as {locked.dtype} "
            f"{list(locked.size)}, and {type(self.source).__name__} holds {held}; give both the same dtype and layout"
        )

    def _check(self, agreement: Agreement) -> None:
        """Raise ConfigError where this transport cannot carry out the plan."""

    def _moved(self) -> bool:
        """Whether storage has moved since `_remember` (offload and onload): then views must be taken again."""
        sides = self._shards()
        if len(sides) == len(self._seen) and all(now is then for now, then in zip(sides, self._seen, strict=True)):
            return False  # a side that gives the same list says that nothing moved
        return _pointers(sides) != self._stamp

    def _remember(self, sides: list[list[Shard]]) -> None:
        """Note where the storages of `_shards()` are."""
        self._seen, self._stamp = sides, _pointers(sides)

    def _shards(self) -> list[list[Shard]]:
        return [side.shards() for side in (self.source, self.destination) if side is not None]

    def _compile(self, have: Sequence[Shard], need: Sequence[Shard]) -> None:
        """Take views of both sides' storage as it is now."""
        self._views = have, need
        self._unshared: tuple[Part, Part] | None = None
        self._aliased, self._copies, self._wire = self._compiled(self.group, self._names)

    def _compiled(self, group: Any, names: Container[str] | None = None) -> tuple[int, CopyList, Wire]:
        """For the weights of the given names (all by default): bytes that are shared, local copies, and transfers."""
        agreement, (have, need), aliased = self.agreement, self._views, 0
        targets: list[torch.Tensor] = []
        sources: list[torch.Tensor] = []
        if agreement.source is not None and agreement.destination is not None:
            for move in agreement.plan.moves(source=agreement.source, destination=agreement.destination):
                if move.tier or (names is not None and move.name not in names):
                    continue
                origin = agreement.origin(move.name, move.box)
                view = origin.view(have)
                for part in agreement.targets(move.name, move.box):
                    target = part.view(need)
                    if same_storage(target, view):
                        aliased += target.numel() * target.element_size()
                    else:
                        self._unshared = self._unshared or (part, origin)
                        targets.append(target)
                        sources.append(view)
        copies = CopyList(targets, sources, self.config.graph)
        device, size = self.context.device, self.config.bucket_bytes
        return aliased, copies, Wire(agreement, have, need, device, size, group, self._pool, self.wired, names)

    def sync(self, version: int) -> SyncReport:
        report, device = SyncReport(version), self.context.device
        with phase(report, "pause", device):
            pass  # waits for the device: the last optimizer step may still be running
        with phase(report, "plan", device):
            if self._moved():
                self._compile(*self._sides())
        report.seconds["plan"] += self._plan_seconds
        self._plan_seconds = 0.0
        self._move(report)
        if self._factors:
            self._only_factors(report)
        if self._loads and self.source is not None and self.destination is not None:
            with phase(report, "load", device):
                whole = [(shard.name, shard.tensor) for shard in self.source.shards() if shard.tensor is not None]
                self.destination.load_weights(whole)
                report.bytes_copied += sum(tensor.nbytes for _, tensor in whole)
        if self.config.verify:
            with phase(report, "load", device):
                verify(self.agreement, *self._views, self.context.world_size, self.group)
        if self.destination is not None:
            with phase(report, "resume", device):
                self.destination.weights_updated(version)
        return report

    def _only_factors(self, report: SyncReport) -> None:
        """After a sync of base and adapters: bring the adapters alone from now on."""
        if self._names is None:
            self._names = self._factors
            self._compile(*self._views)
            self._spared = report.bytes_sent - self._wire.bytes
        else:
            report.bytes_saved = self._spared

    def _move(self, report: SyncReport) -> None:
        """Run the copies while the first transfers are under way."""
        device = self.context.device

        def copy() -> None:
            with phase(report, "copy", torch.device("cpu") if self._wire.rounds else device):
                self._copies.run()

        with phase(report, "wire", device):
            self._wire.run(copy)
        report.seconds["wire"] -= report.seconds["copy"]
        report.bytes_aliased, report.bytes_copied, report.bytes_sent = self._aliased, self._copies.bytes, self._wire.bytes


class Auto(Resharding):
    """Shares storage where both sides keep a weight alike, copies what is on the device, and sends only what is missing."""

    shares = merges = True


class P2P(Resharding):
    """Never shares: copies on the device, and sends what is missing between processes (gloo, NCCL)."""

    merges = True


class Local(Resharding):
    """Copies every weight within the device; an error where a rank does not hold all that its engine needs."""

    def _check(self, agreement: Agreement) -> None:
        if sent := agreement.plan.bytes_sent:
            raise ConfigError(
                f"transport local: {sent:,} of {sent + agreement.plan.bytes_local:,} bytes are on other ranks than need them; "
                "use transport auto or p2p, which send them"
            )


class Alias(Auto):
    """Shares everything, or says what stands in the way."""

    def _check(self, agreement: Agreement) -> None:
        if sent := agreement.plan.bytes_sent:
            raise ConfigError(
                f"transport alias: {sent:,} of {sent + agreement.plan.bytes_local:,} bytes are on other ranks than need them; "
                "use transport auto, which sends them"
            )

    def _compile(self, have: Sequence[Shard], need: Sequence[Shard]) -> None:
        super()._compile(have, need)
        problem = None
        if self._unshared is not None:
            engine, backend = need[self._unshared[0].piece.shard], have[self._unshared[1].piece.shard]
            problem = (
                f"transport alias: {self._copies.bytes:,} of {self._copies.bytes + self._aliased:,} bytes cannot be shared, such as "
                f"{engine.name} (engine {engine.dtype} {list(engine.size)}; backend {backend.name} {backend.dtype} {list(backend.size)}); "
                "use transport auto, which copies them"
            )
        problems = [problem]
        if self.context.world_size > 1:  # every rank must learn of it, or the others would wait in the first sync
            problems = problems * self.context.world_size
            dist.all_gather_object(problems, problem, group=self.group)
        if found := next((text for text in problems if text), None):
            raise ConfigError(found)

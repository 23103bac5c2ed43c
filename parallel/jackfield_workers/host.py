"""What runs in a worker process: one `jackfield.worker.Worker` with torch.distributed around it, and the isolation of its errors."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from jackfield.components import WorkerContext
from jackfield.config import RunConfig
from jackfield.errors import JackfieldError, WorkerError
from jackfield.worker import Worker
from jackfield_workers.fingerprint import Fingerprint, compare, fingerprint


@dataclass(frozen=True)
class Seat:
    """Where a worker sits."""

    pool: str
    rank: int
    size: int
    device: str
    """`cpu`, or `cuda:N` as the process sees its GPUs."""
    store: str
    """Rendezvous of the pool: `file:PATH` on one host, `tcp:HOST:PORT` across hosts."""
    threads: int
    """CPU threads for torch."""
    timeout: float
    """Seconds a collective may wait for its slowest rank."""

    def __str__(self) -> str:
        return f"{self.pool} worker {self.rank} of {self.size}"


@dataclass(frozen=True)
class Failure:
    """An exception in a worker, as it travels to the controller."""

    kind: str
    message: str
    traceback: str
    error: JackfieldError | None = None
    """The exception itself where it is one of ours."""

    @staticmethod
    def of(error: BaseException) -> Failure:
        """Describe `error` with its traceback."""
        text = "".join(traceback.format_exception(error))
        return Failure(type(error).__name__, str(error), text, error if isinstance(error, JackfieldError) else None)

    def raised(self, where: str, method: str, log: str) -> JackfieldError:
        """The error for the controller to raise: one line that names the worker; the worker's traceback is its note."""
        first = " ".join(self.message.split())
        if self.error is not None and type(self.error) is not WorkerError:
            result: JackfieldError = type(self.error)(f"{where}: {first}")
        else:
            result = WorkerError(f"{where} raised {self.kind} in {method}: {first}; its traceback is in {log}")
        result.add_note(f"traceback of {where}:\n{self.traceback}")
        return result


class Host:
    """Starts a worker in this process and calls it."""

    def __init__(self, seat: Seat, config: RunConfig, expected: Fingerprint, store: Any = None) -> None:
        compare(expected, fingerprint(config), str(seat))
        self.seat, self.device = seat, torch.device(seat.device)
        torch.set_num_threads(seat.threads)
        torch.manual_seed(config.seed)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.timeout = timedelta(seconds=seat.timeout)
        self.backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        store = store or rendezvous(seat.store, seat.size, self.timeout)
        dist.init_process_group(self.backend, store=store, rank=seat.rank, world_size=seat.size, timeout=self.timeout)
        self.worker = Worker(config, self.device, seat.rank, seat.size)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call the worker, or `link` here."""
        return self.link(*args) if method == "link" else getattr(self.worker, method)(*args)

    def link(self, address: str, ranks: dict[str, int], size: int, store: Any = None) -> None:
        """Join the group that spans trainers and engines with workers of their own; `ranks`: first rank there of each pool."""
        rank = ranks[self.seat.pool] + self.seat.rank
        group = spanning_group(store or rendezvous(address, size, self.timeout), rank, size, self.backend, self.timeout)
        self.worker.link = WorkerContext("policy", self.device, self.worker.config.seed, rank, size, group=group)


def rendezvous(address: str, size: int, timeout: timedelta) -> Any:
    """The store behind `file:PATH` or `tcp:HOST:PORT` (which somebody else serves)."""
    how, _, place = address.partition(":")
    if how == "file":
        return torch.distributed.FileStore(place, size)  # type: ignore[attr-defined]
    name, _, port = place.rpartition(":")
    return torch.distributed.TCPStore(name, int(port), size, False, timeout=timeout)  # type: ignore[attr-defined]


def spanning_group(store: Any, rank: int, size: int, backend: str, timeout: timedelta) -> Any:
    """A process group over processes whose default groups differ, which torch's public interface cannot make.

    torch translates "global" ranks (of the default group) to group ranks by a table. There are none in common here, so each process
    gets a table of its own: its own default rank, and made-up numbers for the others. `dist.get_global_rank` and everything that takes
    a group then works as usual.
    """
    from torch.distributed import distributed_c10d as c10d

    made = c10d._new_process_group_helper(
        size, rank, [], c10d.Backend(backend), c10d.PrefixStore("link", store), group_name=c10d.GroupName("jackfield link"), timeout=timeout
    )
    group = made[0] if isinstance(made, tuple) else made
    own = dist.get_rank()
    c10d._world.pg_group_ranks[group] = {own if i == rank else 1_000_000 + i: i for i in range(size)}
    return group

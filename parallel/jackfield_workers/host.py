"""What runs in a worker process: one `jackfield.worker.Worker` with torch.distributed around it, and the isolation of its errors."""

from __future__ import annotations

import traceback
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

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

    def __init__(self, seat: Seat, config: RunConfig, expected: Fingerprint) -> None:
        compare(expected, fingerprint(config), str(seat))
        torch.set_num_threads(seat.threads)
        torch.manual_seed(config.seed)
        device = torch.device(seat.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        how, _, address = seat.store.partition(":")
        store: Any
        if how == "file":
            store = torch.distributed.FileStore(address, seat.size)  # type: ignore[attr-defined]
        else:
            name, _, port = address.rpartition(":")
            store = torch.distributed.TCPStore(name, int(port), seat.size, seat.rank == 0, timeout=timedelta(seconds=seat.timeout))  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=seat.rank, world_size=seat.size, timeout=timedelta(seconds=seat.timeout))
        self.worker = Worker(config, device, seat.rank, seat.size)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call the worker."""
        return getattr(self.worker, method)(*args)

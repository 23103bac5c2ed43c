"""Launcher `fork`: worker processes on this host, one a GPU or sharing the CPUs, with torch.distributed among those of a pool."""

from __future__ import annotations

import gc
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from jackfield import registry
from jackfield.components import ComponentConfig, Launcher
from jackfield.config import RunConfig
from jackfield.errors import ConfigError
from jackfield.launcher import WorkerGroup
from jackfield_workers import zygote
from jackfield_workers.fingerprint import Fingerprint, fingerprint
from jackfield_workers.group import PipeGroup, Switchboard, serve
from jackfield_workers.host import Host, Seat
from jackfield_workers.placement import Pool, first_ranks, linked, pools


class ForkedProcess:
    """One worker; see jackfield_workers.group.Process."""

    def __init__(self, name: str, order: zygote.Order) -> None:
        self.name, self.log = name, order.log
        self.zygote = zygote.shared()
        self.pid, self.connection = self.zygote.fork(order)

    def fate(self) -> str:
        """How it ended."""
        code = self.zygote.status(self.pid, 5.0)
        if code is None:
            return f"(pid {self.pid}) closed its connection"
        if code < 0:
            return f"(pid {self.pid}) was killed by signal {-code}" + (", perhaps for want of memory" if code == -9 else "")
        return f"(pid {self.pid}) exited with code {code}"

    def kill(self) -> None:
        """End it now."""
        self.zygote.kill(self.pid)


def work(connection: Connection, argument: tuple[Seat, RunConfig, Fingerprint]) -> None:
    """The main function of a forked worker; the first message it answers is `start`."""
    serve(connection, Work(*argument))


class Work:
    """Builds the host on the first call, so that an error in it travels like any other."""

    def __init__(self, seat: Seat, config: RunConfig, expected: Fingerprint) -> None:
        self.argument = seat, config, expected
        self.host: Host | None = None

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        """`start` once, then methods of the worker."""
        if method == "start":
            self.host = Host(*self.argument)
            return None
        assert self.host is not None
        return self.host.call(method, args)


class ForkLauncher(Launcher):
    """Workers on this host. Start-up imports once, in one process, and forks it."""

    class Config(ComponentConfig):
        """How many workers and on what."""

        workers: int | None = Field(default=None, gt=0)
        """Workers of all roles together; default: one a GPU, or one where there is none."""
        device: Literal["auto", "cpu", "cuda"] = "auto"
        """auto: GPUs if there are any."""
        threads: int | None = Field(default=None, gt=0)
        """CPU threads of each worker; default: the cores divided by the workers."""
        timeout: float = Field(default=600.0, gt=0)
        """Seconds a collective may wait for its slowest rank before every rank gives up."""

    config: Config
    board: Switchboard | None = None
    folder: Path | None = None

    def start(self, config: RunConfig, roles: Sequence[str]) -> dict[str, WorkerGroup]:
        """A process group for each pool of the placement. Raises ConfigError where the roles do not fit, WorkerError where one fails."""
        cuda, available = self._devices()
        found = pools(config, roles, available)
        self.folder = Path(tempfile.mkdtemp(prefix="jackfield-"))
        logs = (config.dir / "workers").resolve()
        logs.mkdir(parents=True, exist_ok=True)
        total = sum(pool.size for pool in found)
        threads = self.config.threads or max(len(os.sched_getaffinity(0)) // total, 1)
        expected, preload = fingerprint(config), () if cuda else _modules(config)
        board = self.board = Switchboard()
        processes: dict[str, list[ForkedProcess]] = {}
        for pool in found:
            processes[pool.name] = self._pool(pool, config, expected, preload, cuda, threads, logs)
            board.add(processes[pool.name])
        groups = {pool.name: PipeGroup(processes[pool.name], board) for pool in found}
        everyone = PipeGroup([p for pool in found for p in processes[pool.name]], board)
        everyone.call("start")
        result: dict[str, WorkerGroup] = {role: groups[pool.name] for pool in found for role in pool.roles}
        if link := linked(found):
            both = PipeGroup([p for pool in link for p in processes[pool.name]], board)
            both.call("link", f"file:{self.folder}/link", first_ranks(link), both.size)
            result["link"] = both
        # What is there now, imported modules above all, stays: to search it for garbage takes 0.2 s, in every tenth step or so.
        gc.collect()
        gc.freeze()
        return result

    def _devices(self) -> tuple[bool, int]:
        import torch

        count = torch.cuda.device_count() if self.config.device != "cpu" else 0
        if self.config.device == "cuda" and not count:
            raise ConfigError("launcher fork: device is 'cuda' but torch finds no GPU: set device to 'cpu' or 'auto'")
        available = self.config.workers or count or 1
        if count and available > count:
            raise ConfigError(f"launcher fork: workers is {available} but this host has {count} GPUs; one worker takes one GPU")
        return bool(count), available

    def _pool(
        self, pool: Pool, config: RunConfig, expected: Fingerprint, preload: tuple[str, ...], cuda: bool, threads: int, logs: Path
    ) -> list[ForkedProcess]:
        result = []
        for rank in range(pool.size):
            device = f"cuda:{pool.first + rank}" if cuda else "cpu"
            seat = Seat(pool.name, rank, pool.size, device, f"file:{self.folder}/{pool.name}", threads, self.config.timeout)
            log = str(logs / f"{pool.name}-{rank}.log")
            order = zygote.Order(
                "jackfield_workers.fork:work", (seat, config, expected), dict(os.environ), list(sys.path), os.getcwd(), log, preload
            )
            result.append(ForkedProcess(str(seat), order))
        return result

    def stop(self) -> None:
        """End every worker."""
        gc.unfreeze()
        if self.board is not None:
            self.board.kill()
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def _modules(config: RunConfig) -> tuple[str, ...]:
    """Modules of the run's installed backends: imported once, before forking."""
    specs = [role.backend for role in (config.policy, config.reference, config.critic) if role.backend is not None]
    names = [spec.name for spec in specs if ":" not in spec.name]
    return tuple(dict.fromkeys(registry.find("backend", name).target.partition(":")[0] for name in names))

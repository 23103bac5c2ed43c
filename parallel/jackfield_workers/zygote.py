"""A process that has imported torch and forks workers on request: a worker starts in milliseconds, whatever the controller's threads do.

Forking the controller itself would copy locks that its other threads hold; a fresh interpreter for each worker would import torch
and transformers again in each. This process never touches CUDA and starts no thread, so that forking it is safe for both.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import os
import signal
import subprocess
import sys
import traceback
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from socket import socketpair
from typing import Any

PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Order:
    """What to fork: `target` is `module:function`, called with the worker's connection and `argument`."""

    target: str
    argument: Any
    environ: dict[str, str]
    path: list[str]
    folder: str
    log: str
    """File that receives the worker's standard output and error."""
    preload: tuple[str, ...]
    """Modules to import before forking, once for all workers."""


class Zygote:
    """The controller's handle."""

    def __init__(self) -> None:
        ours, theirs = socketpair()
        command = f"from jackfield_workers.zygote import main; main({theirs.fileno()})"
        environ = os.environ | {"OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        self.process = subprocess.Popen(
            [sys.executable, "-c", command], pass_fds=[theirs.fileno()], env=environ, start_new_session=True, stdin=subprocess.DEVNULL
        )
        theirs.close()
        self.control = Connection(ours.detach())

    def _ask(self, *question: Any) -> Any:
        self.control.send(question)
        return self.control.recv()

    def fork(self, order: Order) -> tuple[int, Connection]:
        """A new worker: its process id and the connection to it."""
        ours, theirs = socketpair()
        self.control.send(("fork", order))
        send_handle(self.control, theirs.fileno(), self.process.pid)
        theirs.close()
        return int(self.control.recv()), Connection(ours.detach())

    def status(self, pid: int, seconds: float) -> int | None:
        """Exit code of a worker (negative: the signal that ended it); None if it still runs after `seconds`."""
        found: int | None = self._ask("status", pid, seconds)
        return found

    def kill(self, pid: int) -> None:
        """End a worker that may not listen any more."""
        self._ask("kill", pid)


@functools.cache
def shared() -> Zygote:
    """This process's zygote, kept for all runs of the process; it ends with the process."""
    return Zygote()


def main(descriptor: int) -> None:
    """The zygote's loop. Ends, and its workers with it, when the controller's end of the connection closes."""
    import time

    control = Connection(descriptor)
    codes: dict[int, int | None] = {}
    for name in ("torch", "torch.distributed", "tensordict", "jackfield_workers.host", "transformers"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)

    def reap(pid: int) -> int | None:
        if codes[pid] is None:
            found, status = os.waitpid(pid, os.WNOHANG)
            codes[pid] = os.waitstatus_to_exitcode(status) if found else None
        return codes[pid]

    while True:
        try:
            what, *arguments = control.recv()
        except (EOFError, OSError):
            break
        if what == "fork":
            handle = recv_handle(control)
            pid = _fork(arguments[0], handle, descriptor)
            codes[pid] = None
            os.close(handle)
            control.send(pid)
        elif what == "status":
            pid, seconds = arguments
            limit = time.monotonic() + seconds
            while reap(pid) is None and time.monotonic() < limit and not control.poll(0):
                time.sleep(0.01)
            control.send(codes[pid])
        else:
            if reap(arguments[0]) is None:
                os.kill(arguments[0], signal.SIGKILL)
            control.send(None)
    for pid in codes:
        if reap(pid) is None:
            os.kill(pid, signal.SIGKILL)


def _fork(order: Order, handle: int, control: int) -> int:
    sys.path[:] = order.path
    for name in order.preload:
        with contextlib.suppress(Exception):
            importlib.import_module(name)
    gc.freeze()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.close(control)
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(order.folder)
        os.environ.clear()
        os.environ.update(order.environ)
        module, _, name = order.target.partition(":")
        getattr(importlib.import_module(module), name)(Connection(handle), order.argument)
        code = 0
    except BaseException:  # noqa: BLE001 - the forked copy must never return into the zygote's loop
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)

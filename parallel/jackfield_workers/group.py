"""A worker group over connections: calls go to all ranks at once, replies are gathered, and a dead rank ends the wait for the others."""

from __future__ import annotations

import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn, Protocol

from jackfield.errors import JackfieldError, WorkerError
from jackfield_workers.host import Failure
from jackfield_workers.wire import Packet, pack, receive, send, unpack

GRACE = 5.0
"""Seconds that the other ranks have to answer once one has failed, before they count as stuck in a collective and are ended."""


class Process(Protocol):
    """One worker, as the group needs it."""

    name: str
    log: str
    connection: Connection

    def fate(self) -> str:
        """How it ended, such as "was killed by signal 9"."""

    def kill(self) -> None:
        """End it now."""


class PipeGroup:
    """See jackfield.launcher.WorkerGroup. One call at a time; threads wait for each other."""

    def __init__(self, processes: Sequence[Process]) -> None:
        self.processes, self.size = list(processes), len(processes)
        self.ranks = {p.connection: rank for rank, p in enumerate(processes)}
        self.inbox: dict[tuple[int, int], deque[tuple[str, Any]]] = defaultdict(deque)
        self.calls = 0
        self.broken: str | None = None
        self.lock = threading.RLock()

    def call(self, method: str, *args: Any) -> list[Any]:
        """See WorkerGroup."""
        return self._collect(method, self._post("call", method, [args] * self.size))

    def scatter(self, method: str, role: str | None, shares: Sequence[Any], *args: Any) -> list[Any]:
        """See WorkerGroup."""
        before = (role,) if role else ()
        return self._collect(method, self._post("call", method, [(*before, share, *args) for share in shares]))

    def stream(self, method: str, shares: Sequence[Any]) -> Iterator[Any]:
        """See WorkerGroup."""
        with self.lock:
            call = self._post("stream", method, [(share,) for share in shares])
            open_ranks = set(range(self.size))
            failures: dict[int, Failure] = {}
            try:
                while open_ranks:
                    rank, kind, value = self._next(method, call, open_ranks, failures)
                    if kind == "item":
                        if not failures:
                            yield value
                        continue
                    open_ranks.discard(rank)
                    if kind == "failure":
                        failures[rank] = value
            except GeneratorExit:
                # The workers send on until they are done: what they send must be read, or the next call finds them blocked.
                while open_ranks and not failures:
                    rank, kind, _ = self._next(method, call, open_ranks, failures)
                    if kind != "item":
                        open_ranks.discard(rank)
                raise
            self._raise_first(method, failures)

    def _post(self, kind: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> int:
        with self.lock:
            if self.broken:
                raise WorkerError(self.broken)
            self.calls += 1
            packets: dict[int, Packet] = {}
            for process, args in zip(self.processes, arguments, strict=True):
                if id(args) not in packets:
                    packets[id(args)] = pack((self.calls, kind, method, args))
                try:
                    send(process.connection, packets[id(args)])
                except OSError:
                    self._died(process, method)
            return self.calls

    def _collect(self, method: str, call: int) -> list[Any]:
        with self.lock:
            results: dict[int, Any] = {}
            failures: dict[int, Failure] = {}
            waiting = set(range(self.size))
            while waiting:
                rank, kind, value = self._next(method, call, waiting, failures)
                waiting.discard(rank)
                (failures if kind == "failure" else results)[rank] = value
            self._raise_first(method, failures)
            return [results[rank] for rank in range(self.size)]

    def _next(self, method: str, call: int, ranks: set[int], failures: dict[int, Failure]) -> tuple[int, str, Any]:
        """The next message of a call from one of `ranks`. Raises WorkerError when a worker dies or stays stuck after a failure."""
        limit = time.monotonic() + GRACE if failures else None
        while True:
            for rank in sorted(ranks):
                if box := self.inbox.get((call, rank)):
                    return rank, *box.popleft()
            ready = wait([p.connection for p in self.processes], None if limit is None else max(limit - time.monotonic(), 0))
            if not ready:
                self._break(method, failures)
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = self.ranks[connection]
                try:
                    found, kind, value = unpack(receive(connection))
                except (EOFError, OSError):
                    if failures:
                        self._break(method, failures)
                    self._died(self.processes[rank], method)
                self.inbox[found, rank].append((kind, value))

    def _error(self, method: str, failures: dict[int, Failure]) -> JackfieldError:
        rank = next(iter(failures))
        return failures[rank].raised(self.processes[rank].name, method, self.processes[rank].log)

    def _raise_first(self, method: str, failures: dict[int, Failure]) -> None:
        if failures:
            raise self._error(method, failures)

    def _break(self, method: str, failures: dict[int, Failure]) -> NoReturn:
        error = self._error(method, failures)
        self.broken = f"the workers have been stopped: {error}"
        self.kill()
        raise error

    def _died(self, process: Process, method: str) -> NoReturn:
        self.broken = f"{process.name} {process.fate()} during {method}; its output is in {process.log}"
        self.kill()
        raise WorkerError(self.broken)

    def kill(self) -> None:
        """End every worker."""
        for process in self.processes:
            process.kill()


def serve(connection: Connection, target: Any) -> None:
    """The worker's side: answer calls until the other side closes. `target` has `call(method, args)`."""
    while True:
        try:
            number, kind, method, args = unpack(receive(connection))
        except (EOFError, OSError):
            return
        try:
            result = target.call(method, args)
            if kind == "stream":
                for item in result:
                    send(connection, pack((number, "item", item)))
                result = None
            reply = pack((number, "end", result))
        except (BrokenPipeError, ConnectionResetError):
            return
        except Exception as error:  # noqa: BLE001 - isolation by design: the controller raises it with rank and traceback
            reply = pack((number, "failure", Failure.of(error)))
        send(connection, reply)

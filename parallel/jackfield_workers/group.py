"""A worker group over connections: calls go to all ranks at once, replies are gathered, and a dead rank ends the wait for the others."""

from __future__ import annotations

import math
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector
from typing import Any, NoReturn, Protocol

from jackfield.errors import JackfieldError, WorkerError
from jackfield_workers.channel import Channel
from jackfield_workers.host import Failure
from jackfield_workers.wire import Bundle, Packet, pack, unpack

GRACE = 5.0
"""Seconds that the other ranks have to answer once one has failed, before they count as stuck in a collective and are ended."""
FLUSH_SECONDS, FLUSH_ITEMS = 0.05, 64
"""A stream's items travel together, as many as come within this time, since each message has its price on the controller."""


class Named(Protocol):
    """A worker in error messages."""

    name: str
    log: str


class Process(Named, Protocol):
    """One worker, as the group needs it."""

    connection: Connection

    def fate(self) -> str:
        """How it ended, such as "was killed by signal 9"."""

    def kill(self) -> None:
        """End it now."""


class Switchboard:
    """The connections of one run: reads whatever arrives, files it by call, and knows whether the run's workers still live."""

    def __init__(self) -> None:
        self.processes: dict[Connection, Process] = {}
        self.channels: dict[Connection, Channel] = {}
        self.selector = DefaultSelector()
        self.inbox: dict[tuple[int, Connection], deque[tuple[str, Any]]] = defaultdict(deque)
        self.calls = 0
        self.broken: str | None = None
        self.lock = threading.RLock()

    def add(self, processes: Sequence[Process]) -> None:
        """Watch more workers."""
        for process in processes:
            self.processes[process.connection] = process
            self.channels[process.connection] = Channel(process.connection)
            self.selector.register(process.connection, EVENT_READ)

    def next(self, call: int, connections: Sequence[Connection], limit: float | None) -> tuple[Connection, str, Any] | None:
        """The next message of a call from one of `connections`; None after `limit` (monotonic seconds). Raises Died."""
        while True:
            for connection in connections:
                if box := self.inbox.get((call, connection)):
                    kind, value = box.popleft()
                    if not box:
                        del self.inbox[call, connection]
                    return connection, kind, value
            ready = self.selector.select(None if limit is None else max(limit - time.monotonic(), 0))
            if not ready:
                return None
            for found in (key.fileobj for key, _ in ready):
                assert isinstance(found, Connection)
                try:
                    number, kind, value = unpack(self.channels[found].receive())
                except (EOFError, OSError):
                    raise Died(self.processes[found]) from None
                self.inbox[number, found].append((kind, value))

    def kill(self) -> None:
        """End every worker."""
        self.broken = self.broken or "the workers have been stopped"
        for process in self.processes.values():
            process.kill()
        for channel in self.channels.values():
            channel.close()


class Died(Exception):
    """A worker's connection has closed."""

    def __init__(self, process: Process) -> None:
        super().__init__(process.name)
        self.process = process


class PipeGroup:
    """See jackfield.launcher.WorkerGroup. One call at a time for all groups of a switchboard; threads wait for each other."""

    def __init__(self, processes: Sequence[Process], board: Switchboard) -> None:
        self.processes, self.size, self.board = list(processes), len(processes), board
        self.ranks = {p.connection: rank for rank, p in enumerate(processes)}

    def call(self, method: str, *args: Any) -> list[Any]:
        """See WorkerGroup."""
        return self._collect(method, [args] * self.size)

    def scatter(self, method: str, role: str | None, shares: Sequence[Any], *args: Any) -> list[Any]:
        """See WorkerGroup."""
        before = (role,) if role else ()
        return self._collect(method, same_where_same(shares, lambda share: (*before, share, *args)))

    def stream(self, method: str, shares: Sequence[Any]) -> Iterator[Any]:
        """See WorkerGroup."""
        with self.board.lock:
            call = self._post("stream", method, same_where_same(shares, lambda share: (share,)))
            waiting = dict.fromkeys(self.ranks)
            failures: dict[Process, Failure] = {}
            try:
                while waiting:
                    connection, kind, value = self._next(method, call, waiting, failures)
                    if kind == "items":
                        if not failures:
                            yield from value
                        continue
                    del waiting[connection]
                    if kind == "failure":
                        failures[self.board.processes[connection]] = value
            except GeneratorExit:
                # The workers send on until they are done: what they send must be read, or the next call finds them blocked.
                while waiting and not failures:
                    connection, kind, _ = self._next(method, call, waiting, failures)
                    if kind != "items":
                        del waiting[connection]
                raise
            if failures:
                raise first(method, failures)

    def _post(self, kind: str, method: str, arguments: Sequence[tuple[Any, ...]]) -> int:
        if self.board.broken:
            raise WorkerError(self.board.broken)
        self.board.calls += 1
        packets: dict[int, Packet] = {}
        for process, args in zip(self.processes, arguments, strict=True):
            if id(args) not in packets:
                packets[id(args)] = pack((self.board.calls, kind, method, args))
            try:
                self.board.channels[process.connection].send(packets[id(args)])
            except OSError:
                self._died(process, method)
        return self.board.calls

    def _collect(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self.board.lock:
            call = self._post("call", method, arguments)
            results: dict[int, Any] = {}
            failures: dict[Process, Failure] = {}
            waiting = dict.fromkeys(self.ranks)
            while waiting:
                connection, kind, value = self._next(method, call, waiting, failures)
                del waiting[connection]
                if kind == "failure":
                    failures[self.board.processes[connection]] = value
                else:
                    results[self.ranks[connection]] = value
            if failures:
                raise first(method, failures)
            return [results[rank] for rank in range(self.size)]

    def _next(
        self, method: str, call: int, waiting: dict[Connection, None], failures: dict[Process, Failure]
    ) -> tuple[Connection, str, Any]:
        """The next message. Raises when a worker dies, or stays stuck after another has failed; all workers are ended then."""
        try:
            found = self.board.next(call, list(waiting), time.monotonic() + GRACE if failures else None)
        except Died as death:  # where others have failed already, they failed because their peer is gone
            self._died(death.process, method)
        if found is None:
            error = first(method, failures)
            self.board.broken = f"the workers have been stopped: {error}"
            self.board.kill()
            raise error
        return found

    def _died(self, process: Process, method: str) -> NoReturn:
        self.board.broken = f"{process.name} {process.fate()} during {method}; its output is in {process.log}"
        self.board.kill()
        raise WorkerError(self.board.broken)


def same_where_same(shares: Sequence[Any], build: Callable[[Any], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Arguments for every share; ranks that are given the same object get the same tuple, which is packed once."""
    made: dict[int, tuple[Any, ...]] = {}
    return [made.setdefault(id(share), build(share)) for share in shares]


def first(method: str, failures: Mapping[Any, Failure]) -> JackfieldError:
    """The error of the worker that failed first; the others usually fail because it did."""
    process: Named
    process, failure = next(iter(failures.items()))
    return failure.raised(process.name, method, process.log)


def serve(connection: Connection, target: Any) -> None:
    """The worker's side: answer calls until the other side closes. `target` has `call(method, args)`."""
    channel = Channel(connection)
    while _answer(channel, target):
        pass


def _answer(channel: Channel, target: Any) -> bool:
    """One call; False where there is none any more. What came with it is gone afterwards, so that its memory can carry the next."""
    try:
        number, kind, method, args = unpack(channel.receive())
    except (EOFError, OSError):
        return False
    try:
        result = target.call(method, args)
        if kind == "stream":
            _stream(result, lambda bundle: channel.send(pack((number, "items", bundle))))
            result = None
        reply = pack((number, "end", result))
    except (BrokenPipeError, ConnectionResetError):
        return False
    except Exception as error:  # noqa: BLE001 - isolation by design: the controller raises it with rank and traceback
        reply = pack((number, "failure", Failure.of(error)))
    channel.send(reply)
    return True


def bundles(items: Iterable[Any]) -> Iterator[Bundle]:
    """Items that came soon after the ones before, together; the last ones wait until another comes or the stream ends."""
    bundle, flushed = Bundle(), -math.inf
    for item in items:
        bundle.append(item)
        if len(bundle) == FLUSH_ITEMS or time.monotonic() - flushed > FLUSH_SECONDS:
            yield bundle
            bundle, flushed = Bundle(), time.monotonic()
    if bundle:
        yield bundle


def _stream(items: Iterable[Any], deliver: Callable[[Bundle], None]) -> None:
    """Hand items on in bundles, none later than FLUSH_SECONDS after it came: a thread sees to those that wait while the next is made."""
    waiting, lock, some, done = Bundle(), threading.Lock(), threading.Event(), threading.Event()
    errors: list[Exception] = []

    def flush() -> None:
        with lock:
            if not done.is_set():
                some.clear()
            if waiting:
                deliver(waiting)
                waiting.clear()

    def watch() -> None:
        try:
            while some.wait() and not done.wait(FLUSH_SECONDS):
                flush()
        except Exception as error:  # noqa: BLE001 - raised again below, in the worker's own thread
            errors.append(error)

    thread = threading.Thread(target=watch, name="stream", daemon=True)
    thread.start()
    try:
        for item in items:
            with lock:
                waiting.append(item)
                some.set()
            if len(waiting) >= FLUSH_ITEMS:
                flush()
        flush()
    finally:
        with lock:
            done.set()
            some.set()
        thread.join()
    if errors:
        raise errors[0]

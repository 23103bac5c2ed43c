"""Worker groups whose workers are Ray actors."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import ray
from ray.exceptions import RayError

from jackfield.errors import WorkerError
from jackfield_ray.actor import Message, Place, from_message, to_message
from jackfield_workers.group import GRACE, first, same_where_same

INLINE_BYTES = 100_000
"""Messages up to this size travel with the call; larger ones are put into the object store once and passed by reference."""


class RayWorker:
    """One actor, as a group needs it."""

    def __init__(self, actor: Any, name: str, place: Place, log: str) -> None:
        self.actor, self.name, self.place, self.log = actor, name, place, log

    def fate(self, error: BaseException) -> str:
        """What Ray says of its end, in short."""
        text = " ".join(str(error).split())
        cause = next((what for sign, what in CAUSES.items() if sign in text), "died")
        return f"({self.place}) {cause}"


CAUSES = {
    "connection error code 2": "died without a word, as by signal 9",
    "running low on memory": "was killed for want of memory",
    "node died": "was lost with its node",
    "node is dead": "was lost with its node",
}
"""Signs in Ray's long explanations, and what they come down to."""


class Crew:
    """What the groups of one run share: whether their workers still live."""

    def __init__(self) -> None:
        self.workers: list[RayWorker] = []
        self.broken: str | None = None
        self.lock = threading.RLock()

    def kill(self) -> None:
        """End every worker."""
        self.broken = self.broken or "the workers have been stopped"
        for worker in self.workers:
            ray.kill(worker.actor)


class RayGroup:
    """See jackfield.launcher.WorkerGroup. One call at a time for all groups of a crew; threads wait for each other."""

    def __init__(self, workers: Sequence[RayWorker], crew: Crew) -> None:
        self.workers, self.size, self.crew = list(workers), len(workers), crew

    def call(self, method: str, *args: Any) -> list[Any]:
        """See WorkerGroup."""
        return self._collect(method, [args] * self.size)

    def scatter(self, method: str, role: str | None, shares: Sequence[Any], *args: Any) -> list[Any]:
        """See WorkerGroup."""
        before = (role,) if role else ()
        return self._collect(method, same_where_same(shares, lambda share: (*before, share, *args)))

    def stream(self, method: str, shares: Sequence[Any]) -> Iterator[Any]:
        """See WorkerGroup."""
        messages = self._messages(method, same_where_same(shares, lambda share: (share,)))
        calls = [w.actor.stream.options(num_returns="streaming").remote(m) for w, m in zip(self.workers, messages, strict=True)]
        pending = dict(zip(calls, self.workers, strict=True))
        failures: dict[RayWorker, Any] = {}
        while pending:
            worker, generator = self._ready(method, pending, failures)
            kind, value = self._get(method, worker, next(generator))
            if kind == "items":
                if not failures:
                    yield from from_message(value)
                continue
            del pending[generator]
            if kind == "failure":
                failures[worker] = value
        if failures:
            raise first(method, failures)

    def _messages(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        if self.crew.broken:
            raise WorkerError(self.crew.broken)
        made: dict[int, Any] = {}
        for args in arguments:
            if id(args) not in made:
                message: Message = to_message((method, args))
                made[id(args)] = message if len(message[0]) + message[1].nbytes <= INLINE_BYTES else ray.put(message)
        return [made[id(args)] for args in arguments]

    def _collect(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        with self.crew.lock:
            messages = self._messages(method, arguments)
            pending = {w.actor.call.remote(m): w for w, m in zip(self.workers, messages, strict=True)}
            results: dict[RayWorker, Any] = {}
            failures: dict[RayWorker, Any] = {}
            while pending:
                worker, reference = self._ready(method, pending, failures)
                del pending[reference]
                kind, value = self._get(method, worker, reference)
                (failures if kind == "failure" else results)[worker] = value
            if failures:
                raise first(method, failures)
            return [from_message(results[worker]) for worker in self.workers]

    def _ready(self, method: str, pending: dict[Any, RayWorker], failures: dict[RayWorker, Any]) -> tuple[RayWorker, Any]:
        """The next worker that has something to say. Raises where the others stay stuck after one has failed."""
        limit = time.monotonic() + GRACE if failures else None
        ready, _ = ray.wait(list(pending), timeout=None if limit is None else GRACE, fetch_local=False)
        if not ready:
            error = first(method, failures)
            self.crew.broken = f"the workers have been stopped: {error}"
            self.crew.kill()
            raise error
        return pending[ready[0]], ready[0]

    def _get(self, method: str, worker: RayWorker, reference: Any) -> Any:
        try:
            return ray.get(reference)
        except RayError as error:
            self._died(method, worker, error)

    def _died(self, method: str, worker: RayWorker, error: RayError) -> NoReturn:
        self.crew.broken = f"{worker.name} {worker.fate(error)} during {method}; its output is in {worker.log}"
        self.crew.kill()
        raise WorkerError(self.crew.broken) from error

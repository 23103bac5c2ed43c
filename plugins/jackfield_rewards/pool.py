"""A pool of worker processes that call one function under a time limit; a worker that hangs or dies is replaced."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

from jackfield.errors import PluginError, ScoreError

START_SECONDS = 120.0
"""Limit for a worker to start and import the function's module."""


class _Worker:
    def __init__(self, function: str, adapter: str | None, arguments: dict[str, Any], timeout: float) -> None:
        self.connection, theirs = Pipe()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        command = [sys.executable, "-m", "jackfield_rewards.worker", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, env=environment)
        theirs.close()
        self.connection.send((function, adapter, arguments, sys.path, timeout))
        self.index = -1
        self.deadline = 0.0

    def hello(self) -> str | None:
        """Wait until it is ready; why it cannot be, or None."""
        try:
            if not self.connection.poll(START_SECONDS):
                return f"not imported after {START_SECONDS:g} s"
            problem = self.connection.recv()
        except (EOFError, OSError):
            return f"importing it ended the process (exit status {self.process.wait()})"
        return problem

    def begin(self, index: int, call: Sequence[Any], timeout: float) -> None:
        self.connection.send(call)
        self.index, self.deadline = index, time.monotonic() + timeout

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Pool:
    """Calls `function` (`file.py:name` or `module:name`) in up to `size` processes, started when they are first needed.

    `adapter` (`module:name`) turns the function, in each process, into one that is called as this pool calls.
    """

    def __init__(
        self, function: str, *, adapter: str | None = None, arguments: dict[str, Any] | None = None, size: int = 2, timeout: float = 10.0
    ) -> None:
        self.function, self.adapter, self.arguments, self.size, self.timeout = function, adapter, arguments or {}, size, timeout
        self.workers: list[_Worker] = []

    def map(self, calls: Sequence[Sequence[Any]]) -> list[Any]:
        """The result of function(*call) for each call, by index; a ScoreError where it raised, hung or ended the process."""
        results: list[Any] = [None] * len(calls)
        waiting = list(enumerate(calls))[::-1]
        self.start(min(self.size, len(calls)))
        idle, busy = list(self.workers), {}
        while waiting or busy:
            while waiting and idle:
                index, call = waiting.pop()
                worker = idle.pop()
                try:
                    worker.begin(index, call, self.timeout)
                    busy[worker.connection] = worker
                except OSError:  # it died between two calls: the call goes to another
                    idle.append(self._replace(worker))
                    waiting.append((index, call))
                except Exception as error:  # noqa: BLE001 - a record that cannot be pickled costs itself
                    results[index] = ScoreError(f"{self.function}: the record cannot be sent to a worker: {error}")
                    idle.append(worker)
            for worker, result, alive in self._finished(busy):
                results[worker.index] = result
                del busy[worker.connection]
                idle.append(worker if alive else self._replace(worker))
        return results

    def close(self) -> None:
        """End the workers."""
        while self.workers:
            self._drop(self.workers[0])

    def __del__(self) -> None:
        self.close()

    def start(self, count: int) -> None:
        """Have at least `count` workers ready. Raises PluginError where the function cannot be imported."""
        new = [_Worker(self.function, self.adapter, self.arguments, self.timeout) for _ in range(count - len(self.workers))]
        self.workers += new
        for worker in new:
            problem = worker.hello()
            if problem:
                self.close()
                raise PluginError(f"reward function {self.function!r} cannot be imported: {problem}")

    def _replace(self, worker: _Worker) -> _Worker:
        self._drop(worker)
        self.start(len(self.workers) + 1)
        return self.workers[-1]

    def _drop(self, worker: _Worker) -> None:
        self.workers.remove(worker)
        worker.end()

    def _finished(self, busy: dict[Connection, _Worker]) -> list[tuple[_Worker, Any, bool]]:
        """(worker, result, still usable) of the calls that ended, by their answer, by the worker's death or by the clock."""
        if not busy:
            return []
        soonest = min(w.deadline for w in busy.values())
        ready = wait(list(busy), timeout=max(0.0, soonest - time.monotonic()))
        ended: list[tuple[_Worker, Any, bool]] = []
        for connection, worker in busy.items():
            if connection in ready:
                try:
                    good, value = connection.recv()
                except (EOFError, OSError):
                    code = worker.process.wait()
                    ended.append((worker, ScoreError(f"{self.function}: the worker process died (exit status {code})"), False))
                    continue
                ended.append((worker, value if good else ScoreError(value), True))
            elif time.monotonic() >= worker.deadline:
                ended.append((worker, ScoreError(f"{self.function}: no score after {self.timeout:g} s; the worker was killed"), False))
        return ended

"""The process in which reward functions run: `python -m jackfield_rewards.worker FD`. Imports nothing heavy by itself.

Over the connection comes first (function, adapter or None, arguments, sys.path, seconds); back goes None, or why the function cannot be
imported. An adapter takes the function and returns the one to call in its place. Then comes one list of positional arguments a call; back
goes (True, result) or (False, traceback). `print` in a reward function goes where the run's own output goes.
"""

from __future__ import annotations

import importlib
import importlib.util
import signal
import sys
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def resolve(name: str) -> Any:
    """The object behind `path/to/file.py:name` or `package.module:name`."""
    source, _, attribute = name.rpartition(":")
    if not source.endswith(".py"):
        module = importlib.import_module(source)
    else:
        path = Path(source).resolve()
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {source}")
        sys.path.insert(0, str(path.parent))
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return getattr(module, attribute)


def main(connection: Connection) -> None:
    """Serve calls until the other side closes. Ctrl-C is the run's to answer: it may still want the scores of the step under way."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    name, adapter, arguments, path, seconds = connection.recv()
    sys.path[:] = path
    try:
        function = resolve(name)
        if not callable(function):
            raise TypeError(f"it is of type {type(function).__name__}; name a function")
        if adapter is not None:
            function = resolve(adapter)(function)
    except Exception as error:  # noqa: BLE001 - importing the user's file runs foreign code
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(None)
    while True:
        try:
            call = connection.recv()
        except EOFError:
            return
        # If the run is killed while the function hangs, nobody is left to end this process: the kernel does, by the alarm's default.
        signal.setitimer(signal.ITIMER_REAL, seconds + 5)
        try:
            answer = (True, function(*call, **arguments))
        except Exception:  # noqa: BLE001 - isolating the user's function is what this process is for
            answer = (False, traceback.format_exc())
        signal.setitimer(signal.ITIMER_REAL, 0)
        try:
            connection.send(answer)
        except Exception:  # noqa: BLE001 - the result cannot be pickled
            connection.send((False, traceback.format_exc()))


if __name__ == "__main__":
    try:
        main(Connection(int(sys.argv[1])))
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(1)

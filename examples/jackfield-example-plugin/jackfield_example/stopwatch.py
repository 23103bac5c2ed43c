"""Hook plugin `stopwatch`: a wrapper around a stage."""

import time
from typing import Any

from jackfield import Component, hookimpl


class Stopwatch(Component):
    """Reports the seconds that the advantage stage takes, other wrappers included."""

    @hookimpl(wrapper=True, tryfirst=True)
    def advantage(self, run: Any, batch: Any) -> Any:
        """Before `yield` the batch has no advantages yet; after it the other plugins are done."""
        start = time.perf_counter()
        result = yield
        run.metrics["example/advantage_seconds"] = time.perf_counter() - start
        return result

"""What trackers that write elsewhere share: when they are called, and that a failing one never stops a run."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from typing import Any

from jackfield.components import Tracker
from jackfield.hookspecs import hookimpl


class MetricsTracker(Tracker):
    """Subclasses give `open`, `log` and `close`. An `open` that raises is an error before the first step; a `log` that raises is
    reported once as a warning, counted in `tracker/<name>/failed`, and tried again at the next step."""

    config: Any
    opened = False
    failures = 0

    @abstractmethod
    def open(self, run: Any) -> None:
        """The run starts, or goes on from step `run.step`."""

    @abstractmethod
    def log(self, step: int, metrics: dict[str, float]) -> None:
        """The metrics of a finished step."""

    @abstractmethod
    def close(self, failed: bool) -> None:
        """The run has ended."""

    @hookimpl
    def run_start(self, run: Any) -> None:
        """Open."""
        self.open(run)
        self.opened = True

    @hookimpl(trylast=True)
    def step_end(self, run: Any, metrics: dict[str, float]) -> None:
        """Log what all other plugins have added by now."""
        try:
            self.log(run.step, dict(metrics))
        except Exception as error:  # noqa: BLE001 - a dashboard that cannot be reached is no reason to lose a training run
            self.failures += 1
            metrics[f"tracker/{type(self).__name__.lower()}/failed"] = float(self.failures)
            if self.failures == 1:
                warnings.warn(f"{type(self).__name__} could not log step {run.step}: {type(error).__name__}: {error}", stacklevel=1)

    @hookimpl
    def run_end(self, run: Any) -> None:
        """Close."""
        self._close(failed=False)

    @hookimpl
    def run_error(self, run: Any, error: BaseException) -> None:
        """Close, marked as failed."""
        self._close(failed=True)

    def _close(self, *, failed: bool) -> None:
        if not self.opened:
            return
        self.opened = False
        try:
            self.close(failed)
        except Exception as error:  # noqa: BLE001 - the run is over; what matters is saved
            warnings.warn(f"{type(self).__name__} could not be closed: {type(error).__name__}: {error}", stacklevel=1)


def plain_config(run: Any) -> dict[str, Any]:
    """The run's config as plain data."""
    plain: dict[str, Any] = run.config.model_dump(mode="json")
    return plain

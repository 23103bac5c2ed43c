"""Tracker `console`: progress on the terminal while a run trains."""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from pydantic import Field

from jackfield.components import ComponentConfig, Tracker
from jackfield.hookspecs import hookimpl

if TYPE_CHECKING:
    from jackfield.run import Run


class Console(Tracker):
    """Progress bar with the latest numbers on a terminal; elsewhere a line every `every` steps."""

    class Config(ComponentConfig):
        """What to show."""

        every: int = Field(default=1, gt=0)
        """Steps between lines where the output is no terminal."""
        show: tuple[str, ...] = ("reward", "response/length", "kl", "entropy", "grad_norm", "rollout_gap/mean", "time/step")
        """Metrics to show, in this order, as far as they exist."""
        alarm: tuple[str, ...] = ("skipped", "bad_gradients", "rollout/overlong", "rollout/aborted")
        """Metrics to show beside them wherever they are not 0: a step with nothing to train, a gradient that was not finite, prompts that
        were dropped, samples that the engine gave up. So are all that end in `failed`: of rewards, environments and trackers."""

    config: Config

    @hookimpl
    def run_start(self, run: Run) -> None:
        """Start the bar."""
        from rich.console import Console as Terminal
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self.terminal = Terminal(file=sys.stderr)
        self.bar: Any = None
        if self.terminal.is_terminal and not os.environ.get("CI"):
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(20), TimeRemainingColumn(), TextColumn("{task.description}"))
            self.bar = Progress(*columns, console=self.terminal)
            self.bar.start()
            self.task = self.bar.add_task("", total=run.config.steps, completed=run.step)

    @hookimpl(trylast=True)
    def step_end(self, run: Run, metrics: dict[str, float]) -> None:
        """Show the step."""
        names = [
            *(n for n in self.config.show if n in metrics),
            *(n for n, v in metrics.items() if v and (n in self.config.alarm or n.endswith("failed"))),
        ]
        text = "  ".join(f"{name.removeprefix('time/')} {metrics[name]:.4g}" for name in names)
        if self.bar is not None:
            self.bar.update(self.task, completed=run.step, description=text)
        elif run.step % self.config.every == 0 or run.step == run.config.steps:
            print(f"step {run.step}/{run.config.steps}  {text}", file=sys.stderr, flush=True)

    @hookimpl
    def run_end(self, run: Run) -> None:
        """Leave the bar as it stands."""
        self._stop()

    @hookimpl
    def run_error(self, run: Run, error: BaseException) -> None:
        """Free the terminal for the error message."""
        self._stop()

    def _stop(self) -> None:
        if getattr(self, "bar", None) is not None:
            self.bar.stop()

"""`jackfield train`: a run from a config file."""

from __future__ import annotations

import json
import signal
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from jackfield.hookspecs import hookimpl

if TYPE_CHECKING:
    from jackfield.run import Run

_FULL = warnings.formatwarning


@click.command()
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("-p", "plugins", multiple=True, metavar="NAME", help="Add hook plugin NAME for this run; no:NAME leaves one out.")
@click.option("--trace-hooks", is_flag=True, help="End with the time spent in each plugin's hooks.")
def train(config: str, overrides: tuple[str, ...], plugins: tuple[str, ...], trace_hooks: bool) -> None:
    """Train as CONFIG says; OVERRIDES are field.subfield=value."""
    from jackfield.config import load_config

    warnings.formatwarning = _on_one_line
    settings = load_config(config, overrides, plugins)
    from jackfield.trainer import Trainer

    trainer = Trainer(settings)
    trainer.run.manager.register(Stop(), "jackfield train")
    run = trainer.train()
    if "time/step" not in run.metrics:
        click.echo(f"nothing to train: the run is at step {run.step}, and steps is {settings.steps}")
    if summary := _reward(run.dir / "metrics.jsonl"):
        click.echo(summary)
    click.echo(f"run folder: {run.dir}")
    if trace_hooks:
        for (plugin, hook), seconds in sorted(run.manager.seconds.items(), key=lambda item: -item[1]):
            click.echo(f"{seconds:10.3f} s  {hook:16s} {plugin}")


class Stop:
    """At the first Ctrl-C or SIGTERM the run ends after the step under way, with a checkpoint; at the second at once."""

    asked = 0

    @hookimpl
    def run_start(self, run: Run) -> None:
        """Before the first step there is nothing to save: until here a signal ends the run at once."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._ask)

    def _ask(self, number: int, frame: object) -> None:
        self.asked = number
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)
        click.echo("ending after this step with a checkpoint; once more, and it ends at once without", err=True)

    @hookimpl(trylast=True)
    def step_end(self, run: Run, metrics: dict[str, float]) -> None:
        """Save and end. Registered last, so that what other plugins do at the end of a step is done."""
        if self.asked and run.step < run.config.steps:
            from jackfield import checkpoint

            folder = checkpoint.save(run)
            click.echo(f"ended after step {run.step} of {run.config.steps}; the same command goes on from {folder}", err=True)
            sys.exit(128 + self.asked)


def _on_one_line(message: Warning | str, category: type[Warning], *place: Any, **more: Any) -> str:
    """A warning to the user without the line of code that gives it; others as they are."""
    return f"warning: {message}\n" if category is UserWarning else _FULL(message, category, *place, **more)


def _reward(metrics: Path) -> str:
    """The mean reward at the start and at the end of a run; empty where it took no step."""
    history = [json.loads(line)["reward"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
    if not history:
        return ""
    tenth = max(len(history) // 10, 1)
    first, last = (sum(rows) / tenth for rows in (history[:tenth], history[-tenth:]))
    return f"reward: {first:.3f} in the first tenth of {len(history)} steps, {last:.3f} in the last"

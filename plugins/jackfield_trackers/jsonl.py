"""Tracker `jsonl`: the run's config.json, plugins.json and metrics.jsonl; every run has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.components import Tracker
from jackfield.hookspecs import hookimpl
from jackfield.shard import BYTES

if TYPE_CHECKING:
    from jackfield.run import Run
    from jackfield.shard import SyncReport


class JsonLines(Tracker):
    """Writes down what the run is, and appends one line a step to `metrics.jsonl`; after a resume the lines of steps that will be done
    again are dropped."""

    @hookimpl
    def weights_synced(self, run: Run, report: SyncReport) -> None:
        """Count the sync among the step's metrics."""
        run.metrics |= {f"sync/{name}": seconds for name, seconds in report.seconds.items()}
        run.metrics |= {f"sync/{n}": float(getattr(report, n)) for n in BYTES}

    @hookimpl
    def run_start(self, run: Run) -> None:
        """Write the config and the plugins, now that nothing has refused them; drop lines beyond the step that the run starts from."""
        (run.dir / "config.json").write_text(run.config.model_dump_json(indent=1))
        (run.dir / "plugins.json").write_text(json.dumps(run.plugins, indent=1))
        path = run.dir / "metrics.jsonl"
        if path.exists():
            kept = [line for line in path.read_text().splitlines() if _step(line) <= run.step]
            partial = Path(f"{path}.partial")
            partial.write_text("".join(f"{line}\n" for line in kept))
            partial.replace(path)

    @hookimpl(trylast=True)
    def step_end(self, run: Run, metrics: dict[str, float]) -> None:
        """Append the step; whole lines only, so that a killed run leaves at most one torn line."""
        with (run.dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": run.step, **{k: float(f"{v:.8g}") for k, v in metrics.items()}}) + "\n")


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")

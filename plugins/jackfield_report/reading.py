"""What a run's folder says about the run."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jackfield.errors import DataError


@dataclass(frozen=True)
class RunRecord:
    """A run as its folder has it."""

    name: str
    config: dict[str, Any]
    steps: list[dict[str, float]]
    """metrics.jsonl: each line has `step`."""
    samples: list[dict[str, Any]]
    """samples.jsonl; empty without tracker `samples`."""

    def series(self, name: str) -> list[tuple[float, float]]:
        """(step, value) of a metric, where it was reported and is a number."""
        return [(row["step"], row[name]) for row in self.steps if isinstance(row.get(name), int | float)]

    def names(self) -> list[str]:
        """Every metric, in order of first appearance."""
        return list(dict.fromkeys(name for row in self.steps for name in row if name != "step"))


def read(folder: Path) -> RunRecord:
    """Read a run's folder, also of a run that is under way or was killed. Raises DataError where there is nothing to report."""
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise DataError(f"{folder} is no run's folder: it has no metrics.jsonl; give the folder that `jackfield train` printed last")
    steps = _lines(metrics)
    if not steps:
        raise DataError(f"{metrics} holds no finished step yet; wait for the first, or look at the run's own output")
    config = folder / "config.json"
    try:
        settings = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    except ValueError as error:
        raise DataError(f"{config} is not JSON ({error}): mend it, or remove it and go without the run's settings") from error
    samples = folder / "samples.jsonl"
    return RunRecord(folder.resolve().name, settings, steps, _lines(samples) if samples.is_file() else [])


def _lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines; a torn last line, left by a killed run, is skipped."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found

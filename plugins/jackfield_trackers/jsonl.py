"""Tracker `jsonl`: the run's config.json, plugins.json and metrics.jsonl; every run has it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from jackfield.components import Tracker
from jackfield.config import RunConfig, role_config
from jackfield.errors import CheckpointError, PluginError
from jackfield.hookspecs import hookimpl
from jackfield.shard import BYTES
from jackfield_trackers import recorded

if TYPE_CHECKING:
    from jackfield.run import Run
    from jackfield.shard import SyncReport


class JsonLines(Tracker):
    """Writes down what the run is, and appends one line a step to `metrics.jsonl`; after a resume the lines of steps that will be done
    again are dropped."""

    @hookimpl(tryfirst=True)
    def configure(self, run: Run) -> None:
        """See what made the run."""
        backend = role_config(run.config, "policy").backend
        made = {"class": backend.name if backend else "", "distribution": "", "stages": ["update"]}
        run.plugins = recorded.plugins(run.manager) | {"policy.backend": made}

    def _write(self, run: Run, folder: Path) -> None:
        (folder / "config.json").write_text(run.config.model_dump_json(indent=1))
        (folder / "plugins.json").write_text(json.dumps(run.plugins, indent=1))

    @hookimpl
    def checkpoint_save(self, run: Run, folder: Path) -> None:
        """Write down what made the checkpoint."""
        self._write(run, folder)

    @hookimpl(tryfirst=True)
    def checkpoint_load(self, run: Run, folder: Path) -> None:
        """Compare with what made the checkpoint. Raises CheckpointError for a plugin of a stage that is another one."""
        try:
            plugins, config = (json.loads((folder / name).read_text()) for name in ("plugins.json", "config.json"))
            before = RunConfig.model_validate(config)
        except (OSError, ValueError) as error:
            why = " ".join(str(error).split())
            raise CheckpointError(f"{folder} is no readable checkpoint: {why}; remove it to resume from the one before it") from error
        strict = run.config.checkpoint.changed_plugins == "error"
        run.metrics["resume/plugins_changed"] = float(len(recorded.compare(plugins, run.plugins, strict=strict)))
        recorded.changed(recorded.settings(before), recorded.settings(run.config))

    @hookimpl
    def weights_synced(self, run: Run, report: SyncReport) -> None:
        """Count the sync among the step's metrics."""
        run.metrics |= {f"sync/{name}": seconds for name, seconds in report.seconds.items()}
        run.metrics |= {f"sync/{n}": float(getattr(report, n)) for n in BYTES}

    @hookimpl
    def run_start(self, run: Run) -> None:
        """Write the config and the plugins, now that nothing has refused them; drop lines beyond the step that the run starts from."""
        self._write(run, run.dir)
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
            file.write(json.dumps({"step": run.step, **{k: _rounded(k, v) for k, v in metrics.items()}}) + "\n")


def _rounded(name: str, value: float) -> float:
    try:
        return float(f"{float(value):.8g}")
    except (TypeError, ValueError, RuntimeError) as error:
        raise PluginError(f"metric {name!r} is {value!r:.80}, no number: the plugin that reports it has to reduce it to one") from error


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")

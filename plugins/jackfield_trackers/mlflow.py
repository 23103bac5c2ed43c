"""Tracker `mlflow`, into a database in the run's folder unless told otherwise."""

from __future__ import annotations

import json
from typing import Any

import mlflow

from jackfield.components import ComponentConfig
from jackfield_trackers.base import MetricsTracker, plain_config

LONGEST = 500
"""Most characters that MLflow takes as a parameter's value (older servers)."""


class MlflowConfig(ComponentConfig):
    """Settings of `mlflow`."""

    experiment: str = "jackfield"
    """Experiment."""
    name: str | None = None
    """Name of the run; default: the run folder's."""
    uri: str | None = None
    """Tracking server; default: a SQLite file `mlflow.db` in the run's folder."""


class Mlflow(MetricsTracker):
    """The run's id is kept in its folder, so that a resumed run goes on in the same MLflow run."""

    Config: type[ComponentConfig] = MlflowConfig

    def open(self, run: Any) -> None:
        """See MetricsTracker."""
        self.client = mlflow.MlflowClient(tracking_uri=self.config.uri or f"sqlite:///{run.dir.resolve() / 'mlflow.db'}")
        known = run.dir / "mlflow_id"
        if known.is_file():
            self.id = known.read_text().strip()
            return
        experiment = self.client.get_experiment_by_name(self.config.experiment)
        number = experiment.experiment_id if experiment else self.client.create_experiment(self.config.experiment)
        self.id = self.client.create_run(number, run_name=self.config.name or run.dir.name).info.run_id
        for name, value in plain_config(run).items():
            self.client.log_param(self.id, name, json.dumps(value)[:LONGEST])
        known.write_text(self.id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """See MetricsTracker."""
        now = mlflow.utils.time.get_current_time_millis()
        entries = [mlflow.entities.Metric(name, value, now, step) for name, value in metrics.items()]
        self.client.log_batch(self.id, metrics=entries)

    def close(self, failed: bool) -> None:
        """See MetricsTracker."""
        self.client.set_terminated(self.id, status="FAILED" if failed else "FINISHED")

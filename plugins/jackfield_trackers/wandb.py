"""Tracker `wandb`: Weights & Biases, offline unless told otherwise."""

from __future__ import annotations

from typing import Any, Literal

import wandb

from jackfield.components import ComponentConfig
from jackfield_trackers.base import MetricsTracker, plain_config


class WandbConfig(ComponentConfig):
    """Settings of `wandb`."""

    project: str = "jackfield"
    """Project."""
    name: str | None = None
    """Name of the run; default: the run folder's."""
    entity: str | None = None
    """User or team."""
    mode: Literal["offline", "online", "disabled"] = "offline"
    """offline writes into the run's folder, for `wandb sync` later; online needs a network and a login."""


class Wandb(MetricsTracker):
    """The run's id is kept in its folder, so that a resumed run goes on in the same W&B run."""

    Config: type[ComponentConfig] = WandbConfig

    def open(self, run: Any) -> None:
        """See MetricsTracker."""
        known = run.dir / "wandb_id"
        identity = known.read_text().strip() if known.is_file() else None
        self.session = wandb.init(
            project=self.config.project,
            name=self.config.name or run.dir.name,
            entity=self.config.entity,
            mode=self.config.mode,
            dir=str(run.dir),
            id=identity,
            resume="allow",
            config=plain_config(run),
        )
        known.write_text(self.session.id)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """See MetricsTracker."""
        self.session.log(metrics, step=step)

    def close(self, failed: bool) -> None:
        """See MetricsTracker."""
        self.session.finish(exit_code=int(failed))

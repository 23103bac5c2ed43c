"""Tracker `tensorboard`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from jackfield.components import ComponentConfig
from jackfield_trackers.base import MetricsTracker, plain_config


class TensorBoardConfig(ComponentConfig):
    """Settings of `tensorboard`."""

    dir: Path | None = None
    """Folder of the event files; default: `tensorboard` in the run's folder."""


class TensorBoard(MetricsTracker):
    """A scalar for each metric, and the config as text. After a resume, steps that are done again replace the old ones."""

    Config: type[ComponentConfig] = TensorBoardConfig

    def open(self, run: Any) -> None:
        """See MetricsTracker."""
        self.writer = SummaryWriter(str(self.config.dir or run.dir / "tensorboard"), purge_step=run.step + 1 if run.step else None)
        self.writer.add_text("config", f"```json\n{json.dumps(plain_config(run), indent=1)}\n```", run.step)

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """See MetricsTracker."""
        for name, value in metrics.items():
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self, failed: bool) -> None:
        """See MetricsTracker."""
        self.writer.close()

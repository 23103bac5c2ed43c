"""The names with which people who know verl start: `PPOTrainer(get_ppo_config(model_name=...)).train()`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jackfield.config import ComponentSpec, RunConfig, load_config
from jackfield.errors import ConfigError
from jackfield.trainer import Trainer
from jackfield_flow.flow import DataFlow


def get_ppo_config(model_name: str, overrides: Sequence[str] = (), **fields: Any) -> RunConfig:
    """A run of PPO on `model_name`, a Hugging Face folder or hub name; its defaults are in `ppo.yaml` beside this file.

    `fields` replace whole fields of the config (`dataset={"name": "jsonl", "path": "gsm8k.jsonl"}, steps=200`), `overrides` single ones
    below them, as on the command line (`["batch.prompts=128", "critic.optimizer.lr=2e-5"]`). Raises ConfigError.
    """
    whole = [f"{name}={json.dumps(value, default=str)}" for name, value in fields.items()]
    return load_config(Path(__file__).with_name("ppo.yaml"), [*whole, f"policy.model.path={json.dumps(model_name)}", *overrides])


class PPOTrainer(Trainer):
    """jackfield.Trainer that can be given a flow: `PPOTrainer(config, data_flow=MyFlow).train()`. Any algorithm may be in the config."""

    def __init__(self, config: RunConfig, data_flow: type[DataFlow] | None = None) -> None:
        """Raises ConfigError for a flow that cannot be found by its name, as a run that restarts has to."""
        if data_flow is not None:
            module, name = data_flow.__module__, data_flow.__qualname__
            if getattr(sys.modules.get(module), name, None) is not data_flow:
                raise ConfigError(f"data_flow {module}.{name} cannot be found by its name: define it at the top level of a module")
            config = config.model_copy(update={"hooks": [*config.hooks, ComponentSpec(name=f"{module}:{name}")]})
        super().__init__(config)

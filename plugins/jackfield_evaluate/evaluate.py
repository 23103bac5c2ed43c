"""Held-out evaluation: mean reward over a second dataset, under `eval/` in the metrics."""

from __future__ import annotations

from typing import Any

from pydantic import Field

from jackfield import registry, stages
from jackfield.components import Component, ComponentConfig
from jackfield.config import ComponentSpec
from jackfield.hookspecs import hookimpl
from jackfield.run import PromptStream, Run


class Evaluate(Component):
    """Every `every` steps and at the end, one sample of each row; calls all `evaluate` hooks, this one included."""

    class Config(ComponentConfig):
        """What to evaluate on, and when."""

        dataset: ComponentSpec
        """Held-out rows."""
        every: int = Field(default=10, gt=0)
        """Steps between evaluations."""
        temperature: float = Field(default=0.0, ge=0)
        """Sampling temperature; 0 is greedy."""

    config: Any

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.rows = registry.build("dataset", config.dataset)

    @hookimpl(tryfirst=True)
    def step_end(self, run: Run, metrics: dict[str, float]) -> None:
        """Ask every `evaluate` hook when it is time."""
        if run.step % self.config.every == 0 or run.step == run.config.steps:
            for result in run.hook.evaluate(run=run):
                metrics |= {f"eval/{name}": value for name, value in result.items()}

    @hookimpl
    def evaluate(self, run: Run) -> dict[str, float]:
        """Mean reward; rows that no reward could score count 0."""
        with run.sampling_as(temperature=self.config.temperature, group_size=1):
            prompts = PromptStream(self.rows, run.seed).take(len(self.rows))
            batch = stages.score(run, run.hook.rollout(run=run, prompts=prompts))
        assert batch.rewards is not None
        return {"reward": float(batch.rewards.mean())}

"""Reward `trl`: a reward function as TRL's GRPOTrainer and RLOOTrainer take it, unchanged (docs/coming-from-trl.md)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from pydantic import Field

from jackfield.batch import Batch
from jackfield.components import ComponentConfig
from jackfield.errors import ConfigError, PluginError, ScoreError
from jackfield.hookspecs import hookimpl
from jackfield_rewards.foreign import TrainerState, numbers, own_metrics
from jackfield_rewards.function import PoolConfig, PooledReward


class TRLConfig(PoolConfig):
    """Settings of `trl`."""

    function: str
    """`path/to/file.py:name` or `package.module:name`, such as `trl.rewards:accuracy_reward`. Called with keyword arguments `prompts`,
    `completions`, `completion_ids`, each column of the dataset, `trainer_state`, `log_extra` and `log_metric`; may be a coroutine."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds for one call, which has a whole batch."""


class TRLReward(PooledReward):
    """A TRL reward function in a worker process, called once a batch; where that raises or hangs, once a sample.

    None means "does not apply": the sample's reward is the sum of those that do, and a sample to which no reward applies is not trained on
    (and counts in no baseline), but is no failure either.
    """

    Config: type[ComponentConfig] = TRLConfig
    pool_adapter = "jackfield_rewards.foreign:trl"

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.ids: list[list[int]] = []
        self.state = TrainerState()
        self.found: dict[str, list[float]] = {}
        self.silent: list[bool] = []
        """By sample of the last batch: whether the function returned None."""

    @property
    def pool_function(self) -> str:  # type: ignore[override]
        """The user's function."""
        return self.config.function

    def pool_arguments(self) -> dict[str, Any]:
        """TRL's functions have no settings."""
        return {}

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score; 0 where the function does not apply. Raises PluginError where it returns the wrong number of scores."""
        ids = self.ids if len(self.ids) == len(records) else [None] * len(records)
        items = list(zip(records, ids, strict=True))
        scores, self.found = self._call(items)
        self.silent = [score is None for score in scores]
        return [0.0 if score is None else score for score in scores]

    def _call(self, items: Sequence[tuple[dict[str, Any], Any]]) -> tuple[list[Any], dict[str, list[float]]]:
        if not items:
            return [], {}
        (answer,) = self.pool.map([(list(items), self.state)])
        if not isinstance(answer, ScoreError):
            return self._checked(answer[0], len(items)), answer[1]
        if len(items) == 1:
            return [answer], {}
        singles = self.pool.map([([item], self.state) for item in items])
        good = [a for a in singles if not isinstance(a, ScoreError)]
        scores = [a if isinstance(a, ScoreError) else self._checked(a[0], 1)[0] for a in singles]
        return scores, numbers([{n: v for n, values in a[1].items() for v in values} for a in good])

    def _checked(self, scores: Any, count: int) -> list[Any]:
        if not isinstance(scores, list) or len(scores) != count:
            what = f"{len(scores)} scores" if isinstance(scores, list) else f"a {scores}"
            raise PluginError(
                f"reward function {self.config.function!r} returned {what} for {count} completions; return one each, in order"
            )
        return scores

    @hookimpl
    def configure(self, run: Any) -> None:
        """See PooledReward. Raises ConfigError for workers of its own, where neither token ids nor the trainer's state would reach it."""
        self.label = str(run.manager.get_name(self)).removeprefix("hooks of reward ")
        if any(spec.label == self.label and (spec.gpus or spec.colocate) for spec in run.config.rewards):
            raise ConfigError(
                f"reward {self.label!r} (trl) runs in processes beside the controller: leave out gpus and colocate, say workers"
            )
        super().configure(run)

    @hookimpl(specname="score", wrapper=True)
    def _score(self, run: Any, batch: Batch) -> Generator[None, list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
        """Before scoring, what the records lack; after it, the samples to which no reward applies."""
        ends = zip(batch.tokens, batch.prompt_lengths.tolist(), batch.lengths.tolist(), strict=True)
        self.ids = [tokens[start:end].tolist() for tokens, start, end in ends]
        self.state = TrainerState(run.step, run.config.steps, run.prompts.drawn / max(len(run.prompts.dataset), 1))
        results = yield
        own_metrics(run, self.config.function, self.found)
        count = f"reward/{self.label}/not_applicable"
        run.metrics[count] = run.metrics.get(count, 0.0) + sum(self.silent)
        weighted = {spec.label for spec in run.config.rewards if spec.weight}
        rewards = [p for p in run.manager.get_plugins() if isinstance(p, TRLReward) and p.label in weighted]
        if len(rewards) < len(weighted) or not rewards or not len(batch):
            return results  # rewards of other kinds apply to every sample
        none = torch.tensor([reward.silent for reward in rewards]).all(0)
        return [{n: torch.where(none, torch.nan, v) if n == self.label else v for n, v in scores.items()} for scores in results]

"""Reward `verl`: a reward function as verl's `reward.custom_reward_function` takes it, unchanged (docs/coming-from-verl.md)."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

import torch
from pydantic import Field

from jackfield.batch import Batch
from jackfield.components import ComponentConfig
from jackfield.errors import PluginError, ScoreError
from jackfield.hookspecs import hookimpl
from jackfield_rewards.foreign import numbers, own_metrics
from jackfield_rewards.function import PoolConfig, PooledReward


class VerlConfig(PoolConfig):
    """Settings of `verl`."""

    function: str
    """`path/to/file.py:name` or `package.module:name`, such as `verl.utils.reward_score:default_compute_score`. Called with keyword
    arguments `data_source`, `solution_str`, `ground_truth`, `extra_info`; returns a number, or a dict with `score`; may be a coroutine."""
    batched: bool = False
    """For functions of verl's reward manager `batch`: called once a batch with `data_sources`, `solution_strs`, `ground_truths` and
    `extra_infos`; returns one number or dict each."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments: verl's `reward_kwargs`."""
    reward_fn_key: str = "data_source"
    """The dataset's column that is handed on as `data_source`."""
    timeout: float = Field(default=60.0, gt=0)
    """Seconds for one call."""


class VerlReward(PooledReward):
    """A verl reward function in worker processes. Numbers beside `score` in its dicts become metrics."""

    Config: type[ComponentConfig] = VerlConfig

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.found: dict[str, list[float]] = {}

    @property
    def pool_function(self) -> str:  # type: ignore[override]
        """The user's function."""
        return self.config.function

    @property
    def pool_adapter(self) -> str:  # type: ignore[override]
        """Calls it with verl's arguments."""
        return f"jackfield_rewards.foreign:{'verl_batched' if self.config.batched else 'verl'}"

    def pool_arguments(self) -> dict[str, Any]:
        """What the adapters take beside the records."""
        return {"key": self.config.reward_fn_key, "more": self.config.arguments}

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score; a ScoreError where a sample failed. Raises PluginError where a batched one returns the wrong number."""
        answers = self._batched(records) if self.config.batched and records else self.pool.map([(record,) for record in records])
        dicts = [a for a in answers if isinstance(a, dict)]
        self.found = numbers([{n: v for n, v in each.items() if n != "score"} for each in dicts])
        return [a.get("score") if isinstance(a, dict) else a for a in answers]

    def _batched(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        (answer,) = self.pool.map([(list(records),)])
        if isinstance(answer, ScoreError) and len(records) > 1:
            return [score for record in records for score in self._batched([record])]
        if isinstance(answer, ScoreError):
            return [answer]
        if not isinstance(answer, list) or len(answer) != len(records):
            what = f"{len(answer)} scores" if isinstance(answer, list) else f"a {answer}"
            raise PluginError(
                f"reward function {self.config.function!r} returned {what} for {len(records)} samples; return one each, in order"
            )
        return answer

    @hookimpl(specname="score", wrapper=True)
    def _score(self, run: Any, batch: Batch) -> Generator[None, list[dict[str, torch.Tensor]], list[dict[str, torch.Tensor]]]:
        """After scoring, the function's own numbers."""
        results = yield
        own_metrics(run, self.config.function, self.found)
        return results

"""Reward `function`: a Python function of your own, in worker processes, under a time limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from jackfield.components import ComponentConfig, Reward
from jackfield.errors import PluginError, ScoreError
from jackfield.hookspecs import hookimpl
from jackfield_rewards.pool import Pool


class PoolConfig(ComponentConfig):
    """Where a per-sample function runs."""

    timeout: float = Field(default=10.0, gt=0)
    """Seconds for one call; then its process is killed and replaced."""
    workers: int = Field(default=2, gt=0)
    """Processes."""


class PooledReward(Reward):
    """Base of rewards that run in worker processes: `pool_function` (`module:name`, record -> score) with `pool_arguments`."""

    isolated = True
    Config: type[ComponentConfig] = PoolConfig
    config: Any
    pool_function: str
    pool_adapter: str | None = None
    """`module:name` of what turns the function into one that takes the pool's calls."""

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        arguments, settings = self.pool_arguments(), self.config
        self.pool = Pool(
            self.pool_function, adapter=self.pool_adapter, arguments=arguments, size=settings.workers, timeout=settings.timeout
        )

    def pool_arguments(self) -> dict[str, Any]:
        """Keyword arguments of every call; by default the settings that are the reward's own."""
        return {k: v for k, v in self.config.model_dump().items() if k not in PoolConfig.model_fields}

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score; a ScoreError where a sample failed."""
        return self.pool.map([(record,) for record in records])

    @hookimpl
    def configure(self, run: Any) -> None:
        """Start a worker, so that a function that cannot be imported is an error before any model is loaded."""
        self.pool.start(1)

    @hookimpl
    def run_end(self, run: Any) -> None:
        """End the worker processes."""
        self.pool.close()

    @hookimpl
    def run_error(self, run: Any, error: Exception) -> None:
        """End the worker processes."""
        self.pool.close()


class FunctionConfig(PoolConfig):
    """Settings of `function`."""

    function: str
    """`path/to/file.py:name` or `package.module:name`. Called as fn(record) -> float; `record` has the row's fields, `prompt`,
    `response`, `response_tokens` and `finish_reason`."""
    batched: bool = False
    """Call it once a batch instead: fn(records) -> one score each. Where that raises or hangs, it is called with one at a time."""
    arguments: dict[str, Any] = {}
    """Further keyword arguments."""


class FunctionReward(PooledReward):
    """`rewards: [my.py:fn]` means this reward with `function: my.py:fn`."""

    Config: type[ComponentConfig] = FunctionConfig

    @property
    def pool_function(self) -> str:  # type: ignore[override]
        """The user's function."""
        return self.config.function

    def pool_arguments(self) -> dict[str, Any]:
        """The user's keyword arguments."""
        return self.config.arguments

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score. Raises PluginError naming the function where it returns the wrong number of scores."""
        if not self.config.batched:
            return super().score(records)
        (values,) = self.pool.map([(list(records),)])
        if not isinstance(values, ScoreError):
            return self._checked(values, len(records))
        if len(records) == 1:
            return [values]
        singles = self.pool.map([([record],) for record in records])
        return [v if isinstance(v, ScoreError) else self._checked(v, 1)[0] for v in singles]

    def _checked(self, values: Any, count: int) -> list[Any]:
        got = len(values) if hasattr(values, "__len__") and not isinstance(values, str | dict) else None
        if got != count:
            what = f"{got} scores" if got is not None else f"a {type(values).__name__}"
            raise PluginError(f"reward function {self.config.function!r} returned {what} for {count} records; return one each, in order")
        return list(values)

"""Scoring: the one place where rewards are isolated, so that one that raises, lies or hangs costs its own samples (law 17)."""

from __future__ import annotations

import math
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jackfield.batch import Batch
from jackfield.components import Reward
from jackfield.config import RewardSpec
from jackfield.errors import JackfieldError, PluginError, ScoreError
from jackfield.hookspecs import hookimpl


class RewardHook:
    """A configured reward as a hook plugin. Samples that cannot be scored get NaN and are counted in `reward/<label>/failed`."""

    def __init__(self, reward: Reward, label: str, *, deadline: float = 600.0, max_failures: int = 3) -> None:
        self.reward, self.label, self.deadline, self.max_failures = reward, label, deadline, max_failures
        self.bad_batches = 0
        self.first_error = ""

    @hookimpl
    def score(self, run: Any, batch: Batch) -> dict[str, Tensor]:
        """{label: float32 [B]}. Raises PluginError after `max_failures` batches in a row of which more than half failed."""
        values = self.isolated([dict(record) for record in batch.records]) if len(batch) else []
        scores = [self._number(value) for value in values]
        failed = sum(math.isnan(s) for s in scores)
        name = f"reward/{self.label}/failed"
        run.metrics[name] = run.metrics.get(name, 0.0) + failed
        self.bad_batches = self.bad_batches + 1 if failed > len(batch) / 2 else 0
        if self.bad_batches >= self.max_failures:
            raise PluginError(
                f"reward {self.label!r} failed on {failed} of {len(batch)} samples, and on most in each of {self.bad_batches} batches "
                f"in a row; correct it, or raise its max_failures ({self.max_failures}); the first failure:\n{self.first_error}"
            )
        self.first_error = self.first_error if self.bad_batches else ""
        return {self.label: torch.tensor(scores, dtype=torch.float32)}

    def isolated(self, records: list[dict[str, Any]]) -> list[Any]:
        """One value or exception a record: from one call or, where that raises or hangs, from a call for each."""
        try:
            return self._call(records)
        except JackfieldError:
            raise
        except Exception as error:  # noqa: BLE001 - a reward is foreign code: this is where it is isolated
            if len(records) == 1:
                return [error]
            self._note(error)
        values: list[Any] = []
        hung = 0
        for record in records:
            values += self.isolated([record])
            hung = hung + 1 if isinstance(values[-1], TimeoutError) else 0
            if hung >= self.max_failures:
                raise PluginError(f"reward {self.label!r} hung on {hung} samples in a row, {self.deadline:g} s each; correct it")
        return values

    def _call(self, records: list[dict[str, Any]]) -> list[Any]:
        """`score`, given up after the deadline; the thread it hangs in is left behind, since threads cannot be killed."""
        done: list[Any] = []

        def target() -> None:
            try:
                done.append(self.reward.score(records))
            except (Exception, SystemExit) as error:  # noqa: BLE001 - raised again below, in the caller's thread
                done.append(error if isinstance(error, Exception) else RuntimeError(f"the reward exited: {error}"))

        if self.reward.isolated:
            target()
        else:
            thread = threading.Thread(target=target, name=f"reward {self.label}", daemon=True)
            thread.start()
            thread.join(self.deadline)
        values = done[0] if done else TimeoutError(f"no scores for {len(records)} samples after {self.deadline:g} s")
        if isinstance(values, Exception):
            raise values
        if isinstance(values, str | Mapping) or not hasattr(values, "__len__") or len(values) != len(records):
            got = len(values) if hasattr(values, "__len__") else repr(values)
            raise PluginError(f"reward {self.label!r} returned {got} scores for {len(records)} samples; return one a sample, in order")
        return list(values)

    def _number(self, value: Any) -> float:
        """The score, or NaN with the reason noted for anything but a finite number."""
        try:
            if isinstance(value, Exception):
                raise value
            if value is None or isinstance(value, str) or not math.isfinite(float(value)):
                raise ScoreError(f"{self.label!r} returned {value!r:.200}, not a finite number")
        except Exception as error:  # noqa: BLE001 - whatever the reward returned, or raises when converted, is its own sample's failure
            self._note(error)
            return math.nan
        return float(value)

    def _note(self, error: Exception) -> None:
        text = str(error) if isinstance(error, ScoreError) else "".join(traceback.format_exception(error))
        self.first_error = self.first_error or text


class PlacedReward(Reward):
    """Stands on the controller for a reward that has workers: each scores a contiguous share of the records."""

    isolated = True

    def __init__(self, label: str, group: Any) -> None:
        self.label, self.group = label, group
        group.call("setup_reward", label)

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward."""
        step = -(-len(records) // self.group.size)
        shares = [list(records[rank * step : (rank + 1) * step]) for rank in range(self.group.size)]
        return [value for values in self.group.scatter("score", self.label, shares) for value in values]


def combine(scores: Mapping[str, Tensor], specs: Sequence[RewardSpec], size: int) -> tuple[Tensor, Tensor]:
    """Rewards float32 [B], the sum of weight (default 1) x score, 0 where a score is missing; and bool [B], false there.

    A reward of weight 0 is shown but changes nothing, not even by failing.
    """
    weights = {spec.label or spec.name: spec.weight for spec in specs}
    parts = (weight * values for name, values in scores.items() if (weight := weights.get(name, 1.0)))
    total = sum(parts, torch.zeros(size))
    return torch.where(total.isfinite(), total, 0.0), total.isfinite()

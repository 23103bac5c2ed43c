"""Tracker `samples`: what the model says, into `samples.jsonl` in the run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Generator
from pathlib import Path
from typing import Any

from pydantic import Field

from jackfield.batch import FINISH_REASONS, Batch
from jackfield.components import ComponentConfig, Tracker
from jackfield.hookspecs import hookimpl


class SamplesConfig(ComponentConfig):
    """Settings of `samples`."""

    every: int = Field(default=10, gt=0)
    """Steps between writes; the first and the last step are always written."""
    count: int = Field(default=4, gt=0)
    """Samples each time, spread evenly over the batch."""


class Samples(Tracker):
    """A line a sample: step, prompt, response, reward, scores, tokens, finish reason. `jackfield report` shows them."""

    Config: type[ComponentConfig] = SamplesConfig
    config: Any

    @hookimpl
    def run_start(self, run: Any) -> None:
        """Drop lines of steps that will be done again."""
        path = run.dir / "samples.jsonl"
        if path.exists():
            kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step(line) <= run.step]
            partial = Path(f"{path}.partial")
            partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
            partial.replace(path)

    @hookimpl(wrapper=True, tryfirst=True)
    def advantage(self, run: Any, batch: Batch) -> Generator[None, Batch, Batch]:
        """The scored batch passes by here."""
        step = run.step + 1
        if len(batch) and (step % self.config.every == 0 or step in (1, run.config.steps)):
            count = min(self.config.count, len(batch))
            lines = [self._line(step, batch, i * len(batch) // count) for i in range(count)]
            with (run.dir / "samples.jsonl").open("a", encoding="utf-8") as file:
                file.writelines(f"{line}\n" for line in lines)
        return (yield)

    def _line(self, step: int, batch: Batch, i: int) -> str:
        record = batch.records[i]
        sample = {
            "step": step,
            "sample": int(batch.sample_ids[i]),
            "prompt": record.get("prompt"),
            "response": record.get("response"),
            "reward": float(batch.rewards[i]),
            "scores": {name: score if math.isfinite(score := float(values[i])) else None for name, values in batch.scores.items()},
            "tokens": int(batch.response_lengths[i]),
            "finish_reason": FINISH_REASONS[int(batch.finish_reasons[i])],
            "trained": bool(batch.loss_mask[i].any()),
        }
        return json.dumps(sample, ensure_ascii=False)


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError):
        return float("inf")

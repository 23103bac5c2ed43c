"""Whole runs in a fraction of a second: every component that a test does not name is a fake that follows the contract."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from jackfield.algorithm import Algorithm, LossOutput
from jackfield.batch import Batch
from jackfield.components import Outputs
from jackfield.config import RunConfig
from jackfield.hookspecs import hookimpl
from jackfield.run import Run
from jackfield.trainer import Trainer

FAKE: dict[str, Any] = {
    "steps": 3,
    "policy": {"model": "none", "backend": "jackfield.testing.fakes:FakeBackend", "optimizer": {"lr": 2.0}},
    "engine": "jackfield.testing.fakes:FakeEngine",
    "transport": "jackfield.testing.fakes:FakeTransport",
    "rollout": "jackfield.testing.fakes:FakeRollout",
    "dataset": "jackfield.testing.fakes:FakeDataset",
    "rewards": ["jackfield.testing.fakes:FakeReward"],
    "algorithm": "jackfield.testing.runs:FakeAlgorithm",
    "trackers": [],
    "sampling": {"max_new_tokens": 6, "ignore_eos": True},
    "batch": {"prompts": 4, "group_size": 4},
}
"""A run of fakes: a bigram model of eight tokens that learns to repeat its prompt."""


class FakeAlgorithm(Algorithm):
    """Policy gradient against the mean reward of the group."""

    def advantage(self, batch: Batch) -> Batch:
        """See Algorithm."""
        assert batch.rewards is not None
        same = (batch.group_ids[:, None] == batch.group_ids[None, :]).float()
        baseline = same @ batch.rewards / same.sum(1)
        return batch.replace(advantages=(batch.rewards - baseline)[:, None] * batch.loss_mask)

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """See Algorithm."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        return LossOutput(-torch.exp(outputs.log_probs - batch.old_log_probs) * batch.advantages)


@dataclass
class Trajectory:
    """What a run did, for comparing runs bit by bit."""

    run: Run
    sample_ids: list[list[int]] = field(default_factory=list)
    """Samples trained on, by step."""
    batches: list[Batch] = field(default_factory=list)
    """What `update` was given, by step."""
    metrics: list[dict[str, float]] = field(default_factory=list)
    """Metrics by step, without times."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """The policy's weights at the end, by shard name; empty where they are in another process."""

    def same_training(self, other: Trajectory) -> bool:
        """Whether both trained on the same samples and ended with the same weights, bit for bit."""
        same_weights = self.weights.keys() == other.weights.keys() and all(
            torch.equal(w, other.weights[n]) for n, w in self.weights.items()
        )
        return self.sample_ids == other.sample_ids and same_weights


class _Recorder:
    def __init__(self, trajectory: Trajectory) -> None:
        self.trajectory = trajectory

    @hookimpl(wrapper=True, trylast=True)
    def advantage(self, run: Run, batch: Batch) -> Iterator[None]:
        """Note what is trained on."""
        self.trajectory.sample_ids.append(batch.sample_ids.tolist())
        return (yield)

    @hookimpl(wrapper=True)
    def update(self, run: Run, batch: Batch) -> Iterator[None]:
        """Keep what is trained on."""
        self.trajectory.batches.append(batch)
        return (yield)

    @hookimpl(trylast=True)
    def step_end(self, run: Run, metrics: dict[str, float]) -> None:
        """Note the numbers that do not depend on the clock."""
        self.trajectory.metrics.append({n: v for n, v in metrics.items() if not n.startswith(("time/", "sync/"))})


def fake_config(folder: Path, **fields: Any) -> RunConfig:
    """The config of a run of fakes in `folder`, with top-level fields replaced (`policy` is merged)."""
    merged = {**FAKE, **fields, "policy": {**FAKE["policy"], **fields.get("policy", {})}}
    return RunConfig(dir=folder, **merged)


def fake_run(folder: Path, plugins: Sequence[Any] = (), **fields: Any) -> Trajectory:
    """Train a run of fakes and return what it did. `plugins` are registered as hook plugins beside what `fields` names."""
    trainer = Trainer(fake_config(folder, **fields))
    trajectory = Trajectory(trainer.run)
    for plugin in [_Recorder(trajectory), *plugins]:
        trainer.run.manager.register(plugin)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        trainer.train()
    worker = getattr(trainer.run.policy.group, "worker", None)
    if worker is not None:
        shards = worker.backends["policy"].shards()
        trajectory.weights = {s.name: s.tensor.clone() for s in shards if s.tensor is not None}
    return trajectory

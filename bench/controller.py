"""What the controller costs: GRPO steps of 1,024 samples x 2,048 tokens whose model work is sleep.

    python bench/controller.py              4 worker processes whose model work is 10 s a step (launcher fork)
    python bench/controller.py --simulate   1 to 64 workers, without processes: only what the controller does is timed
    python bench/controller.py --profile    where its time goes

A share of the wall seconds is the workers' end of the pipe: on a host with fewer cores than workers they compete. CPU seconds are
counted on each side by itself; together they bound what an idle host would show, where the two sides overlap.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from jackfield import Trainer
from jackfield.batch import Batch, Trajectory
from jackfield.components import (
    Backend,
    BackendConfig,
    ComponentConfig,
    Dataset,
    Engine,
    Launcher,
    Loss,
    LossSums,
    OutputRequest,
    Outputs,
    Position,
    Request,
    Reward,
    Rollout,
    Sample,
    Transport,
    WorkerContext,
)
from jackfield.config import RunConfig
from jackfield.hookspecs import hookimpl
from jackfield.shard import Shard, SyncReport
from jackfield.worker import Worker
from jackfield_workers.group import bundles
from jackfield_workers.wire import join, pack, split, unpack

PROMPT, RESPONSE = 1024, 1024
SHARES = {"generate": 0.6, "forward": 0.1, "update": 0.3}
"""How the 10 s of model work divide; the reference's forward pass is one."""


class Rest(BackendConfig):
    """How long the model work takes."""

    seconds: float = 0.0
    """Seconds of model work in one step."""


class Sleeper(Backend):
    """A model that takes its time and nothing else; data parallel."""

    Config = Rest
    config: Any

    def setup(self, model: Any, optimizer: Any, context: WorkerContext) -> None:
        self.context = context

    @property
    def position(self) -> Position:
        return Position(self.context.rank, self.context.world_size)

    def forward(self, micro_batches: Sequence[Batch], request: OutputRequest) -> list[Outputs]:
        time.sleep(self.config.seconds * SHARES["forward"])
        return [Outputs(log_probs=torch.zeros(m.tokens.shape)) for m in micro_batches]

    def forward_backward(self, micro_batches: Sequence[Batch], loss: Loss) -> LossSums:
        time.sleep(self.config.seconds * SHARES["update"])
        return LossSums({"loss": torch.tensor(0.0), "tokens": torch.tensor(1.0)})

    def optimizer_step(self) -> dict[str, float]:
        return {"grad_norm": 1.0, "learning_rate": 1e-6, "worker_cpu": time.process_time()}

    def zero_grad(self) -> None: ...

    def shards(self) -> list[Shard]:
        return []

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None: ...


class SleepingEngine(Engine):
    """Samples of full length after a while."""

    Config = Rest
    config: Any

    def setup(self, model: Any, context: WorkerContext) -> None:
        self.context = context
        self.tokens = [t % 1000 for t in range(RESPONSE)]
        self.log_probs = [-(t % 7) / 3 for t in range(RESPONSE)]

    @property
    def position(self) -> Position:
        return Position(self.context.rank, self.context.world_size)

    def generate(self, requests: Sequence[Request]) -> Iterator[Sample]:
        begin = time.perf_counter()
        keys = [(request.id, index) for request in requests for index in range(len(request.seeds))]
        # an engine's lists grow while it generates: they are part of its work, whose time stays the same
        samples = [Sample(*key, list(self.tokens), list(self.log_probs), [self.version] * RESPONSE, "length") for key in keys]
        time.sleep(max(self.config.seconds * SHARES["generate"] - time.perf_counter() + begin, 0))
        while samples:
            yield samples.pop()

    def shards(self) -> list[Shard]:
        return []

    def weights_updated(self, version: int) -> None:
        self.version = version


class NoTransport(Transport):
    """Says that it is done."""

    def connect(self, source: Any, destination: Any, context: WorkerContext) -> None:
        self.destination = destination

    def sync(self, version: int) -> SyncReport:
        self.destination.weights_updated(version)
        return SyncReport(version)


class Prompts(Dataset):
    """Long prompts of numbers."""

    def __len__(self) -> int:
        return 1024

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"prompt": f"prompt {index}", "answer": "3"}


class Draw(Reward):
    """Scores that differ within a group."""

    def score(self, records: Sequence[dict[str, Any]]) -> list[float]:
        return [float(i % 3) for i in range(len(records))]


def write(message: Any) -> tuple[bytes, np.ndarray]:
    """What sending costs: the pickle and one copy of the tensors."""
    return join(pack(message))


def read(message: tuple[bytes, np.ndarray]) -> Any:
    """What receiving costs: another copy."""
    return unpack(split(message[0], memoryview(message[1].copy())))


class SimulatedGroup:
    """Workers in this process; what they do is not counted as the controller's time, what travels is written and read."""

    def __init__(self, config: RunConfig, size: int) -> None:
        self.size, self.away = size, 0.0
        self.workers = [Worker(config, torch.device("cpu"), rank, size) for rank in range(size)]

    def _there(self, work: Any, message: Any) -> Any:
        start = time.process_time()
        reply = write(work(*read(message)))
        self.away += time.process_time() - start
        return reply

    def call(self, method: str, *args: Any) -> list[Any]:
        message = write(args)
        return [read(self._there(getattr(w, method), message)) for w in self.workers]

    def scatter(self, method: str, role: str | None, shares: Sequence[Any], *args: Any) -> list[Any]:
        before = (role,) if role else ()
        messages = [write((*before, share, *args)) for share in shares]
        return [read(self._there(getattr(w, method), m)) for w, m in zip(self.workers, messages, strict=True)]

    def stream(self, method: str, shares: Sequence[Any]) -> Iterator[Any]:
        for worker, share in zip(self.workers, shares, strict=True):
            for bundle in self._bundles(worker, method, share):
                yield from read(bundle)

    def _bundles(self, worker: Worker, method: str, share: Any) -> list[Any]:
        message = write((share,))
        start = time.process_time()
        found = [write(bundle) for bundle in bundles(getattr(worker, method)(*read(message)))]
        self.away += time.process_time() - start
        return found


class Simulated(Launcher):
    """Workers that are only simulated."""

    class Config(ComponentConfig):
        """How many."""

        workers: int = 4
        """Simulated workers."""

    config: Any

    def start(self, config: RunConfig, roles: Sequence[str]) -> dict[str, Any]:
        self.group = SimulatedGroup(config, self.config.workers)
        return dict.fromkeys(roles, self.group)

    def stop(self) -> None: ...


class Ids(Rollout):
    """Token ids in, token ids out: no tokenizer, whose speed is not the controller's."""

    @hookimpl
    def rollout(self, run: Any, prompts: Any) -> Batch:
        return self.collect(run, prompts)

    def collect(self, run: Any, prompts: Any) -> Batch:
        seeds = tuple(range(run.group_size))
        before = np.arange(PROMPT) % 1000
        requests = [Request(p.id, tuple(before.tolist()), seeds, run.sampling) for p in prompts]
        found = {(s.request_id, s.index): s for s in run.policy.generate(requests)}
        items = []
        for prompt in prompts:
            for index in seeds:
                s = found[prompt.id, index]
                tokens = np.concatenate([before, s.tokens])
                record = {**prompt.record, "response": "text"}
                items.append(Trajectory(prompt, tokens, PROMPT, np.ones(RESPONSE, bool), s.log_probs, s.versions, s.finish_reason, record))
        return Batch.from_trajectories(items, group_size=run.group_size)


def settings(launcher: dict[str, Any], samples: int, seconds: float, steps: int, folder: str) -> RunConfig:
    """A GRPO run with a reference policy; the group size is 8."""
    here = str(Path(__file__).resolve())
    return RunConfig(
        dir=folder,
        steps=steps,
        policy={"model": "none", "backend": {"name": f"{here}:Sleeper", "seconds": seconds}, "micro_batch_tokens": 16384},
        engine={"name": f"{here}:SleepingEngine", "seconds": seconds},
        transport=f"{here}:NoTransport",
        rollout=f"{here}:Ids",
        dataset=f"{here}:Prompts",
        rewards=[f"{here}:Draw"],
        algorithm={"name": "grpo", "kl": {"coef": 0.01}},
        sampling={"max_new_tokens": RESPONSE},
        batch={"prompts": samples // 8, "group_size": 8},
        launcher=launcher,
        trackers=[],
    )


def measure(
    launcher: dict[str, Any], samples: int = 1024, seconds: float = 0.0, steps: int = 3
) -> tuple[list[list[float]], dict[str, float]]:
    """([wall seconds beyond the model work, CPU seconds of the controller and of one worker] by step; times of the last step)."""
    found: list[tuple[float, float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(settings(launcher, samples, seconds, steps, folder))

        class Watch:
            @hookimpl
            def step_end(self, run: Any, metrics: dict[str, float]) -> None:
                away = getattr(run.policy.group, "away", 0.0)
                found.append((time.perf_counter(), time.process_time() - away, metrics["worker_cpu"]))

        trainer.run.manager.register(Watch(), "watch")
        run = trainer.train()
        times = {n: v for n, v in run.metrics.items() if n.startswith("time/")}
    spent = [[after - before for before, after in zip(one, two, strict=True)] for one, two in pairwise(found)]
    return [[wall - seconds, controller, worker] for wall, controller, worker in spent], times


def main() -> None:
    """Print a table."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--simulate", action="store_true")
    options.add_argument("--profile", action="store_true")
    options.add_argument("--samples", type=int, default=1024)
    options.add_argument("--seconds", type=float, default=10.0)
    options.add_argument("--steps", type=int, default=3)
    options.add_argument("--workers", type=int, default=4)
    options.add_argument("--launcher", default="fork")
    given = options.parse_args()
    simulated = {"name": f"{Path(__file__).resolve()}:Simulated"}
    if given.profile:
        profile = cProfile.Profile(time.process_time)
        profile.runcall(measure, {**simulated, "workers": given.workers}, given.samples)
        pstats.Stats(profile).sort_stats("cumulative").print_stats(70)
        return
    if given.simulate:
        for workers in (1, 4, 16, 64):
            found, _ = measure({**simulated, "workers": workers}, given.samples, steps=given.steps)
            cpu = sorted(controller for _, controller, _ in found)
            print(f"{workers:3} workers: CPU seconds a step on the controller: median {median(cpu):.3f}, least {cpu[0]:.3f}", flush=True)
        return
    launcher = {"name": given.launcher, "workers": given.workers, "device": "cpu"}
    found, times = measure(launcher, given.samples, given.seconds, given.steps)
    print(f"{given.workers} workers, {given.samples} samples x {PROMPT + RESPONSE} tokens, {given.seconds:g} s of model work a step")
    names = ("wall seconds beyond it", "CPU seconds of the controller", "CPU seconds of a worker")
    for name, values in zip(names, zip(*found, strict=True), strict=True):
        share = median(values) / (given.seconds + median(values))
        print(f"{name:30} median {median(values):.3f} ({share:.2%} of the step), least {min(values):.3f}, most {max(values):.3f}")
    print(f"load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores; last step: { ({n: round(t, 3) for n, t in times.items()}) }")


if __name__ == "__main__":
    main()

"""From a config to a trained model: builds the run, resumes it, drives it and ends it cleanly."""

from __future__ import annotations

import contextlib
import random
import sys
from pathlib import Path
from typing import Any, TextIO

import torch

from jackfield import checkpoint, registry, runner
from jackfield.components import WorkerContext
from jackfield.config import ComponentSpec, RunConfig
from jackfield.errors import ConfigError, JackfieldError, PluginError, WorkerError, nearest
from jackfield.manager import PluginManager
from jackfield.rewards import PlacedReward, RewardHook
from jackfield.roles import Policy, Role
from jackfield.run import PromptStream, Run


class Trainer:
    """`Trainer(load_config("grpo.yaml", ["policy.model=..."])).train()`. Raises JackfieldError with one line on what to mend."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        manager = PluginManager()
        algorithm = registry.build("algorithm", config.algorithm)
        self.launcher = registry.build("launcher", config.launcher)
        prompts = PromptStream(registry.build("dataset", config.dataset), config.seed)
        self.run = Run(config, manager, algorithm, prompts)
        self.lock: TextIO | None = None
        self.named: list[str] = []
        self._register("metrics.jsonl", registry.build("tracker", ComponentSpec(name="jsonl")))
        self._register(config.algorithm.name, algorithm)
        self._register(config.rollout.name, registry.build("rollout", config.rollout))
        self.rewards: dict[str, RewardHook] = {}
        for reward in config.rewards:
            label = reward.label or reward.name
            component = registry.build("reward", reward)
            self.rewards[label] = RewardHook(component, label, deadline=reward.deadline, max_failures=reward.max_failures)
            self._register(f"reward {label}", self.rewards[label])
            self._register(f"hooks of reward {label}", component)
        for kind, specs in (("tracker", config.trackers), ("hooks", config.hooks)):
            for spec in specs:
                self._register(spec.name, None if spec.name in config.disabled else registry.build(kind, spec))
        manager.check()
        self._check()
        manager.hook.configure(run=self.run)

    def _register(self, name: str, plugin: Any) -> None:
        self.named.append(name)
        if name not in self.config.disabled:
            self.run.manager.register(plugin, name)

    def _check(self) -> None:
        for absent in sorted({*self.config.disabled} - {*self.named}):
            hint = nearest(absent, self.named, f"it has: {', '.join(self.named)}", cutoff=0.4)
            raise ConfigError(f"no:{absent} leaves out a plugin that this run does not have; {hint}")
        name, size = self.config.algorithm.name, self.config.batch.group_size
        with self.run.manager.guard(name, "needs"):
            needed = self.run.algorithm.needs.min_group_size
        what = f"algorithm {name!r} compares samples of one prompt"
        if size < needed:
            raise ConfigError(f"{what}: batch.group_size is {size}, at least {needed} is needed")
        if needed > 1 and not self.config.sampling.temperature:
            raise ConfigError(f"{what}, but sampling.temperature 0 makes them the same: raise it")
        steps = self.run.algorithm.config.mini_batches
        if steps > self.config.batch.prompts:
            raise ConfigError(f"algorithm.mini_batches is {steps}, more than the {self.config.batch.prompts} groups of batch.prompts")

    def train(self) -> Run:
        """Start the workers, resume if there is a checkpoint, train, save; the finished run.

        After a WorkerError a new trainer resumes from the newest checkpoint, up to `checkpoint.max_restarts` times.
        """
        settings = self.config.checkpoint
        try:
            return self._train()
        except WorkerError as error:
            if not settings.max_restarts:
                raise
            print(f"{error}\nresuming by itself; {settings.max_restarts - 1} restarts are left after this one", file=sys.stderr, flush=True)
        update = {"max_restarts": settings.max_restarts - 1} | ({"resume": "auto"} if checkpoint.complete(self.config.dir) else {})
        return type(self)(self.config.model_copy(update={"checkpoint": settings.model_copy(update=update)})).train()

    def _train(self) -> Run:
        run, config = self.run, self.config
        try:
            self._start()
            if run.step < config.steps:
                run.hook.run_start(run=run)
                while run.step < config.steps:
                    before = run.step
                    if run.hook.step(run=run) is None:
                        runner.step(run)
                    if run.step == before:
                        raise PluginError(f"hook 'step' was answered, but run.step is {before} as before: raise it by 1, or return None")
                    if config.checkpoint.every and run.step % config.checkpoint.every == 0:
                        checkpoint.save(run)
                checkpoint.save(run)
                run.hook.run_end(run=run)
        except BaseException as error:
            with contextlib.suppress(JackfieldError):  # a plugin that cannot clean up must not hide why the run ended
                run.hook.run_error(run=run, error=error)
            raise
        finally:
            self.launcher.stop()
            if self.lock:
                self.lock.close()
        return run

    def _start(self) -> None:
        run, config = self.run, self.config
        if not run.hook.score.get_hookimpls() and not run.hook.step.get_hookimpls():
            raise ConfigError("nothing scores the samples: name a reward under `rewards` (`jackfield plugins reward` lists them)")
        self.lock = checkpoint.claim(config.dir) if config.dir.exists() else None
        random.seed(config.seed)
        torch.manual_seed(config.seed)
        needs = run.algorithm.needs
        wanted = {"policy": True, "reference": needs.reference, "critic": needs.values}
        placed = [("engine", config.engine), *((spec.label or spec.name, spec) for spec in config.rewards)]
        wanted |= {name: bool(spec.gpus or spec.colocate) for name, spec in placed}
        groups = self.launcher.start(config, [role for role, here in wanted.items() if here])
        run.policy = Policy(groups, config)
        for name in ("reference", "critic"):
            if name in groups:
                setattr(run, name, Role(name, groups[name], config))
        for label, hook in self.rewards.items():
            if label in groups:
                hook.reward = PlacedReward(label, groups[label])
            else:
                hook.reward.setup(WorkerContext(label, torch.device("cuda" if torch.cuda.is_available() else "cpu"), config.seed))
        self.lock = self.lock or checkpoint.claim(config.dir)
        found = checkpoint.complete(config.dir)
        resume = config.checkpoint.resume
        if isinstance(resume, Path):
            checkpoint.load(run, resume)
        elif resume == "auto" and found:
            checkpoint.load(run, found[-1])
        elif found:
            raise ConfigError(f"{config.dir} holds checkpoints already and checkpoint.resume is 'never': choose another dir")
        run.policy.sync(run.step)

"""The state of a run, which every hook is given."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from jackfield.batch import Prompt
from jackfield.config import RunConfig
from jackfield.errors import DataError, JackfieldError, told

if TYPE_CHECKING:
    from jackfield.algorithm import Algorithm
    from jackfield.components import Dataset
    from jackfield.manager import PluginManager
    from jackfield.roles import Policy, Role


class PromptStream:
    """The dataset, shuffled anew each epoch by the seed, without end; its whole state is how many prompts were drawn."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset, self.seed, self.drawn = dataset, seed, 0
        if not len(dataset):
            raise DataError(f"dataset {type(dataset).__name__} is empty: there is nothing to train on")
        self._epoch, self._order = -1, torch.empty(0)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; crosses epochs."""
        return [self._next() for _ in range(count)]

    def _next(self) -> Prompt:
        epoch, position = divmod(self.drawn, len(self.dataset))
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(len(self.dataset), generator=generator)
        try:
            row = self.dataset[int(self._order[position])]
        except JackfieldError:
            raise
        except Exception as error:
            raise DataError(f"dataset {type(self.dataset).__name__} raised for row {int(self._order[position])}: {told(error)}") from error
        if not isinstance(row, dict):
            raise DataError(
                f"dataset {type(self.dataset).__name__} returned a {type(row).__name__} as a row; a dict with `prompt` is wanted"
            )
        self.drawn += 1
        return Prompt(self.drawn - 1, row)


class Run:
    """One training run. Hooks read it; the runner and the trainer write it."""

    policy: Policy
    reference: Role
    critic: Role
    tokenizer: Any = None
    """The policy's tokenizer; set by the rollout plugin."""

    def __init__(self, config: RunConfig, manager: PluginManager, algorithm: Algorithm, prompts: PromptStream) -> None:
        self.config = config
        self.manager = manager
        self.hook = manager.hook
        """Calls hooks: `run.hook.score(run=run, batch=batch)`."""
        self.algorithm = algorithm
        self.prompts = prompts
        self.seed = config.seed
        self.dir: Path = config.dir
        self.plugins: dict[str, dict[str, Any]] = {}
        """The plugins that the config names, as jackfield_trackers.recorded describes them."""
        self.step = 0
        """Steps finished; also the number of the step under way, counted from 0, and the version of the policy."""
        self.metrics: dict[str, float] = {}
        """Metrics of the step under way; plugins may add to it from any hook."""
        self.sampling = config.sampling
        """How the rollout samples now (see `sampling_as`)."""
        self.group_size = config.batch.group_size
        """Samples a prompt now (see `sampling_as`)."""

    @contextlib.contextmanager
    def sampling_as(self, *, temperature: float, group_size: int) -> Iterator[None]:
        """Sample otherwise within the block: greedy baselines and evaluation."""
        before = self.sampling, self.group_size
        self.sampling, self.group_size = self.sampling.model_copy(update={"temperature": temperature}), group_size
        try:
            yield
        finally:
            self.sampling, self.group_size = before

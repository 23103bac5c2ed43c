"""One process's share of the roles that live on it: its backends, its engine and the transport between them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from struct import pack
from typing import TYPE_CHECKING, Any

import numpy as np

from jackfield import registry, results
from jackfield.components import Backend, Engine, LossSums, OutputRequest, Outputs, Position, Request, Sample, Transport, WorkerContext
from jackfield.config import RunConfig, role_config
from jackfield.errors import PluginError
from jackfield.loss import BoundLoss
from jackfield.microbatch import Share, cut
from jackfield.rewards import RewardHook
from jackfield.shard import SyncReport

if TYPE_CHECKING:
    import torch


ARRAYS = (("tokens", "q"), ("log_probs", "f"), ("versions", "i"))
"""What of a sample travels as an array, and its type (int64, float32, int32) by the letter that numpy and `struct` have for it.

A million numbers as objects cost the controller a tenth of a second.
"""


def as_array(values: Any, kind: str) -> Any:
    """The values as an array that can be written to. `struct` reads a list in a third of numpy's time."""
    return np.frombuffer(bytearray(pack(f"{len(values)}{kind}", *values)), kind) if type(values) is list else np.asarray(values, kind)


class Worker:
    """Methods are called on all ranks of a group together; a launcher decides how (directly, or on another machine)."""

    def __init__(self, config: RunConfig, device: torch.device, rank: int = 0, world_size: int = 1) -> None:
        self.config, self.device, self.rank, self.world_size = config, device, rank, world_size
        self.backends: dict[str, Backend] = {}
        self.engine: Engine | None = None
        self.transport: Transport | None = None
        self.link: WorkerContext | None = None
        """Where this worker stands among trainers and engines together; set by launchers that keep them apart."""
        self.rewards: dict[str, RewardHook] = {}
        self.algorithm = registry.build("algorithm", config.algorithm)
        self.generating = True
        """Who has the device's memory where it is shared: the engine (True, as it is built) or the trainer."""

    def context(self, role: str) -> WorkerContext:
        """Where this worker stands for a role."""
        return WorkerContext(role, self.device, self.config.seed, self.rank, self.world_size)

    def setup(self, role: str) -> Position:
        """Build the role's backend and load its model."""
        config = role_config(self.config, role)
        assert config.model and config.backend
        backend: Backend = registry.build("backend", config.backend)
        backend.setup(config.model, None if role == "reference" else config.optimizer, self.context(role))
        self.backends[role] = backend
        return backend.position

    def setup_engine(self) -> Position | None:
        """Build the engine, unless it has workers of its own elsewhere (then None), and connect it to the policy's backend."""
        config, backend = role_config(self.config, "policy"), self.backends.get("policy")
        assert config.model and config.backend
        if backend is None or self.link is None:
            if backend is not None and self.config.share_memory:
                backend.offload()
            settings = (backend or registry.build("backend", config.backend)).config
            self.engine = registry.build("engine", self.config.engine)
            self.engine.setup(config.model, replace(self.context("policy"), dtype=getattr(settings, "dtype", "float32")))
        self.transport = registry.build("transport", self.config.transport)
        self.transport.connect(backend, self.engine, self.link or self.context("policy"))
        return self.engine.position if self.engine else None

    def setup_reward(self, label: str) -> None:
        """Build a reward that has workers."""
        spec = next(spec for spec in self.config.rewards if spec.label == label)
        reward = registry.build("reward", spec)
        reward.setup(self.context(label))
        self.rewards[label] = RewardHook(reward, label, deadline=spec.deadline, max_failures=spec.max_failures)

    def score(self, label: str, records: list[dict[str, Any]]) -> list[Any]:
        """One score a record, or the error in its place."""
        return self.rewards[label].isolated(records)

    def forward(self, role: str, share: Share, request: OutputRequest) -> list[Outputs] | None:
        """Outputs on the CPU, or None where another rank returns them."""
        backend = self.backends[role]
        self._hand_memory(to_engine=False)
        outputs = backend.forward(batches := cut(share, self.device), request)
        if not backend.position.output:
            return None
        results.outputs(f"backend {type(backend).__name__}", outputs, batches)
        return [Outputs(**{n: None if v is None else v.float().cpu() for n, v in vars(o).items()}) for o in outputs]

    def update(self, role: str, share: Share, request: OutputRequest, state: dict[str, Any]) -> tuple[LossSums | None, dict[str, float]]:
        """One optimizer step; the sums (or None where another rank returns them) and the optimizer's own metrics."""
        backend = self.backends[role]
        self._hand_memory(to_engine=False)
        self.algorithm.load_state_dict(state)
        sums = backend.forward_backward(cut(share, self.device), BoundLoss(self.algorithm, role, request))
        info = backend.optimizer_step()
        if not backend.position.output:
            return None, info
        return LossSums({n: v.cpu() for n, v in sums.sums.items()}, {n: v.cpu() for n, v in sums.maxima.items()}), info

    def generate(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """Samples of this rank's requests, each as it is finished; none where another rank of the replica returns them."""
        assert self.engine is not None
        self._hand_memory(to_engine=True)
        for sample in self.engine.generate(requests):
            if self.engine.position.output:
                arrays = {name: as_array(getattr(sample, name), kind) for name, kind in ARRAYS}
                if len({a.shape for a in arrays.values()}) > 1:
                    found = ", ".join(f"{a.size} {name}" for name, a in arrays.items())
                    raise PluginError(f"engine {type(self.engine).__name__} returned a sample with {found}; one each a token is wanted")
                yield type(sample)(**vars(sample) | arrays)

    def sync(self, version: int) -> SyncReport:
        """Make the engine serve the policy's weights as `version`."""
        assert self.transport is not None
        return self.transport.sync(version)

    def _hand_memory(self, *, to_engine: bool) -> None:
        if not self.config.share_memory or self.engine is None or to_engine == self.generating:
            return
        self.generating = to_engine
        if to_engine:
            self.backends["policy"].offload()
            self.engine.wake()
        else:
            self.engine.sleep()
            self.backends["policy"].onload()

    def backend(self, role: str, method: str, *args: Any) -> Any:
        """Any other method of the role's backend: save, load, export."""
        return getattr(self.backends[role], method)(*args)

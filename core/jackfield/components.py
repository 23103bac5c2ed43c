"""The kinds of component and what each must do: a class with a typed `Config`, found by its entry point's name."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from pydantic import BaseModel, ConfigDict

from jackfield.shard import Shard, SyncReport

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from jackfield.batch import Batch, Prompt
    from jackfield.config import ModelConfig, OptimizerConfig, SamplingConfig


class ComponentConfig(BaseModel):
    """Base of every component's `Config`: frozen, keyword-only, no unknown fields; the string under a field is its documentation."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, arbitrary_types_allowed=False)


class Component(ABC):
    """Base of all components. Hooks may be implemented on any of them with `@hookimpl`."""

    kind: ClassVar[str]
    """The kind's name; its entry-point group is `jackfield.<kind>`."""
    api: ClassVar[int] = 1
    """The API version (`jackfield.JACKFIELD_API`) that the class was written for."""

    Config: type[ComponentConfig] = ComponentConfig
    """The component's settings, usually a nested class; validated before the component is built."""

    def __init__(self, config: Any = None) -> None:
        self.config = self.Config() if config is None else config


@dataclass(frozen=True)
class WorkerContext:
    """Where a worker stands. The torch.distributed default group, where world_size > 1, spans exactly the role's workers."""

    role: str
    """Name of the role, such as "policy"."""
    device: torch.device
    """The worker's own device."""
    seed: int
    """The run's seed."""
    rank: int = 0
    world_size: int = 1
    dtype: str = "float32"
    """For an engine: type of the policy's parameters, which is what it should serve where sharing them is wanted."""
    group: Any = None
    """The process group of `rank` and `world_size` where it is not the default one: trainers and separate engines together."""


@dataclass(frozen=True)
class Position:
    """Where a rank stands in its role's data parallelism: what the controller needs to split and gather batches."""

    dp_rank: int = 0
    """Which share of each batch the rank works on."""
    dp_size: int = 1
    output: bool = True
    """Whether this rank returns its share's outputs (one rank of each model-parallel group does)."""


@dataclass(frozen=True)
class OutputRequest:
    """What a forward pass should return, and the sampling distribution under which log-probs are meant (law 11)."""

    log_probs: bool = True
    entropy: bool = False
    sum_pi_squared: bool = False
    """The sum of squared probabilities over the vocabulary (optimal token baseline)."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps every token. Under top-p and top-k the sampled token itself is always kept, so that its log-prob is finite."""


@dataclass
class Outputs:
    """Model outputs for a micro-batch: float32 [b, T], the value at [b, t] belonging to token t; column 0 is 0."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    sum_pi_squared: Tensor | None = None
    values: Tensor | None = None
    """The value of the state in which token t was chosen (from the hidden state of token t - 1)."""


@dataclass
class LossSums:
    """Sums over the trainable tokens of the micro-batches seen so far; they add up over micro-batches and DP ranks."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    maxima: dict[str, Tensor] = field(default_factory=dict)

    def add(self, other: LossSums) -> None:
        """Accumulate `other` in place."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        for name, value in other.maxima.items():
            self.maxima[name] = self.maxima[name].maximum(value) if name in self.maxima else value


class Loss(Protocol):
    """What `Backend.forward_backward` is given (jackfield.loss.BoundLoss)."""

    request: OutputRequest

    def __call__(self, outputs: Outputs, micro_batch: Batch) -> tuple[Tensor, LossSums]:
        """The micro-batch's share of the loss, a scalar with the reduction already in it, and its detached sums."""


class BackendConfig(ComponentConfig):
    """Settings that every training backend has."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters in forward and backward. Optimizer states are float32 either way."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: less memory, about a third more FLOPs."""


class Backend(Component):
    """Trains (or scores with) one model. Every method is called on all ranks of the role together (SPMD)."""

    kind = "backend"
    Config: type[ComponentConfig] = BackendConfig

    @abstractmethod
    def setup(self, model: ModelConfig, optimizer: OptimizerConfig | None, context: WorkerContext) -> None:
        """Load the model; prepare to train it if `optimizer` is given. Raises DataError where the model's folder is unusable."""

    @property
    @abstractmethod
    def position(self) -> Position:
        """This rank's place in data parallelism."""

    @abstractmethod
    def forward(self, micro_batches: Sequence[Batch], request: OutputRequest) -> list[Outputs]:
        """Outputs of each micro-batch, without gradients, deterministic (dropout off; the mode is restored)."""

    @abstractmethod
    def forward_backward(self, micro_batches: Sequence[Batch], loss: Loss) -> LossSums:
        """Add the gradient of the sum of the micro-batches' losses, over all DP ranks, to the accumulated gradient.

        The loss already holds its denominators, so backends sum over micro-batches and ranks and never average.
        """

    @abstractmethod
    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, advance the schedule and clear the gradients; returns at least `grad_norm` and `learning_rate`."""

    @abstractmethod
    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""

    @abstractmethod
    def shards(self) -> list[Shard]:
        """This rank's parameters and persistent buffers, as views of the storage in use."""

    def adopt(self, shards: Sequence[Shard]) -> bool:
        """Move the parameters, values included, into the given storage (same boxes), so that an engine shares it; False if impossible."""
        return False

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write everything that exact resume needs (weights, optimizer, schedule, RNG) into an existing empty folder."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Read what `save` wrote. Raises CheckpointError."""

    @abstractmethod
    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder that `from_pretrained` reads."""

    def offload(self) -> int:
        """Move what generation does not need off the device; returns the bytes freed."""
        return 0

    def onload(self) -> None:
        """Undo `offload`."""


@dataclass(frozen=True)
class Request:
    """Ask for samples of one prompt: one for each seed, all different even where sampling is greedy about nothing."""

    id: int
    tokens: tuple[int, ...]
    """Prompt token ids; never padded."""
    seeds: tuple[int, ...]
    """One seed for each wanted sample, derived from (run seed, step, sample)."""
    sampling: SamplingConfig


@dataclass
class Sample:
    """One finished sample. Engines give lists; `run.policy.generate` gives numpy arrays (int64, float32, int32)."""

    request_id: int
    index: int
    """Which of the request's seeds it belongs to."""
    tokens: list[int]
    """Sampled token ids, the stop token included."""
    log_probs: list[float]
    """Log-prob of each sampled token under the sampling distribution."""
    versions: list[int]
    """Policy version that produced each token."""
    finish_reason: str
    """One of jackfield.batch.FINISH_REASONS."""


class Engine(Component):
    """Generates. One replica is one engine rank group; each gets its own requests."""

    kind = "engine"
    version: int = -1
    """Version of the weights it serves."""

    @abstractmethod
    def setup(self, model: ModelConfig, context: WorkerContext) -> None:
        """Build the model; its weights arrive by `adopt` or by writing into `shards()`."""

    @property
    def position(self) -> Position:
        """dp_rank says which replica this rank belongs to; `output` which rank of the replica returns samples."""
        return Position()

    @abstractmethod
    def generate(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """Yield each sample when it is finished, in any order; every request yields exactly one sample a seed."""

    @abstractmethod
    def shards(self) -> list[Shard]:
        """What this rank needs: `tensor` is the storage to write into, or None where only `adopt` can provide it."""

    def adopt(self, shards: Sequence[Shard]) -> bool:
        """Serve from the given storage, one shard for each of `shards()`, without a copy; False if impossible."""
        return False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Fallback for architectures without `shards`: full tensors by Hugging Face name."""
        raise NotImplementedError(f"{type(self).__name__} takes weights by shards only")

    @abstractmethod
    def weights_updated(self, version: int) -> None:
        """Called after each sync: drop prefix and KV caches, refresh derived weights, serve `version` from now on."""

    def sleep(self) -> int:
        """Give the KV cache's memory to the trainer; returns the bytes freed."""
        return 0

    def wake(self) -> int:
        """Undo `sleep`; returns the bytes taken."""
        return 0


class Transport(Component):
    """Brings the backend's weights into the engine. Runs on every worker of the policy."""

    kind = "transport"

    @abstractmethod
    def connect(self, source: Backend | None, destination: Engine | None, context: WorkerContext) -> None:
        """Plan once (collective). May re-point either side's storage so that later syncs move less. Where engines have workers of
        their own, a trainer's worker has no engine and an engine's no backend: None; `context` then spans both."""

    @abstractmethod
    def sync(self, version: int) -> SyncReport:
        """Make the engine's weights equal the backend's, then call `weights_updated(version)`; collective."""


class Reward(Component):
    """Scores samples. `score` may raise, return nonsense or hang: the core isolates it, then sample by sample (jackfield.rewards)."""

    kind = "reward"
    isolated: ClassVar[bool] = False
    """True for rewards that bound their own time; the core gives up others after their `deadline`."""

    def setup(self, context: WorkerContext) -> None:
        """Load models, once, before the first `score`; on the controller, or on each worker where the reward has workers."""

    @abstractmethod
    def score(self, records: Sequence[dict[str, Any]]) -> Sequence[Any]:
        """One finite score a record, in order; None, NaN or an exception where this record cannot be scored."""


class Dataset(Component):
    """A finite, indexable collection of rows; the core shuffles, repeats and resumes it."""

    kind = "dataset"

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> dict[str, Any]:
        """The row: `prompt` (text or chat messages) and whatever the rewards read. Deterministic by index."""


class Rollout(Component):
    """Turns prompts into a batch by calling the engine, once or many times a sample. Implements the `rollout` hook."""

    kind = "rollout"

    @abstractmethod
    def collect(self, run: Any, prompts: Sequence[Prompt]) -> Batch:
        """`group_size` samples for each prompt, through `run.policy.generate`."""


class Tracker(Component):
    """Shows or records metrics; an ordinary hook plugin."""

    kind = "tracker"


class Launcher(Component):
    """Creates the workers of a run and reaches them (jackfield.roles.WorkerGroup)."""

    kind = "launcher"

    @abstractmethod
    def start(self, config: Any, roles: Sequence[str]) -> dict[str, Any]:
        """A jackfield.launcher.WorkerGroup for each role of `roles`; roles that share processes share a group."""

    @abstractmethod
    def stop(self) -> None:
        """End every worker."""

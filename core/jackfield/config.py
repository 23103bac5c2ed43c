"""The configuration of a run: typed, frozen, every field documented. Components' own settings are validated when they are chosen."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from jackfield.components import ComponentConfig
from jackfield.schedule import Schedule


class ComponentSpec(ComponentConfig):
    """A chosen component: `name`, or `{name: ..., option: value}`."""

    name: str
    """Entry-point name, `distribution/name`, `path/to/file.py:Class` or `package.module:Class`."""
    options: dict[str, Any] = {}
    """The component's own settings (written beside `name`)."""


def _spec(value: Any) -> Any:
    if isinstance(value, str):
        return {"name": value}
    if isinstance(value, dict) and "name" in value and "options" not in value:
        return {"name": value["name"], "options": {k: v for k, v in value.items() if k != "name"}}
    return value


Spec = Annotated[ComponentSpec, BeforeValidator(_spec)]


class RewardSpec(ComponentSpec):
    """A chosen reward with its weight."""

    weight: float = 1.0
    """Factor in the sum of scores."""
    label: str | None = None
    """Name in metrics and `batch.scores`; default: the component's name."""


def _reward(value: Any) -> Any:
    value = _spec(value)
    if isinstance(value, dict) and isinstance(value.get("options"), dict):
        own = {k: v for k, v in value["options"].items() if k in ("weight", "label")}
        value = {**value, **own, "options": {k: v for k, v in value["options"].items() if k not in own}}
    return value


class ModelConfig(ComponentConfig):
    """Which model a role runs."""

    path: str
    """Local Hugging Face folder, or hub name."""
    init: Literal["pretrained", "random"] = "pretrained"
    """`random` draws the weights from the run's seed and needs only config.json and the tokenizer in the folder."""
    head: Literal["lm", "value"] = "lm"
    """`value` puts a scalar head, initialised to 0, in the place of the vocabulary's."""


def _model(value: Any) -> Any:
    return {"path": value} if isinstance(value, str) else value


class OptimizerConfig(ComponentConfig):
    """AdamW; the same meaning on every backend."""

    lr: Schedule = 1e-6
    """Learning rate, by optimizer step."""
    warmup: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly from 0."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; vectors (norms, biases) are never decayed."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; `.inf` never clips."""


class RoleConfig(ComponentConfig):
    """A model with its backend, and where it runs."""

    model: Annotated[ModelConfig | None, BeforeValidator(_model)] = None
    """Model; reference and critic default to the policy's."""
    backend: Spec | None = None
    """Training backend with its layout; reference and critic default to the policy's; the policy to `torch`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Unused for a reference."""
    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Most tokens in one micro-batch, padding not counted; a longer sample goes alone."""
    gpus: int | None = Field(default=None, gt=0)
    """Workers of this role, one a GPU; default: all that the launcher has."""
    colocate: str | None = None
    """Share the workers of this role (its name); default for reference and critic: policy, unless they name `gpus`."""


class SamplingConfig(ComponentConfig):
    """How responses are sampled. Training log-probs are meant under the same distribution."""

    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = Field(default=0, ge=0)
    """Keep this many most likely tokens; 0 keeps all."""
    max_new_tokens: int = Field(default=256, gt=0)
    """Longest response, in tokens."""
    stop_ids: tuple[int, ...] = ()
    """Token ids that end a response, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Sample up to `max_new_tokens` whatever comes (benchmarks)."""


class BatchConfig(ComponentConfig):
    """How many samples one step trains on."""

    prompts: int = Field(default=8, gt=0)
    """Prompts a step."""
    group_size: int = Field(default=8, gt=0)
    """Samples a prompt."""
    max_draws: int = Field(default=10, gt=0)
    """Most rounds of rollout in a step while a filter keeps the batch from being full."""


class CheckpointConfig(ComponentConfig):
    """When to save and from what to resume."""

    every: int = Field(default=0, ge=0)
    """Steps between checkpoints; 0 saves only at the end."""
    keep: int = Field(default=2, gt=0)
    """Newest checkpoints kept."""
    resume: Literal["auto", "never"] | Path = "auto"
    """auto: from the newest complete checkpoint in the run's folder, if there is one; or a checkpoint folder."""


class EvaluateConfig(ComponentConfig):
    """Held-out evaluation: mean reward over a second dataset."""

    every: int = Field(default=0, ge=0)
    """Steps between evaluations; 0 never."""
    dataset: Spec | None = None
    """Held-out rows."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature; 0 is greedy."""


class RunConfig(ComponentConfig):
    """Everything that defines a run."""

    dir: Path = Path("runs/run")
    """The run's folder: metrics, checkpoints, the resolved config."""
    seed: int = 0
    """Seed of everything random."""
    steps: int = Field(default=100, ge=0)
    """Training steps."""
    policy: RoleConfig
    """The model being trained."""
    reference: RoleConfig = RoleConfig()
    """The frozen reference; used only if the algorithm needs it."""
    critic: RoleConfig = RoleConfig()
    """The value model; used only if the algorithm needs it."""
    engine: Spec = ComponentSpec(name="hf")
    """Generates the responses."""
    rollout: Spec = ComponentSpec(name="single_turn")
    """Turns prompts into samples."""
    sampling: SamplingConfig = SamplingConfig()
    """How to sample."""
    algorithm: Spec
    """Advantages and losses."""
    rewards: list[Annotated[RewardSpec, BeforeValidator(_reward)]] = []
    """Scores of a sample; their weighted sum is its reward."""
    dataset: Spec
    """Prompts."""
    batch: BatchConfig = BatchConfig()
    """Size of a step."""
    launcher: Spec = ComponentSpec(name="local")
    """Where workers run."""
    transport: Spec = ComponentSpec(name="auto")
    """How weights reach the engine."""
    trackers: list[Spec] = [ComponentSpec(name="console")]
    """Where metrics are shown, beside the run's metrics.jsonl."""
    hooks: list[Spec] = []
    """Further hook plugins."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Held-out evaluation."""

"""The configuration of a run: typed, frozen, every field documented. Components' own settings are validated when they are chosen."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, ValidationError, model_validator

from jackfield.components import ComponentConfig
from jackfield.errors import ConfigError, nearest
from jackfield.schedule import NonNegative


class ComponentSpec(ComponentConfig):
    """A chosen component: `name`, or `{name: ..., option: value}`."""

    name: str
    """Entry-point name, `distribution/name`, `path/to/file.py:Class` or `package.module:Class`."""
    options: dict[str, Any] = {}
    """The component's own settings (written beside `name`)."""

    @model_validator(mode="before")
    @classmethod
    def _short(cls, value: Any) -> Any:
        value = {"name": value} if isinstance(value, str) else value
        if isinstance(value, dict) and "options" not in value:
            own = {k: v for k, v in value.items() if k in cls.model_fields}
            value = {**own, "options": {k: v for k, v in value.items() if k not in own}}
        return value


class PlacedSpec(ComponentSpec):
    """A chosen component that may have workers of its own."""

    gpus: int | None = Field(default=None, gt=0)
    """Workers of its own, one a GPU; default: none. An engine then shares the policy's, a reward runs on the controller."""
    colocate: str | None = None
    """Share the workers of this role (its name)."""


class RewardSpec(PlacedSpec):
    """A chosen reward with its weight."""

    weight: float = Field(default=1.0, allow_inf_nan=False)
    """Factor in the sum of scores."""
    label: str | None = None
    """Name in metrics and `batch.scores`; default: the component's name, of `file.py:name` the last part."""
    deadline: float = Field(default=600.0, gt=0)
    """Seconds after which a call of a reward that does not bound its own time is given up."""
    max_failures: int = Field(default=3, gt=0)
    """Batches in a row of which more than half could not be scored: then the run stops."""


def _labelled(value: Any) -> Any:
    value = {"name": value} if isinstance(value, str) else value
    if isinstance(value, dict):
        chosen = value.get("options", value).get("function", value.get("name"))
        value = {"label": str(chosen).rpartition(":")[2], **value}
        if value["label"] in ("policy", "reference", "critic", "engine"):
            raise ValueError(f"{value['label']} is a role of its own; give the reward another label")
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

    lr: NonNegative = 1e-6
    """Learning rate, by optimizer step."""
    warmup: int = Field(default=0, ge=0)
    """Optimizer steps over which the rate rises linearly from 0."""
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.999)
    """Decay of the first and second moments."""
    eps: float = Field(default=1e-8, gt=0)
    """Added to the root of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Decoupled decay of matrices; vectors (norms, biases) are never decayed."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Clip the global gradient norm to this; `.inf` never clips."""


class RoleConfig(ComponentConfig):
    """A model with its backend, and where it runs."""

    model: Annotated[ModelConfig | None, BeforeValidator(_model)] = None
    """Model; reference and critic default to the policy's."""
    backend: ComponentSpec | None = None
    """Training backend with its layout; reference and critic default to the policy's; the policy to `torch`."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """What a critic leaves unset is the policy's; unused for a reference."""
    micro_batch_tokens: int = Field(default=8192, gt=0)
    """Most tokens in one micro-batch, padding not counted; a longer sample goes alone."""
    gpus: int | None = Field(default=None, gt=0)
    """Workers of this role, one a GPU; default: all that the launcher has."""
    colocate: str | None = None
    """Share the workers of this role (its name); default for reference and critic: policy, unless they name `gpus`."""


class SamplingConfig(ComponentConfig):
    """How responses are sampled. Training log-probs are meant under the same distribution."""

    temperature: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    """Divides the logits; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Keep the smallest set of tokens whose probability reaches this."""
    top_k: int = Field(default=0, ge=0)
    """Keep this many most likely tokens; 0 keeps all."""
    max_new_tokens: int = Field(default=256, gt=0)
    """Longest response, in tokens."""
    stop_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
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
    changed_plugins: Literal["error", "warn"] = "error"
    """When a run would resume with another algorithm, rollout, reward or other plugin of a stage than the checkpoint was made with."""
    max_restarts: int = Field(default=0, ge=0)
    """Times that the run resumes from its newest checkpoint by itself, with new workers, after a worker has failed."""


class RunConfig(ComponentConfig):
    """Everything that defines a run."""

    dir: Annotated[Path, AfterValidator(Path.expanduser)] = Path("runs/run")
    """The run's folder: metrics, checkpoints, the resolved config."""
    seed: int = Field(default=0, ge=0, lt=2**32)
    """Seed of everything random."""
    steps: int = Field(default=100, ge=0)
    """Training steps."""
    policy: RoleConfig
    """The model being trained."""
    reference: RoleConfig = RoleConfig()
    """The frozen reference; used only if the algorithm needs it."""
    critic: RoleConfig = RoleConfig()
    """The value model; used only if the algorithm needs it."""
    engine: PlacedSpec = PlacedSpec(name="hf")
    """Generates the responses."""
    share_memory: bool = False
    """On a shared GPU: the engine gives its KV cache's memory to the trainer for the update, the trainer its optimizer states' to
    the engine for the rollout. Costs the time of moving them; off where both fit."""
    rollout: ComponentSpec = ComponentSpec(name="single_turn")
    """Turns prompts into samples."""
    sampling: SamplingConfig = SamplingConfig()
    """How to sample."""
    algorithm: ComponentSpec
    """Advantages and losses."""
    rewards: list[Annotated[RewardSpec, BeforeValidator(_labelled)]] = []
    """Scores of a sample; their weighted sum is its reward."""
    dataset: ComponentSpec
    """Prompts."""
    batch: BatchConfig = BatchConfig()
    """Size of a step."""
    launcher: ComponentSpec = ComponentSpec(name="local")
    """Where workers run."""
    transport: ComponentSpec = ComponentSpec(name="auto")
    """How weights reach the engine."""
    trackers: list[ComponentSpec] = [ComponentSpec(name="console")]
    """Where metrics are shown, beside the run's metrics.jsonl."""
    hooks: list[ComponentSpec] = []
    """Further hook plugins."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving and resuming."""
    disabled: tuple[str, ...] = ()
    """Plugins that are not registered although something names them (`-p no:NAME`)."""

    @model_validator(mode="before")
    @classmethod
    def _default_names(cls, value: dict[str, Any]) -> dict[str, Any]:
        """`rollout: {overlong: drop}` is a setting of the default rollout."""
        names = {n: f.default.name for n, f in cls.model_fields.items() if isinstance(f.default, ComponentSpec)}
        return {**value, **{n: {"name": name, **value[n]} for n, name in names.items() if isinstance(value.get(n), dict)}}


def role_config(config: RunConfig, role: str) -> RoleConfig:
    """The role's settings with what it inherits from the policy filled in."""
    own: RoleConfig = getattr(config, role)
    model = own.model or config.policy.model
    if model is None:
        raise ConfigError("policy.model is missing: name a local Hugging Face folder or a hub model")
    if role == "critic" and model.head != "value":
        model = model.model_copy(update={"head": "value"})
    backend = own.backend or config.policy.backend or ComponentSpec(name="torch")
    optimizer = config.policy.optimizer.model_copy(update={n: getattr(own.optimizer, n) for n in own.optimizer.model_fields_set})
    return own.model_copy(update={"model": model, "backend": backend, "optimizer": optimizer})


def explain(error: ValidationError, model: type[BaseModel], where: str, spec: ComponentSpec | None = None) -> ConfigError:
    """The first problem of a validation error on one line: the field, the cause, the way out.

    Where the field can be several things, pydantic tells why it is none of them; the one that got furthest is the one that was meant.
    """
    found = [(*_place(problem, model), problem) for problem in error.errors(include_url=False)]
    same = [item for item in found if item[0][: len(found[0][0])] == found[0][0]]
    names, known, problem = max(same, key=lambda item: (len(item[0]), item[2]["type"] in ("extra_forbidden", "value_error")))
    others = {name for name, *_ in found if name != names[: len(name)]}
    field, more = ".".join(names), f" (and {len(others)} more)" if others else ""
    if problem["type"] == "extra_forbidden":
        known = [*known, *(n for n in (type(spec).model_fields if spec and len(names) == 1 else ()) if n != "options")]
        hint = nearest(names[-1], known, f"known fields: {', '.join(known) or 'none'}")
        return ConfigError(f"{where}: unknown field {field!r}; {hint}{more}")
    if problem["type"] == "missing":
        way_out = f"write {{name: {spec.name}, {names[0]}: ...}} in the config" if spec else "`jackfield config` says what it means"
        return ConfigError(f"{where}: field {field!r} is missing; {way_out}{more}")
    return ConfigError(f"{where}: {field + ': ' if field else ''}{problem['msg']}, but got {problem['input']!r}{more}")


def _place(problem: Any, model: Any) -> tuple[tuple[str, ...], list[str]]:
    """The names that lead to a problem, without pydantic's labels of validators and alternatives, and the fields known at the last."""
    names, models = list[str](), [model]
    for part in problem["loc"]:
        owner = next((m for m in models if part in m.model_fields), None)
        if owner or isinstance(part, int):
            names.append(str(part))
            models = _models(owner.model_fields[part].annotation) if owner and part != problem["loc"][-1] else models
        else:
            models = [m for m in models if m.__name__ == part] or models
    last = [problem["loc"][-1]] if problem["type"] == "extra_forbidden" else []
    return (*names, *last), list(models[0].model_fields) if models else []


def _models(annotation: Any) -> list[Any]:
    own = [annotation] if isinstance(annotation, type) and hasattr(annotation, "model_fields") else []
    return own + [model for inner in get_args(annotation) for model in _models(inner)]


def load_raw(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """The YAML file with dotted overrides (`a.b=c`) and interpolations resolved, as plain data.

    A `file.py:Name` that exists beside the config file is taken from there. Raises ConfigError.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    path = Path(path)
    if not path.is_file():
        raise ConfigError(f"there is no config file {path}")
    try:
        tree: Any = OmegaConf.to_container(OmegaConf.load(path))
        if not isinstance(tree, dict):
            raise ConfigError(f"{path} holds no fields: a config is a YAML mapping")
        for item in overrides:
            _override(tree, item, lambda text: OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"])))
        plain: Any = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    return dict(_locate(plain, path.parent))


def _override(tree: Any, item: str, parse: Callable[[str], Any]) -> None:
    """Set one `a.b=c`; below a short form (`algorithm: grpo`) the long one is written out first, so that `algorithm.x=1` works."""
    field, equals, text = item.partition("=")
    *parents, last = field.split(".")
    if not equals or not field:
        raise ConfigError(f"override {item!r} is not of the form field.subfield=value")
    for name in parents:
        key = _key(tree, name, item)
        below = tree[key] if isinstance(tree, list) else tree.get(key)
        if isinstance(below, str):
            below = {"path" if name == "model" else "name": below}
        tree[key] = below = {} if below is None else below
        if not isinstance(below, dict | list):
            raise ConfigError(f"override {item!r}: {name!r} is {below!r}, which has no fields")
        tree = below
    tree[_key(tree, last, item)] = parse(text)["value"]


def _key(tree: Any, name: str, item: str) -> Any:
    if isinstance(tree, dict):
        return name
    if not name.isdigit() or int(name) >= len(tree):
        raise ConfigError(f"override {item!r}: {name!r} is no index below {len(tree)}")
    return int(name)


def _locate(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {k: _locate(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_locate(v, folder) for v in value]
    if isinstance(value, str) and (match := re.fullmatch(r"(.+\.py):(\w+)", value)):
        beside = (folder / match[1]).resolve()
        return f"{beside}:{match[2]}" if beside.is_file() else value
    return value


def load_config(path: str | Path, overrides: Sequence[str] = (), plugins: Sequence[str] = ()) -> RunConfig:
    """Read, override and validate a config file. `plugins` are `-p` options: `NAME` adds a hook plugin, `no:NAME` drops one.

    Raises ConfigError with the field, the cause and the nearest valid name.
    """
    raw = load_raw(path, overrides)
    raw["hooks"] = [*(raw.get("hooks") or []), *(p for p in plugins if not p.startswith("no:"))]
    raw["disabled"] = [*(raw.get("disabled") or []), *(p.removeprefix("no:") for p in plugins if p.startswith("no:"))]
    try:
        return RunConfig.model_validate(raw)
    except ValidationError as error:
        raise explain(error, RunConfig, str(path)) from error

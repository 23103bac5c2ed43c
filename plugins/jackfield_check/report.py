"""The map of a run as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jackfield import registry
from jackfield.config import ComponentSpec, RewardSpec, RoleConfig, RunConfig, role_config
from jackfield.errors import ConfigError
from jackfield_check.memory import GIB, Need, adapters, frozen, parameters, trained
from jackfield_reshard.classes import between
from jackfield_reshard.describe import engine_layout, size, smallest, training_layout
from jackfield_reshard.families import FAMILIES, read_config, tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.plan import plan
from jackfield_reshard.topology import Topology
from jackfield_workers.placement import Pool, pools


def roles_of(config: RunConfig) -> list[str]:
    """The roles that this run will have, as the trainer decides it."""
    needs = registry.build("algorithm", config.algorithm).needs
    wanted = {"policy": True, "reference": needs.reference, "critic": needs.values, "engine": config.engine.gpus or config.engine.colocate}
    wanted |= {spec.label or spec.name: spec.gpus or spec.colocate for spec in config.rewards}
    return [role for role, here in wanted.items() if here]


def available(config: RunConfig, roles: Sequence[str], gpus: int | None) -> int:
    """Workers to place roles on: as the launcher says or, where it takes what it finds, as many as the roles name."""
    if config.launcher.name == "local":
        return 1
    if said := gpus or config.launcher.options.get("workers"):
        return int(said)
    policy = role_config(config, "policy")
    assert policy.backend is not None
    others = sum(spec.gpus or 0 for spec in (config.reference, config.critic, config.engine, *config.rewards))
    return others + (policy.gpus or smallest(policy.backend, config.engine))


class Role:
    """One role on its pool: its layout, and the memory it takes on each GPU."""

    def __init__(self, config: RunConfig, name: str, pool: Pool) -> None:
        self.name, self.pool, self.need, self.layout = name, pool, Need(), ""
        self.note = ""
        self.plan_layout: Layout | None = None
        self.model: tuple[dict[str, Any], list[Any]] | None = None
        reward = next((spec for spec in config.rewards if (spec.label or spec.name) == name), None)
        if reward is not None:
            self._reward(reward)
        elif name == "engine":
            self._engine(config)
        else:
            self._model(role_config(config, name), name)

    def _table(self, path: str, head: str) -> None:
        """The model's tensors; a model that is no local folder, or of a family without a table, leaves the memory unknown."""
        try:
            config = read_config(path)
        except ConfigError:
            self.note = f"{path} is no local folder, so its memory is not known"
            return
        if config.get("model_type") in FAMILIES:
            self.model = config, tensors(config, head)
        else:
            self.note = f"model type {config.get('model_type')!r} has no table, so its memory is not known"

    def _model(self, role: RoleConfig, name: str) -> None:
        assert role.model is not None
        assert role.backend is not None
        options = {"dtype": "float32", **role.backend.options}
        self.options = options
        try:
            self.plan_layout = training_layout(role.backend, self.pool.size)
        except ConfigError as error:
            if "no layout is known" not in str(error):
                raise ConfigError(f"{name}: {str(error).removesuffix('; say --gpus')}; change {name}.gpus or the sizes") from error
        self.layout = str(self.plan_layout or role.backend.name)
        self._table(role.model.path, role.model.head)
        if self.model and self.plan_layout:
            config, table = self.model
            _divides(name, table, self.plan_layout)
            if name == "reference":
                self.need = frozen(table, self.plan_layout, options)
            else:
                self.need = trained(table, self.plan_layout, options, config, role.micro_batch_tokens)

    def _engine(self, config: RunConfig) -> None:
        policy = role_config(config, "policy")
        assert policy.model is not None
        assert policy.backend is not None
        self.options = {"dtype": engine_dtype(config.engine, policy.backend)}
        self.plan_layout = engine_layout(config.engine, self.pool.size) if config.engine.name in ("hf", "vllm") else None
        self.layout = str(self.plan_layout or config.engine.name).replace("torch", "hf")
        self._table(policy.model.path, policy.model.head)
        if self.model and self.plan_layout:
            self.need = frozen(self.model[1], self.plan_layout, self.options)
            self.need.parts["weights without the cache"] = self.need.parts.pop("weights")

    def _reward(self, reward: RewardSpec) -> None:
        self.layout = f"{reward.name} dp{self.pool.size}"
        if isinstance(path := reward.options.get("model"), str):
            self._table(path, "value")
            if self.model:
                self.need = frozen(self.model[1], Layout("torch"), {"dtype": reward.options.get("dtype", "float32")})

    def line(self) -> str:
        """One line of the map."""
        gpus = f"{self.pool.first}" if self.pool.size == 1 else f"{self.pool.first}-{self.pool.first + self.pool.size - 1}"
        count = f"{parameters(self.model[1]) / 1e9:.3g} B parameters, {self.need}" if self.need.parts and self.model else self.note
        return f"{gpus:>9}  {self.name:12} {self.layout:22} {count}"


def engine_dtype(engine: ComponentSpec, backend: ComponentSpec) -> str:
    """The type that the engine serves in."""
    wanted = str(engine.options.get("dtype", "auto"))
    return str(backend.options.get("dtype", "float32")) if wanted == "auto" else wanted


def _divides(name: str, table: list[Any], layout: Layout) -> None:
    for tensor in table:
        if tensor.cut in ("heads", "rows") and tensor.units > 1 and tensor.units % layout.tp:
            raise ConfigError(
                f"{name}: {tensor.name} has {tensor.units} heads, not divisible by tp {layout.tp}; choose a tp that divides {tensor.units}"
            )


def report(config: RunConfig, gpus: int | None, gpu_memory: float | None) -> Iterator[str]:
    """The lines of `jackfield check`. Raises ConfigError, with the arithmetic, where something does not fit."""
    names = roles_of(config)
    count = available(config, names, gpus)
    found = pools(config, names, count)
    used = sum(pool.size for pool in found)
    yield f"launcher {config.launcher.name}: {used} of {count} workers in {len(found)} pool{'s' * (len(found) > 1)}"
    yield f"{'GPUs':>9}  {'role':12} {'layout':22} model and memory"
    memory = gpu_memory or _this_gpu()
    roles: dict[str, Role] = {}
    for pool in found:
        here = [Role(config, name, pool) for name in pool.roles]
        if "policy" in pool.roles and "engine" not in names:
            here.append(Role(config, "engine", pool))
        roles |= {role.name: role for role in here}
        for role in here:
            yield role.line()
        if memory:
            _fits(here, memory)
    yield from _resharding(roles)
    if memory and (unknown := [name for name, role in roles.items() if role.model is None and role.note]):
        yield f"whether it fits is not known: the memory of {' and '.join(unknown)} is not; give the model as a local folder"
    elif memory:
        fullest = max(sum(roles[r].need.total for r in roles if roles[r].pool is pool) for pool in found)
        yield f"fits: at most {fullest / GIB:.2f} of {memory:.2f} GiB a GPU; the rest is for caches and the allocator"


def _fits(roles: Sequence[Role], memory: float) -> None:
    total = sum(role.need.total for role in roles) / GIB
    if total > memory:
        terms = " + ".join(f"{role.name} {role.need.total / GIB:.2f}" for role in roles)
        raise ConfigError(
            f"GPUs of pool {roles[0].pool.name}: {terms} = {total:.2f} GiB, but a GPU has {memory:.2f}: raise tp, pp or gpus, lower "
            "micro_batch_tokens, set activation_checkpointing, or give a role GPUs of its own"
        )


def _resharding(roles: dict[str, Role]) -> Iterator[str]:
    policy, engine = roles["policy"], roles["engine"]
    if not (policy.model and policy.plan_layout and engine.plan_layout):
        return
    classes = between(
        policy.model[1], policy.plan_layout, engine.plan_layout, policy.options["dtype"], engine.options["dtype"], fused_qkv=False
    )
    apart = engine.pool is not policy.pool
    topology = (Topology.separate if apart else Topology.colocated)(policy.pool.size, engine.pool.size)
    made = plan(classes, topology)
    yield (
        f"each sync: {size(made.bytes_local)} stay on their GPU, of which {size(int(made.aliased.sum()))} can be shared without a copy; "
        f"{size(made.bytes_sent)} are sent (`jackfield plan` shows how)"
    )
    if made.bytes_sent and (lora := policy.options.get("lora")) is not None:
        count = f"{adapters(policy.model[1], lora):,.0f}"
        yield f"with lora that is the first sync (transports auto and p2p): later ones send the {count} elements of the adapters"


def _this_gpu() -> float | None:
    import torch

    return torch.cuda.get_device_properties(0).total_memory / GIB if torch.cuda.is_available() else None

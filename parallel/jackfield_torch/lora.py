"""LoRA (arXiv 2106.09685) through PEFT: adapters are trained, and everybody else sees merged weights under their usual names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from jackfield.components import ComponentConfig
from jackfield.errors import ConfigError, PluginError
from jackfield.shard import Shard
from jackfield_reshard.modules import weights

_BASE, _ADAPTER = ".base_layer.", ".lora_"


class LoRAConfig(ComponentConfig):
    """Low-rank adapters instead of full training. Optimizer states and checkpoints hold the adapters alone."""

    r: int = Field(default=16, gt=0)
    """Rank."""
    alpha: float = Field(default=32.0, gt=0)
    """The adapters' product is scaled by alpha / r."""
    targets: Literal["all-linear"] | tuple[str, ...] = "all-linear"
    """Names of the linear layers to adapt, such as [q_proj, v_proj]; all-linear: all but the head."""


def add_adapters(model: Any, config: LoRAConfig, seed: int) -> None:
    """Put adapters into the model, drawn from `seed`; they change nothing at first. Only they need gradients afterwards."""
    try:
        import peft
    except ImportError as error:
        raise PluginError("backend: lora needs PEFT; pip install 'jackfield[lora]'") from error
    targets: Any = config.targets if isinstance(config.targets, str) else list(config.targets)
    settings = peft.LoraConfig(r=config.r, lora_alpha=config.alpha, target_modules=targets, lora_dropout=0.0)
    head = model.get_output_embeddings()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            peft.inject_adapter_in_model(settings, model)
        except ValueError as error:
            raise ConfigError(f"backend: lora targets {config.targets} are not in {type(model).__name__} ({error})") from error
    if model.get_output_embeddings() is not head:
        raise ConfigError("backend: lora cannot adapt the head, which scoring uses by itself; leave it out of lora.targets")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(_ADAPTER in name)


class Merged:
    """The model's weights with the adapters' products added, in storage of their own that is refreshed on demand."""

    def __init__(self, model: nn.Module, local: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor]) -> None:
        """`local` gives a rank's rows of a weight, `whole` gathers one; both the identity where nothing is sharded."""
        self.model, self.local, self.whole = model, local, whole
        self.storage: dict[str, Tensor] = {}

    @property
    def scale(self) -> dict[str, float]:
        """Factor on the product of each adapted weight, by its usual name."""
        layers = {name.removesuffix(_BASE + "weight"): name for name, _, _ in weights(self.model) if name.endswith(_BASE + "weight")}
        return {f"{path}.weight": self.model.get_submodule(path).scaling["default"] for path in layers}  # type: ignore[index]

    def apart(self) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
        """The weights before the adapters are added, and the adapters by the names that jackfield_reshard.adapters gives them."""
        self.storage.clear()  # whoever takes them apart has no use for merged ones
        for name, tensor, buffer in weights(self.model):
            usual = re.sub(r"\.(lora_[AB])\.default\.weight$", r".weight.\1", name.replace(_BASE, "."))
            yield usual, tensor, self.local(tensor).detach(), buffer

    @torch.no_grad()
    def adopt(self, shards: Sequence[Shard]) -> bool:
        """Merge into the given storage from now on, and keep the weights without adapters there too; whatever fits is taken."""
        given = {shard.name: shard.tensor for shard in shards if shard.full and shard.tensor is not None}
        taken = False
        for name, tensor, part, buffer in list(self.weights()):
            storage = given.get(name)
            if storage is None or storage.shape != part.shape or storage.dtype != part.dtype or storage.device != part.device:
                continue
            storage.copy_(part)
            taken = True
            if name in self.storage:
                self.storage[name] = storage
            elif buffer:
                owner, _, leaf = name.rpartition(".")
                self.model.get_submodule(owner)._buffers[leaf] = storage
            else:
                tensor.data = storage
        return taken

    @torch.no_grad()
    def weights(self) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
        """(usual name, the module's tensor, this rank's merged part, is a buffer) of every weight that is no adapter.

        Rows of the product need the same rows of B and all of A, so a rank merges its own rows.
        """
        for name, tensor, buffer in weights(self.model):
            if _ADAPTER in name:
                continue
            usual = name.replace(_BASE, ".")
            if not name.endswith(_BASE + "weight"):
                yield usual, tensor, self.local(tensor).detach(), buffer
                continue
            layer: Any = self.model.get_submodule(name.removesuffix(_BASE + "weight"))
            down, up = (side["default"].weight for side in (layer.lora_A, layer.lora_B))
            product = self.local(up).float() @ self.whole(down).float()
            base = self.local(tensor).detach()
            if usual not in self.storage:
                self.storage[usual] = torch.empty_like(base)
            self.storage[usual].copy_(base.float() + layer.scaling["default"] * product)
            yield usual, tensor, self.storage[usual], buffer

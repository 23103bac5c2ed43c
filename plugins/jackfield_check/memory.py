"""Bytes on the fullest GPU of a role, by arithmetic on its Hugging Face config and its layout."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jackfield_reshard.families import Tensor
from jackfield_reshard.layout import Layout
from jackfield_reshard.sides import depth_of, holding, stages

ITEM = {"float32": 4, "bfloat16": 2}
GIB = 2**30


@dataclass
class Need:
    """Bytes on one GPU by what they are for."""

    parts: dict[str, float] = field(default_factory=dict)

    @property
    def total(self) -> float:
        """All of it."""
        return sum(self.parts.values())

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {count / GIB:.2f}" for name, count in self.parts.items() if count)
        return f"{self.total / GIB:.2f} GiB a GPU ({parts})"


def elements(table: list[Tensor], layout: Layout) -> float:
    """Elements on the rank that holds most."""
    held = np.zeros(layout.world)
    for tensor in table:
        for layers, where in stages(tensor, layout, depth_of(table)):
            own = holding(tensor, layout, where)
            np.add.at(held, own.ranks, own.volume * float(len(layers)))
    return float(held.max())


def parameters(table: list[Tensor]) -> float:
    """Elements of the whole model."""
    return float(sum(math.prod(t.shape) * len(t.layers) for t in table))


def frozen(table: list[Tensor], layout: Layout, options: Mapping[str, Any]) -> Need:
    """A model that only scores: a reference, an engine without its cache."""
    item = ITEM[options.get("dtype", "float32")]
    if layout.kind == "fsdp" and layout.world > 1:  # the shards are float32 whatever the layers compute in
        return Need({"weights": 4 * elements(table, layout), "gathered layers": _gathered(table, item, layout.tp)})
    return Need({"weights": item * elements(table, layout)})


def trained(table: list[Tensor], layout: Layout, options: Mapping[str, Any], config: Mapping[str, Any], tokens: int) -> Need:
    """A model in training with AdamW: its moments are 8 bytes an element, and a bfloat16 model has float32 masters of 4 more.

    Activations follow Korthikanti et al. (arXiv 2205.05198, without the attention matrix): 34 bytes a token, layer and hidden unit at
    16 bits; with recomputation 2, and one layer in full. Tensor parallelism without sequence parallelism (fsdp) divides 24 of the 34.
    """
    item, held = ITEM[options.get("dtype", "float32")], elements(table, layout)
    if (lora := options.get("lora")) is not None:  # merged weights are the engine's own storage
        need = frozen(table, layout, options)
        need.parts["adapters"] = 16 * adapters(table, lora) / (layout.dp if layout.kind == "fsdp" else 1)
    elif layout.kind == "fsdp" and layout.world > 1:
        gathered = _gathered(table, item, layout.tp)
        need = Need({"weights": 4 * held, "gradients": 4 * held, "optimizer": 8 * held, "gathered layers": gathered})
    else:
        gradient = ITEM[options.get("grad_reduce_dtype", "float32")] if layout.kind == "megatron" else item
        states = 8 + (4 if item == 2 else 0)
        shared = layout.dp * layout.cp if layout.kind == "megatron" and options.get("distributed_optimizer") is not False else 1
        need = Need({"weights": item * held, "gradients": gradient * held, "optimizer": states * held / shared})
    layers, hidden = depth_of(table), config["hidden_size"]
    units = 10 + 24 / layout.tp if layout.kind == "fsdp" else 34 / layout.tp
    whole = units * item / 2 * tokens * hidden / layout.cp
    if options.get("activation_checkpointing"):
        need.parts["activations"] = item * tokens * hidden / layout.cp * layers + whole
    else:
        need.parts["activations"] = whole * layers
    return need


def adapters(table: list[Tensor], lora: Mapping[str, Any]) -> float:
    """Elements of LoRA's factors: r x (inputs + outputs) of every linear layer that has them."""
    targets = lora.get("targets", "all-linear")
    linear = [t for t in table if t.place == "layer" and len(t.shape) == 2 and not t.expert]
    chosen = [t for t in linear if targets == "all-linear" or any(t.name.endswith(f".{name}.weight") for name in targets)]
    return float(lora.get("r", 16) * sum(sum(t.shape) * len(t.layers) for t in chosen))


def _gathered(table: list[Tensor], item: int, tp: int) -> float:
    """FSDP keeps two units gathered (the next is fetched ahead): the two largest of the layers and what stands outside them."""
    layer = sum(math.prod(t.shape) * len(t.layers) for t in table if t.place == "layer") / depth_of(table) / tp
    outside = sum(math.prod(t.shape) for t in table if t.place != "layer")
    return item * (max(layer, outside) + layer)

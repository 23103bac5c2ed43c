"""Tensor parallelism for backend `fsdp`: the plan that a transformers model brings along, carried out by torch's own styles.

Linear layers are split by columns (their outputs) or rows (their inputs) after Megatron-LM (arXiv 1909.08053, section 3). Embeddings and
head stay whole on every tensor-parallel rank: scoring multiplies by the head itself, and only where a token is scored.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from jackfield.errors import ConfigError

_SPLIT = {"colwise": (ColwiseParallel, 0), "rowwise": (RowwiseParallel, 1)}
"""transformers' name of a style: torch's style, and the dimension of the weight that it splits."""
_WHOLE = ("colwise_rep", "colwise_gather_output", "embedding_rowwise")
"""Styles of heads and embeddings, which stay whole here."""
_PARTIAL = "replicated_with_grad_allreduce"
"""The style of norms of single heads: the same weight on every rank, whose gradient covers only that rank's heads."""


@dataclass
class Split:
    """How a model is split over `mesh`; without one it is not."""

    mesh: DeviceMesh | None = None
    dims: dict[str, int] = field(default_factory=dict)
    """Dimension that each split parameter is split along, by name; the others are the same on every rank."""
    partial: set[str] = field(default_factory=set)
    """Parameters that are the same on every rank and whose gradients are to be summed over the ranks."""

    @property
    def size(self) -> int:
        """Ranks that share a layer."""
        return 1 if self.mesh is None else self.mesh.size()

    @property
    def rank(self) -> int:
        """This one of them."""
        return 0 if self.mesh is None else self.mesh.get_local_rank()

    def sum(self, gradient: Tensor) -> None:
        """Add up a partial gradient over the ranks, in place; collective."""
        assert self.mesh is not None
        dist.all_reduce(gradient, group=self.mesh.get_group())


def split(model: Any, mesh: DeviceMesh) -> Split:
    """Split the model's linear layers over the ranks of `mesh`, all of which hold it whole. Raises ConfigError where it cannot be."""
    plan = dict(getattr(model, "tp_plan", None) or {})
    name, size = type(model).__name__, mesh.size()
    if not plan:
        raise ConfigError(f"backend fsdp: {name} brings no plan for tensor parallelism; use tp: 1, or backend megatron")
    settings = model.config.get_text_config()
    for heads in ("num_attention_heads", "num_key_value_heads"):
        _divides(size, getattr(settings, heads, None) or 0, f"the {heads} of {name}")
    result, styles = Split(mesh), {}
    for path, module in model.named_modules():
        style = plan.get(_wildcards(path))
        for leaf, parameter in module.named_parameters(recurse=False):
            own, where = plan.get(_wildcards(f"{path}.{leaf}"), style), f"{path}.{leaf}"
            if own in _SPLIT and isinstance(module, nn.Linear):
                kind, dim = _SPLIT[own]
                styles[path] = kind()
                if dim < parameter.dim():  # the bias of a row-wise layer is whole
                    _divides(size, parameter.shape[dim], f"{where} {list(parameter.shape)}")
                    result.dims[where] = dim
            elif own == _PARTIAL:
                result.partial.add(where)
            elif own is not None and own not in _WHOLE:
                raise ConfigError(f"backend fsdp: {name} splits {where} in style {own!r}, which tp has not; use tp: 1, or backend megatron")
    if not styles:
        raise ConfigError(f"backend fsdp: the plan for tensor parallelism that {name} brings names none of its layers; use tp: 1")
    parallelize_module(model, mesh, styles, src_data_rank=None)
    return result


def _divides(size: int, length: int, what: str) -> None:
    if length % size:
        raise ConfigError(f"backend fsdp: tp is {size}, which does not divide {what}: {length} % {size} = {length % size}")


def _wildcards(path: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", path)

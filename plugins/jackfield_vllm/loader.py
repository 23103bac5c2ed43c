"""The model loader `jackfield`: builds vLLM's model with empty weights, or on storage that somebody else owns, and keeps what vLLM repacks.

vLLM finds it through its own plugin group, `vllm.general_plugins`, in every process (`register`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from jackfield.errors import ConfigError
from jackfield.shard import Shard
from jackfield_vllm.cpu import on_weight_itself
from jackfield_vllm.weights import Entry, bind, entries, shards

FORMAT = "jackfield"
_PERIOD = 251
_source: ContextVar[Sequence[Shard] | None] = ContextVar("storage that the model being built is bound to", default=None)


@contextlib.contextmanager
def on_storage(shards: Sequence[Shard] | None) -> Iterator[None]:
    """While it lasts, models are built on the storage of these shards (one for each of the engine's, in its order)."""
    token = _source.set(shards)
    try:
        yield
    finally:
        _source.reset(token)


class Weights:
    """The weights of a loaded model in the layout in which vLLM creates them, whatever it made of them for its kernels."""

    def __init__(self, found: list[Entry]) -> None:
        self.entries = found
        self._parameters = [getattr(e.owners[0], e.attribute) for e in found]
        self.tensors: list[Tensor] = [p.detach().as_subclass(Tensor) for p in self._parameters]
        """What to write into, by entry."""
        self._shards: list[Shard] | None = None
        self.repacked: list[int] = []
        """Indices of entries whose kernels read a repacked copy, which `repack` brings up to date."""

    def mark(self) -> None:
        """Write a pattern that shows afterwards whether vLLM moved anything."""
        for tensor in self.tensors:
            tensor.copy_(_pattern(tensor))

    def find_repacked(self) -> None:
        """After vLLM's processing: which parameters are no longer the storage and the order that were created. Clears the pattern."""
        for index, (entry, created) in enumerate(zip(self.entries, self.tensors, strict=True)):
            now = [getattr(owner, entry.attribute, None) for owner in entry.owners]
            # a packed copy may lie beside a weight that stays: so a tied head goes stale without a sign
            packed = not all(on_weight_itself(owner) for owner in entry.owners)
            moved = any(tensor is None or not _same(tensor, created) for tensor in now)
            if packed or moved or not torch.equal(created, _pattern(created)):
                self.repacked.append(index)
            created.zero_()

    def shards(self) -> list[Shard]:
        """Of `tensors`; the same list until `rebind`."""
        if self._shards is None:
            self._shards = shards(self.entries, self.tensors)
        return self._shards

    def rebind(self, tensors: list[Tensor]) -> None:
        """Take other tensors of the same layouts."""
        for index, (entry, tensor) in enumerate(zip(self.entries, tensors, strict=True)):
            if index not in self.repacked:
                getattr(entry.owners[0], entry.attribute).data = tensor
        self.tensors, self._shards = tensors, None

    def expose(self) -> None:
        """Put the parameters as they were created back in their places, for vLLM's own loading; `repack` must follow."""
        for index in self.repacked:
            entry, parameter = self.entries[index], self._parameters[index]
            parameter.data = self.tensors[index]
            for owner in entry.owners:
                setattr(owner, entry.attribute, parameter)

    def repack(self) -> None:
        """Bring what the kernels read up to date with the weights."""
        self.expose()
        for module in dict.fromkeys(owner for index in self.repacked for owner in self.entries[index].owners):
            method: Any = module.quant_method
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # otherwise vLLM takes this for an update of weights that it has packed already
            method.process_weights_after_loading(module)


def _same(a: Tensor, b: Tensor) -> bool:
    return (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def _pattern(tensor: Tensor) -> Tensor:
    """Small numbers, different for neighbours along every dimension, exact in any float type."""
    return torch.arange(tensor.numel(), device=tensor.device).remainder_(_PERIOD).view(tensor.shape).to(tensor.dtype)


def register() -> None:
    """Make the load format known to vLLM; called by vLLM itself in every process, possibly several times."""
    from vllm.model_executor import model_loader

    if FORMAT in model_loader._LOAD_FORMAT_TO_MODEL_LOADER:
        return

    @model_loader.register_model_loader(FORMAT)
    class JackfieldLoader(model_loader.BaseModelLoader):
        def download_model(self, model_config: Any) -> None:
            """Nothing is read."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Leave a trace of what was created, for `load_model` to compare."""
            model.jackfield = Weights(entries(model, model_config.architectures[0]))
            model.jackfield.mark()

        def load_model(self, *args: Any, **kwargs: Any) -> nn.Module:
            """Build, let vLLM process, see what it repacked, bind to foreign storage where some is offered."""
            model = super().load_model(*args, **kwargs)
            weights: Weights = model.jackfield
            weights.find_repacked()
            given = _source.get()
            if given is not None:
                bound = bind(weights.entries, given, weights.tensors)
                if bound is None:
                    raise ConfigError("engine vllm: the given storage is not laid out as vLLM's parameters are; let the trainer adopt them")
                weights.rebind(bound)
            weights.repack()
            return model

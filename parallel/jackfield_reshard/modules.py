"""A PyTorch module's weights as shards, and moving a module onto given storage. For owners that hold whole Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from jackfield.shard import Shard


def weights(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """(name, tensor, is a buffer) of each parameter and persistent buffer; a tied one comes once, under the first of its names.

    Names and shapes are those of the transformers module: experts may be stacked and fused, which `canonical` knows.
    """
    for name, parameter in module.named_parameters():
        yield name, parameter, False
    kept = module.state_dict(keep_vars=True).keys()
    yield from ((name, buffer, True) for name, buffer in module.named_buffers() if name in kept)


def whole_shard(name: str, tensor: Tensor, buffer: bool = False) -> Shard:
    """The shard of a tensor that one rank holds whole; metadata only where the tensor is on the meta device."""
    shape = tuple(tensor.shape)
    data = None if tensor.is_meta else tensor.detach()
    return Shard(name, shape, (0,) * len(shape), shape, str(tensor.dtype).removeprefix("torch."), data, buffer)


def module_shards(module: nn.Module) -> list[Shard]:
    """Every parameter and persistent buffer, whole, as views of the module's own storage."""
    return [whole_shard(name, tensor, buffer) for name, tensor, buffer in weights(module)]


class Unmoved:
    """Shards that are made again only when one of the tensors under them has moved: a sync asks for them every time."""

    def __init__(self, build: Callable[[], list[Shard]]) -> None:
        self.build = build
        self._places: list[tuple[int, torch.dtype]] = []
        self._shards: list[Shard] = []

    def __call__(self, tensors: Iterable[Tensor]) -> list[Shard]:
        """The shards, as the same list while the tensors (all that they view) stay where they are."""
        places = [(0 if tensor.is_meta else tensor.data_ptr(), tensor.dtype) for tensor in tensors]
        if places != self._places or not places:
            self._places, self._shards = places, self.build()
        return self._shards


def held(modules: Iterable[nn.Module]) -> Iterator[Tensor]:
    """Parameters and buffers of these very modules, without names, which take longer than all the rest."""
    for part in modules:
        yield from (tensor for tensor in (*part._parameters.values(), *part._buffers.values()) if tensor is not None)


def adopt_into(module: nn.Module, shards: Sequence[Shard], *, replace: bool = False) -> bool:
    """Re-point the module's weights to the shards' tensors; False, and nothing changed, unless they fit one to one.

    They fit if every weight of the module has a whole shard of its name, shape and type; shards of other names are ignored. The
    module's values move into the storage and parameters stay the objects that an optimizer knows; with `replace` (needed to leave
    the meta device) the storage's values stand, and parameters become new objects without gradients. Tied parameters stay tied.
    """
    given = {shard.name: shard for shard in shards}
    plan = []
    for name, tensor, buffer in weights(module):
        shard = given.get(name)
        if shard is None or shard.tensor is None or not shard.full or shard.tensor.shape != tensor.shape:
            return False
        if shard.tensor.dtype != tensor.dtype or not (replace or shard.tensor.device == tensor.device):
            return False
        plan.append((name, tensor, buffer, shard.tensor))
    for name, tensor, buffer, storage in plan:
        if not replace:  # a backend brings its weights along; an engine takes what it finds
            storage.copy_(tensor.detach())
        if buffer:
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner)._buffers[leaf] = storage
        elif not replace:
            tensor.data = storage
        else:
            _swap(module, tensor, nn.Parameter(storage, requires_grad=False))
    return True


def _swap(module: nn.Module, old: Tensor, new: nn.Parameter) -> None:
    """Put `new` wherever `old` is registered."""
    for part in module.modules():
        for leaf, parameter in part._parameters.items():
            if parameter is old:
                part._parameters[leaf] = new


@torch.no_grad()
def plain_head(model: Any, tokens: Tensor) -> bool:
    """Whether a transformers causal LM's logits are just its head on the last hidden states: no cap, no scale, no other input.

    Compared bit for bit at the head itself, since a cap hardly shows while logits are small.
    """
    seen: list[Tensor] = []
    hook = model.get_output_embeddings().register_forward_hook(lambda _, inputs, output: seen.extend((inputs[0], output)))
    try:
        logits = model(input_ids=tokens, use_cache=False).logits
    finally:
        hook.remove()
    hidden = model.base_model(input_ids=tokens, use_cache=False).last_hidden_state
    return len(seen) == 2 and torch.equal(seen[1], logits) and torch.equal(seen[0], hidden)


def materialise(tensor: Tensor, device: torch.device) -> nn.Parameter:
    """Fresh, uninitialised storage for a parameter of the meta device."""
    return nn.Parameter(torch.empty_like(tensor, device=device), requires_grad=False)

"""vLLM's parameters as shards: Hugging Face names, and boxes that are views of vLLM's own storage."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from jackfield.shard import Shard

FAMILIES = (
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MixtralForCausalLM",
    "Qwen2MoeForCausalLM",
    "Qwen3MoeForCausalLM",
)
"""Architectures whose weights travel as shards; any other through `load_weights`."""

EXPERT_NAMES = {"MixtralForCausalLM": ("w1", "w3", "w2")}
"""Hugging Face names of an expert's gate, up and down matrices where they are not gate_proj, up_proj, down_proj."""


@dataclass(frozen=True)
class Box:
    """A part of one of vLLM's parameters, and where it belongs in the Hugging Face tensor."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    view: Callable[[Tensor], Tensor]
    """The part, as a view of the parameter."""


@dataclass(frozen=True)
class Entry:
    """One of vLLM's parameters and the boxes that it holds."""

    owners: tuple[nn.Module, ...]
    """Modules that it is a parameter of: several where it is tied."""
    attribute: str
    """Its name in them."""
    boxes: tuple[Box, ...]


def entries(model: nn.Module, architecture: str) -> list[Entry]:
    """All parameters of `model`, tied ones once; without boxes where the architecture is not one of FAMILIES."""
    found: dict[int, Entry] = {}
    for path, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            if (tied := found.get(id(parameter))) is not None:
                found[id(parameter)] = replace(tied, owners=(*tied.owners, module))
                continue
            boxes = _boxes(path, module, attribute, parameter, architecture) if architecture in FAMILIES else ()
            found[id(parameter)] = Entry((module,), attribute, tuple(boxes))
    return list(found.values())


def shards(found: Sequence[Entry], tensors: Sequence[Tensor]) -> list[Shard]:
    """Shards of the entries, each a view of its entry's tensor."""
    result = []
    for entry, tensor in zip(found, tensors, strict=True):
        for box in entry.boxes:
            view = box.view(tensor)
            dtype = str(tensor.dtype).removeprefix("torch.")
            result.append(Shard(box.name, box.shape, box.offset, tuple(view.shape), dtype, view))
    return result


def _rows(name: str, total: int, start: int, low: int, high: int, shape: Sequence[int]) -> Box:
    """Rows [low, high) of the parameter are rows from `start` of a tensor of `total` rows."""
    rest = tuple(shape[1:])
    return Box(name, (total, *rest), (start, *(0 for _ in rest)), lambda t: t[low:high])


def _boxes(path: str, module: nn.Module, attribute: str, parameter: Tensor, architecture: str) -> Iterator[Box]:
    from vllm.model_executor.layers import linear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    parent, _, own = path.rpartition(".")
    shape = tuple(parameter.shape)
    rank, size = getattr(module, "tp_rank", 0), getattr(module, "tp_size", 1)
    name = f"{path}.{attribute}"
    if attribute in ("w13_weight", "w2_weight"):
        yield from _experts(path, module, attribute, shape, architecture)
    elif isinstance(module, linear.QKVParallelLinear):
        heads = (module.num_heads, module.num_kv_heads, module.num_kv_heads)
        sizes = (module.head_size, module.head_size, getattr(module, "v_head_size", module.head_size))
        totals = (module.total_num_heads, module.total_num_kv_heads, module.total_num_kv_heads)
        places = (rank, *[rank // module.num_kv_head_replicas] * 2)
        low = 0
        for part, count, width, total, place in zip("qkv", heads, sizes, totals, places, strict=True):
            high = low + count * width
            yield _rows(f"{parent}.{part}_proj.{attribute}", total * width, place * count * width, low, high, shape)
            low = high
    elif isinstance(module, linear.MergedColumnParallelLinear):
        if own != "gate_up_proj":
            raise ValueError(f"{name}: unknown fused linear")
        low = 0
        for part, total in zip(("gate_proj", "up_proj"), module.output_sizes, strict=True):
            high = low + total // size
            yield _rows(f"{parent}.{part}.{attribute}", total, rank * (total // size), low, high, shape)
            low = high
    elif isinstance(module, VocabParallelEmbedding):
        index = module.shard_indices
        start, end = index.org_vocab_start_index, index.org_vocab_end_index
        yield _rows(name, module.org_vocab_size, start, 0, end - start, shape)
    elif isinstance(module, linear.ColumnParallelLinear):
        yield _rows(name, shape[0] * size, rank * shape[0], 0, shape[0], shape)
    elif isinstance(module, linear.RowParallelLinear) and len(shape) == 2:
        yield Box(name, (shape[0], shape[1] * size), (0, rank * shape[1]), lambda t: t)
    else:  # norms, replicated linears, biases after a reduction: the same on every rank
        yield Box(name, shape, (0,) * len(shape), lambda t: t)


def _experts(path: str, module: nn.Module, attribute: str, shape: tuple[int, ...], architecture: str) -> Iterator[Box]:
    """w13 is [experts, gate rows then up rows, hidden], w2 [experts, hidden, intermediate]; TP splits the intermediate."""
    base = path[: path.index(".experts") + len(".experts")]
    gate, up, down = EXPERT_NAMES.get(architecture, ("gate_proj", "up_proj", "down_proj"))
    rank, size = _expert_parallel(module)
    expert_map = getattr(module, "expert_map", None)
    local = range(shape[0]) if expert_map is None else [int(g) for g in torch.argsort(expert_map)[-shape[0] :].tolist()]
    for slot, expert in enumerate(local):
        if attribute == "w13_weight":
            half, hidden = shape[1] // 2, shape[2]
            for part, low in ((gate, 0), (up, half)):
                view = _expert_rows(slot, low, low + half)
                yield Box(f"{base}.{expert}.{part}.weight", (half * size, hidden), (rank * half, 0), view)
        else:
            hidden, width = shape[1:]
            view = _expert_rows(slot, 0, hidden)
            yield Box(f"{base}.{expert}.{down}.weight", (hidden, width * size), (0, rank * width), view)


def _expert_rows(slot: int, low: int, high: int) -> Callable[[Tensor], Tensor]:
    return lambda t: t[slot, low:high]


def _expert_parallel(module: nn.Module) -> tuple[int, int]:
    """Rank and size of the split of each expert's matrices."""
    parallel = module.moe_config.moe_parallel_config
    return parallel.tp_rank, parallel.tp_size


def bind(found: Sequence[Entry], given: Sequence[Shard], tensors: Sequence[Tensor]) -> list[Tensor] | None:
    """For each entry the tensor of vLLM's layout that lies in the given storage; None where any is laid out differently.

    `given` has one shard for each of `shards(found)`, in that order. The parts of a fused parameter must lie in one storage exactly
    where vLLM has them, padding rows included.
    """
    parts = iter(given)
    result = []
    for entry, model in zip(found, tensors, strict=True):
        pairs = [(box.view(model), next(parts).tensor) for box in entry.boxes]
        placed = _placed(model, pairs) if pairs else None
        if placed is None:
            return None
        result.append(placed)
    return result


def _placed(model: Tensor, pairs: Sequence[tuple[Tensor, Tensor | None]]) -> Tensor | None:
    """A tensor like `model` in the storage of the given parts, if they are its parts."""
    base: int | None = None
    first = pairs[0][1]
    for want, have in pairs:
        if first is None or have is None or (have.shape, have.stride(), have.dtype) != (want.shape, want.stride(), want.dtype):
            return None
        if have.device != want.device or have.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return None
        start = have.storage_offset() - (want.storage_offset() - model.storage_offset())
        if base is not None and start != base:
            return None
        base = start
    assert base is not None
    assert first is not None
    room = first.untyped_storage().nbytes() // first.element_size()
    if base < 0 or base + model.numel() > room or not model.is_contiguous():
        return None
    return torch.empty(0, dtype=model.dtype, device=model.device).set_(first.untyped_storage(), base, model.shape, model.stride())

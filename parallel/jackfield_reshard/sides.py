"""Who holds what: a layout applied to a family's table, for all ranks at once and without tensors."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jackfield.errors import ConfigError
from jackfield.shard import Shard
from jackfield_reshard.boxes import recut
from jackfield_reshard.families import Tensor
from jackfield_reshard.layout import Layout


@dataclass(frozen=True)
class Holding:
    """Boxes of one tensor (or of each tensor of a class) by rank."""

    ranks: np.ndarray
    """int [n]; a rank may occur more than once."""
    offset: np.ndarray
    """int [n, dimensions]."""
    size: np.ndarray
    """int [n, dimensions]."""

    @property
    def volume(self) -> np.ndarray:
        """Elements of each box, int [n]."""
        volume: np.ndarray = self.size.prod(axis=1)
        return volume


def _chunk(length: np.ndarray, parts: int, position: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """torch.chunk: parts of ceil(length / parts), the last ones shorter or empty."""
    step = -(-length // parts)
    start = np.minimum(position * step, length)
    return start, np.minimum(start + step, length) - start


def _even(tensor: Tensor, length: int, parts: int, position: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    if length % parts:
        raise ConfigError(
            f"{tensor.name}: {length} along the tensor-parallel dimension of {list(tensor.shape)} is not divisible by {parts} ({layout})"
        )
    return position * (length // parts), np.full_like(position, length // parts)


def _tensor_parallel(tensor: Tensor, length: int, parts: int, position: np.ndarray, layout: Layout) -> tuple[np.ndarray, np.ndarray]:
    """Start and extent along the cut dimension for every rank."""
    if tensor.cut == "vocabulary":
        multiple = np.lcm(layout.vocabulary_multiple, parts)
        step = -(-length // multiple) * multiple // parts
        start = np.minimum(position * step, length)
        return start, np.minimum(start + step, length) - start
    if tensor.cut == "kv" and parts > tensor.units:
        if parts % tensor.units:
            raise ConfigError(f"{tensor.name}: {tensor.units} key-value heads can neither be divided nor replicated over tp {parts}")
        return _even(tensor, length, tensor.units, position * tensor.units // parts, layout)
    if tensor.cut in ("heads", "kv") and tensor.units % parts:
        raise ConfigError(f"{tensor.name}: {tensor.units} heads are not divisible by tp {parts} ({layout})")
    return _even(tensor, length, parts, position, layout)


def stages(tensor: Tensor, layout: Layout, depth: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(layers of the tensor, pipeline stages that hold them), one for each group of layers held alike."""
    last = layout.pp - 1
    if tensor.place != "layer":
        return [((0,), {"first": (0,), "last": (last,), "ends": (0, last) if last else (0,)}[tensor.place])]
    own = set(tensor.layers)
    groups = [(tuple(i for i in held if i in own), (stage,)) for stage, held in enumerate(layout.stage_layers(depth))]
    return [(held, where) for held, where in groups if held]


def holding(tensor: Tensor, layout: Layout, where: tuple[int, ...]) -> Holding:
    """Boxes of the tensor on every rank of the given pipeline stages; empty boxes are left out."""
    axes = layout.axes(tensor.expert)
    ranks = np.flatnonzero(np.isin(axes["pp"], where))
    offset = np.zeros((len(ranks), len(tensor.shape)), dtype=np.int64)
    size = np.tile(np.array(tensor.shape, dtype=np.int64), (len(ranks), 1))
    if layout.kind == "fsdp":
        if layout.tp > 1 and tensor.cut not in ("none", "vocabulary"):
            along = len(tensor.shape) - 1 if tensor.cut == "columns" else int(tensor.expert)
            offset[:, along], size[:, along] = _tensor_parallel(tensor, tensor.shape[along], layout.tp, axes["tp"][ranks], layout)
        start, size[:, 0] = _chunk(size[:, 0], layout.dp, axes["dp"][ranks])
        offset[:, 0] += start
    else:
        if tensor.expert and layout.ep > 1:
            offset[:, 0], size[:, 0] = _even(tensor, tensor.shape[0], layout.ep, axes["ep"][ranks], layout)
        parts = layout.expert_tp if tensor.expert else layout.tp
        if tensor.cut != "none" and parts > 1:
            along = len(tensor.shape) - 1 if tensor.cut == "columns" else int(tensor.expert)
            offset[:, along], size[:, along] = _tensor_parallel(tensor, tensor.shape[along], parts, axes["tp"][ranks], layout)
    keep = (size > 0).all(axis=1)
    return Holding(ranks[keep], offset[keep], size[keep])


def logical(tensor: Tensor, groups: int) -> tuple[int, ...]:
    """The shape with key-value groups unflattened, as sides with a fused QKV write it."""
    if tensor.cut not in ("heads", "kv") or tensor.units % groups:
        return tensor.shape
    return (groups, tensor.shape[0] // groups, *tensor.shape[1:])


def shards(table: list[Tensor], layout: Layout, rank: int, dtype: str = "bfloat16", depth: int | None = None) -> list[Shard]:
    """The metadata of one rank's shards, in the way its side writes them: what the backend's `shards()` returns, without tensors."""
    layers = depth if depth is not None else depth_of(table)
    groups = next((t.units for t in table if t.cut == "kv"), 1)
    out = []
    for tensor in table:
        for held, where in stages(tensor, layout, layers):
            own = holding(tensor, layout, where)
            for index in np.flatnonzero(own.ranks == rank):
                box = tuple(map(int, own.offset[index])), tuple(map(int, own.size[index]))
                shape = logical(tensor, groups) if layout.kind in ("megatron", "vllm") else tensor.shape
                for _, (offset, size) in recut(box, tensor.shape, shape):
                    for layer in held:
                        name = tensor.name.format(layer)
                        out.append(Shard(name, shape, offset, size, tensor.dtype or dtype, None, tensor.buffer))
    return out


def depth_of(table: list[Tensor]) -> int:
    """Number of layers of a table's model."""
    return 1 + max(layer for tensor in table for layer in tensor.layers)

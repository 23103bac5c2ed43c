"""How a model is spread over ranks: sizes of the parallel axes, their order, and which rank stands where.

Megatron numbers ranks with the tensor-parallel axis fastest, then context, expert, data, and pipeline slowest
(`tp-cp-ep-dp-pp`; experts have their own tensor and data axes over the same ranks); vLLM tensor fastest, then pipeline, then
data (`tp-pp-dp`), and an expert group is that many consecutive ranks. FSDP2 cuts the first dimension of each parameter, or of
its tensor-parallel part, over the data-parallel ranks; embeddings and head have no such part.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from math import prod
from typing import Literal

import numpy as np

from jackfield.errors import ConfigError

Kind = Literal["torch", "fsdp", "megatron", "vllm"]


@dataclass(frozen=True)
class Layout:
    """Parallel sizes; the world size is tp x cp x dp x pp (experts share the same ranks)."""

    kind: Kind
    tp: int = 1
    """Tensor parallel size."""
    pp: int = 1
    """Pipeline stages."""
    dp: int = 1
    """Data parallel size: replicas, or for fsdp the ranks that share each parameter."""
    cp: int = 1
    """Context parallel size; weights are replicated over it."""
    ep: int = 1
    """Expert parallel size: experts are divided over it."""
    etp: int | None = None
    """Tensor parallel size inside an expert; default tp without expert parallelism, else 1."""
    vpp: int = 1
    """Virtual pipeline chunks on each stage, placed round robin."""
    chunks: tuple[int, ...] = ()
    """Layers of each pipeline chunk in model order (pp x vpp of them); default as even as possible, longer ones first."""
    vocabulary_multiple: int = 1
    """The vocabulary is padded to a multiple of this (and of tp)."""

    def __post_init__(self) -> None:
        if self.world % (self.expert_tp * self.ep * self.pp):
            raise ConfigError(
                f"layout {self}: expert tensor {self.expert_tp} x expert {self.ep} x pipeline {self.pp} = "
                f"{self.expert_tp * self.ep * self.pp} must divide the {self.world} ranks (tp x cp x dp x pp)"
            )
        if self.chunks and len(self.chunks) != self.pp * self.vpp:
            raise ConfigError(f"layout: {len(self.chunks)} chunks of layers for pp {self.pp} x vpp {self.vpp} = {self.pp * self.vpp}")

    def __str__(self) -> str:
        axes = [("tp", self.tp), ("pp", self.pp), ("vpp", self.vpp), ("cp", self.cp), ("dp", self.dp), ("ep", self.ep)]
        return " ".join([self.kind, *(f"{name}{n}" for name, n in axes if n > 1)])

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def expert_tp(self) -> int:
        """Tensor parallel size inside an expert."""
        return self.etp or (self.tp if self.ep == 1 else 1)

    @property
    def order(self) -> tuple[tuple[str, int], ...]:
        """Axes of the dense part, fastest first."""
        if self.kind == "vllm":
            return ("tp", self.tp), ("cp", self.cp), ("pp", self.pp), ("dp", self.dp)
        return ("tp", self.tp), ("cp", self.cp), ("dp", self.dp), ("pp", self.pp)

    @property
    def expert_order(self) -> tuple[tuple[str, int], ...]:
        """Axes of the experts, fastest first; `dp` is what is left."""
        rest = self.world // (self.expert_tp * self.ep * self.pp)
        if self.kind == "vllm":
            if self.pp == 1:
                return ("tp", self.expert_tp), ("ep", self.ep), ("pp", 1), ("dp", rest)
            inner = self.tp * self.cp // (self.expert_tp * self.ep)
            return ("tp", self.expert_tp), ("ep", self.ep), ("inner", inner), ("pp", self.pp), ("dp", self.dp)
        return ("tp", self.expert_tp), ("ep", self.ep), ("dp", rest), ("pp", self.pp)

    def coordinates(self, rank: int, expert: bool = False) -> dict[str, int]:
        """Axis name to position of a rank."""
        return {name: int(axis[rank]) for name, axis in self.axes(expert).items()}

    def rank(self, expert: bool = False, **position: int) -> int:
        """The rank at a position; axes not given are 0."""
        order = self.expert_order if expert else self.order
        strides = [1, *accumulate((n for _, n in order), lambda a, b: a * b)]
        for name, n in order:
            if not 0 <= position.get(name, 0) < n:
                raise ConfigError(f"layout {self}: {name} {position[name]} is outside 0..{n - 1}")
        return sum(position.get(name, 0) * stride for (name, _), stride in zip(order, strides, strict=False))

    def axes(self, expert: bool = False) -> dict[str, np.ndarray]:
        """Axis name to the position of every rank, an int array [world]."""
        order = self.expert_order if expert else self.order
        if prod(n for _, n in order) != self.world:
            raise ConfigError(f"layout {self}: expert axes {order} do not make up its {self.world} ranks")
        ranks, out, stride = np.arange(self.world), {}, 1
        for name, n in order:
            out[name] = ranks // stride % n
            stride *= n
        return out

    def stage_layers(self, layers: int) -> list[tuple[int, ...]]:
        """The layer numbers of each pipeline stage."""
        count = self.pp * self.vpp
        sizes = self.chunks or tuple(layers // count + (i < layers % count) for i in range(count))
        if sum(sizes) != layers:
            raise ConfigError(f"layout {self}: chunks {sizes} hold {sum(sizes)} layers, the model has {layers}")
        ends = list(accumulate(sizes))
        ranges = [range(end - n, end) for end, n in zip(ends, sizes, strict=True)]
        return [tuple(layer for chunk in ranges[stage :: self.pp] for layer in chunk) for stage in range(self.pp)]

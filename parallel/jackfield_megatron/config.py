"""Settings of the backend, and the arithmetic that a layout must satisfy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field

from jackfield.components import BackendConfig
from jackfield.errors import ConfigError


class MegatronConfig(BackendConfig):
    """Layout and behaviour of the `megatron` backend. Data parallelism is what the other sizes leave of the role's workers."""

    tp: int = Field(default=1, ge=1)
    """Tensor parallel size: each matrix is split over this many workers."""
    pp: int = Field(default=1, ge=1)
    """Pipeline parallel size: layers are split over this many stages."""
    vpp: int = Field(default=1, ge=1)
    """Virtual stages on each pipeline stage (interleaved schedule); 1 is plain 1F1B."""
    cp: int = Field(default=1, ge=1)
    """Context parallel size: each sequence is split over this many workers (padded micro-batches only)."""
    ep: int = Field(default=1, ge=1)
    """Expert parallel size: experts are split over this many workers, taken from TP x CP x DP."""
    etp: int = Field(default=1, ge=1)
    """Tensor parallel size inside one expert (CUDA only: gloo exchanges equal sizes only)."""
    sequence_parallel: bool | None = None
    """Split norms and residuals over the TP workers along the sequence; default: whenever `tp` > 1."""
    distributed_optimizer: bool | None = None
    """Split optimizer states over DP x CP; default: where that is more than 1. Without it an engine can share the weights' storage."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are accumulated and reduced; bfloat16 halves buffer and traffic (only with `dtype: bfloat16`)."""
    overlap_grad_reduce: bool = False
    """Reduce gradients while the last micro-batch's backward pass runs."""
    overlap_param_gather: bool = False
    """Gather updated weights during the next forward pass; needs `overlap_grad_reduce` and the distributed optimizer."""
    recompute_modules: tuple[Literal["mlp", "moe"], ...] = ()
    """Recompute only these in the backward pass. `activation_checkpointing` recomputes whole layers."""
    packing: bool | None = None
    """Put the samples of a micro-batch behind one another without padding; default: on CUDA in bfloat16 with `cp` 1."""
    logits_chunk: int = Field(default=1024, gt=0)
    """Token positions whose logits exist at one time."""
    fused: Literal["auto", "transformer_engine", "torch"] = "auto"
    """Linear layers and norms: Transformer Engine's where it is installed, otherwise torch's."""
    draw_on_device: bool = False
    """With `init: random`, draw the weights on the device, faster but not the numbers that other backends draw (benchmarks)."""


@dataclass(frozen=True)
class Layout:
    """Parallel sizes and what was decided from them."""

    world: int
    tp: int
    pp: int
    vpp: int
    cp: int
    ep: int
    etp: int
    sequence_parallel: bool
    distributed_optimizer: bool

    @property
    def dp(self) -> int:
        """Data parallel size."""
        return self.world // (self.tp * self.pp * self.cp)

    def stages(self, layers: int) -> list[int]:
        """Layers of each (virtual) stage in model order; the first ones take one more where they do not divide."""
        parts = self.pp * self.vpp
        return [layers // parts + (i < layers % parts) for i in range(parts)]


def _divides(small: int, large: int, small_name: str, large_name: str, remedy: str) -> None:
    if large % small:
        raise ConfigError(
            f"{large_name} ({large}) is not divisible by {small_name} ({small}): {large} % {small} = {large % small}; {remedy}"
        )


def resolve(config: MegatronConfig, world: int, shape: Any) -> Layout:
    """The layout for `world` workers and a model of `shape` (families.Shape). Raises ConfigError with the arithmetic."""
    product = config.tp * config.pp * config.cp
    if world % product:
        raise ConfigError(
            f"backend megatron: {world} workers are not divisible by tp {config.tp} x pp {config.pp} x cp {config.cp} = {product}; "
            f"use a multiple of {product} workers or smaller sizes"
        )
    heads, groups = shape.heads, shape.kv_heads
    _divides(config.tp, heads, "tp", "attention heads", "choose a tp that divides the heads")
    if groups % config.tp and config.tp % groups:
        raise ConfigError(
            f"key/value heads ({groups}) and tp ({config.tp}) must divide one another: {groups} % {config.tp} = {groups % config.tp}"
        )
    _divides(config.tp, shape.ffn, "tp", "intermediate size", "choose a tp that divides it")
    parts = config.pp * config.vpp
    if shape.layers < parts:
        raise ConfigError(f"{shape.layers} layers cannot fill pp {config.pp} x vpp {config.vpp} = {parts} stages; use fewer stages")
    if config.vpp > 1 and config.pp == 1:
        raise ConfigError(f"vpp {config.vpp} needs pp > 1: virtual stages interleave the stages of a pipeline")
    if shape.experts:
        _divides(config.ep, shape.experts, "ep", "experts", "choose an ep that divides the experts")
        _divides(config.etp, shape.expert_ffn, "etp", "expert intermediate size", "choose an etp that divides it")
        available = world // config.pp
        if available % (config.ep * config.etp):
            raise ConfigError(
                f"ep {config.ep} x etp {config.etp} = {config.ep * config.etp} does not divide the {available} workers of a pipeline stage "
                f"(world {world} / pp {config.pp})"
            )
    elif config.ep > 1 or config.etp > 1:
        raise ConfigError(f"ep {config.ep} and etp {config.etp} need a mixture-of-experts model; this one has no experts")
    sp = config.tp > 1 if config.sequence_parallel is None else config.sequence_parallel
    if sp and config.tp == 1:
        raise ConfigError("sequence_parallel needs tp > 1: it splits activations over the TP workers")
    if shape.experts and config.tp > 1 and not sp:
        raise ConfigError(f"experts with tp {config.tp} need sequence_parallel: otherwise every TP worker routes the same tokens")
    if config.packing and config.cp > 1:
        raise ConfigError(f"packing and cp {config.cp} exclude one another: context parallelism takes padded micro-batches")
    shared = world // (config.tp * config.pp)
    distributed = shared > 1 if config.distributed_optimizer is None else config.distributed_optimizer
    if config.overlap_param_gather and not (distributed and config.overlap_grad_reduce):
        raise ConfigError("overlap_param_gather needs overlap_grad_reduce and the distributed optimizer")
    if config.grad_reduce_dtype == "bfloat16" and config.dtype != "bfloat16":
        raise ConfigError("grad_reduce_dtype bfloat16 needs dtype bfloat16: float32 weights reduce float32 gradients")
    if config.activation_checkpointing and config.recompute_modules:
        raise ConfigError("activation_checkpointing recomputes whole layers already; leave recompute_modules empty")
    return Layout(world, config.tp, config.pp, config.vpp, config.cp, config.ep, config.etp, sp, distributed)

"""What vLLM's model runs on a CPU: linears on weights as they are, norms and the gated activation, each by the quicker of two ways."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_FEW, _FEW_BY_COLUMN = 128, 256
"""Rows up to which a bfloat16 product is taken the other way round, with a result that is turned afterwards or not. With more, turning
it, or packing the weight, costs as much as is gained."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`, contiguous; x [N, K], weight [M, K].

    A product packs its right side first. For a few rows of bfloat16 packing the weight costs more than the arithmetic, so the weight
    is taken as the left side, whose rows the matrix instructions read as they lie: as quick as multiplying by a copy packed before.
    """
    return _from_left(x, weight, bias).contiguous() if _few(x, _FEW) else F.linear(x, weight, bias)


def linear_by_column(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`linear`, whose result lies column by column where x has few rows: for what reads it element by element."""
    return _from_left(x, weight, bias) if _few(x, _FEW_BY_COLUMN) else F.linear(x, weight, bias)


def _few(x: Tensor, rows: int) -> bool:
    return x.dtype == torch.bfloat16 and x.dim() == 2 and len(x) <= rows


def _from_left(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (torch.mm(weight, x.t()) if bias is None else torch.addmm(bias[:, None], weight, x.t())).t()


def _pays() -> bool:
    """Whether the CPU has AMX: without it the arithmetic takes longer than packing the weight."""
    return torch.cpu._is_amx_tile_supported()


def on_weight_itself(layer: nn.Module) -> bool:
    """Whether a layer multiplies by its weight, not by a packed copy."""
    return getattr(layer, "cpu_linear", F.linear) in (F.linear, linear, linear_by_column)


@contextlib.contextmanager
def plain_linears() -> Iterator[None]:
    """While the model is built, let vLLM's linears keep their weight and multiply by it as it is, instead of packing a copy."""
    from vllm.model_executor.layers import utils

    quick = linear if _pays() else F.linear

    def keep(layer: nn.Module, remove_weight: bool) -> None:
        layer.cpu_linear = quick

    original = utils.dispatch_cpu_unquantized_gemm
    utils.dispatch_cpu_unquantized_gemm = keep
    try:
        yield
    finally:
        utils.dispatch_cpu_unquantized_gemm = original


def quicken(model: nn.Module) -> None:
    """Let RMS norms use vLLM's own CPU kernel, which it leaves to other platforms (its plain PyTorch form takes 4 times as long), and
    gated MLPs multiply without a temporary, gate and up each lying together. Where the kernels cut bfloat16 off instead of rounding it,
    norms and rotary embeddings are computed by PyTorch instead."""
    import vllm._custom_ops  # noqa: F401  (makes torch.ops._C known)
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.layernorm import RMSNorm
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    rounds = next(model.parameters()).dtype != torch.bfloat16 or kernels_round()
    norms = rounds and hasattr(torch.ops._C, "fused_add_rms_norm")
    for module in model.modules():
        if norms and type(module) is RMSNorm and _plain(module):
            module._forward_method = functools.partial(_norm, module)
        elif type(getattr(module, "act_fn", None)) is SiluAndMul:
            module.act_fn._forward_method = _silu_and_mul  # type: ignore[union-attr]
            gate_up: Any = getattr(module, "gate_up_proj", None)
            if getattr(gate_up, "cpu_linear", None) is linear:
                gate_up.cpu_linear = linear_by_column
        elif not rounds and isinstance(module, RotaryEmbedding):
            module._forward_method = module.forward_native  # type: ignore[union-attr]


@functools.cache
def kernels_round() -> bool:
    """Whether vLLM's CPU kernels round to the nearest bfloat16: those for CPUs without AVX-512 cut the last bits off, always toward 0."""
    import vllm._custom_ops  # noqa: F401

    if not hasattr(torch.ops._C, "fused_add_rms_norm"):
        return True
    x, total = torch.full((1, 64), 0.75 * 2**-7, dtype=torch.bfloat16), torch.ones(1, 64, dtype=torch.bfloat16)
    torch.ops._C.fused_add_rms_norm(x, total, torch.ones(64, dtype=torch.bfloat16), 1e-5)
    return bool((total > 1).all())  # three quarters of a unit above 1


def _plain(norm: Any) -> bool:
    return getattr(norm, "variance_size_override", None) is None and bool(getattr(norm, "has_weight", True))


def _norm(module: Any, x: Tensor, residual: Tensor | None = None) -> Any:
    """RMSNorm's forward: of `x`, or of `x + residual` together with that sum, both in place."""
    if residual is None:
        x = x.contiguous()  # the kernel takes rows to lie together, which those of Qwen3's queries and keys do not
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, module.weight, module.variance_epsilon)
        return out
    x, residual = x.contiguous(), residual.contiguous()
    torch.ops._C.fused_add_rms_norm(x, residual, module.weight, module.variance_epsilon)
    return x, residual


def _silu_and_mul(x: Tensor) -> Tensor:
    """silu of the first half of the last dimension times the second; the result lies as `x` does."""
    half = x.shape[-1] // 2
    return F.silu(x[..., :half]).mul_(x[..., half:])

"""RMS norms in bfloat16 on a CPU, forward and backward by hand.

As transformers writes them, autograd keeps a float32 and a rounded copy of the input for each norm, and its backward pass is many small
ones over memory; here the input and one number a token are kept, and intermediate results are written over each other.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn


class RMSNorm(torch.autograd.Function):
    """`weight * (x / sqrt(mean(x^2) + epsilon))`, x [..., H] and weight [H] of one type; in float32, rounded before the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.float()
        wide = wide.clone() if wide is x else wide
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return wide.mul_(inverse).to(x.dtype).mul_(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        """With r the inverse root and s = sum(grad weight x) / H: dx = r (grad weight - x r^2 s), dweight = sum(grad x r) over tokens."""
        x, weight, inverse = ctx.saved_tensors
        size = x.shape[-1]
        wide, slope, scale = (t.reshape(-1, t.shape[-1]) for t in (x.float(), grad.float(), inverse))
        factor = weight.float()
        products = slope * wide
        grad_weight = (scale.t() @ products)[0].to(weight.dtype) if ctx.needs_input_grad[1] else None
        along = (products @ factor)[:, None].div_(size).mul_(scale * scale * scale)
        grad_x = torch.mul(slope, factor, out=products).mul_(scale).addcmul_(wide, along, value=-1)
        return grad_x.to(x.dtype).view(x.shape), grad_weight, None


def replace_norms(model: nn.Module) -> int:
    """Let the model's RMS norms run as above where they are given bfloat16; returns how many. What is an RMS norm is found by trial."""
    count = 0
    for module in model.modules():
        if (epsilon := _epsilon(module)) is not None:
            module.forward = functools.partial(_forward, module, module.forward, epsilon)  # type: ignore[method-assign]
            count += 1
    return count


def _forward(module: Any, original: Any, epsilon: float, x: Tensor) -> Tensor:
    if x.dtype == torch.bfloat16 == module.weight.dtype and type(module.weight) is nn.Parameter:
        out: Tensor = RMSNorm.apply(x, module.weight, epsilon)  # type: ignore[no-untyped-call]
        return out
    plain: Tensor = original(x)
    return plain


@torch.no_grad()
def _epsilon(module: Any) -> float | None:
    """The epsilon of an RMS norm; None for any other module, one whose weight is an offset from 1 among them."""
    epsilon, weight = getattr(module, "variance_epsilon", None), getattr(module, "weight", None)
    if not isinstance(epsilon, float) or not isinstance(weight, nn.Parameter) or weight.dim() != 1 or list(module.children()):
        return None
    x = torch.linspace(-2, 3, 3 * len(weight), device=weight.device).view(3, -1)
    x[1] *= epsilon**0.5  # where it counts
    want, got = module(x).float(), RMSNorm.apply(x, weight.float(), epsilon)
    return epsilon if torch.allclose(got, want, rtol=2**-6, atol=1e-6) else None

"""Pure functions that the core and algorithms share. B samples, T tokens; no function reads behind its mask.

What only algorithms need (masked means, group statistics, returns, GAE) is in the library jackfield_estimators, which also hands these on.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from jackfield.batch import Batch, any_token

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: beyond that a weight says nothing, and float32 must not overflow."""


def group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    """Dense group numbers int64 [B] and their count."""
    _, index = torch.unique(group_ids, return_inverse=True)
    return index, int(index.max()) + 1 if index.numel() else 0


def split_groups(batch: Batch, parts: int, *, seed: int) -> Iterator[Batch]:
    """Up to `parts` mini-batches of whole groups, as even as they come, in an order drawn from `seed`; one part keeps the order."""
    if parts == 1:
        yield batch
        return
    index, groups = group_index(batch.group_ids)
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))
    for chosen in torch.tensor_split(order, min(parts, max(groups, 1))):
        yield batch[torch.isin(index, chosen)]


def trained(batch: Batch) -> Tensor:
    """bool [B]: samples with at least one trainable token; only these count in baselines."""
    return any_token(batch.loss_mask)


def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log(pi / pi_old) by token, clamped to +-20."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def kl_estimate(log_probs: Tensor, ref_log_probs: Tensor, estimator: str, old_log_probs: Tensor | None = None) -> Tensor:
    """Per-token estimate of KL(pi || ref) from samples of pi (docs/algorithms/kl.md); http://joschu.net/blog/kl-approx.html.

    With d = log_probs - ref_log_probs: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d; abs = |d|. Differentiated as written, in expectation
    over samples of pi, k1 gives gradient 0, k2 the exact gradient of KL(pi || ref), k3 that of the forward KL(ref || pi). A `+` keeps the
    value and takes k2's gradient, d * grad log pi. `unbiased` is k1+ times the importance weight pi / pi_old, so that value and gradient
    are exact in expectation after several optimizer steps too; without `old_log_probs` the samples count as pi's own.
    """
    d = log_probs - ref_log_probs
    base = "k1" if estimator == "unbiased" else estimator.removesuffix("+")
    match base:
        case "k1":
            value = d
        case "abs":
            value = d.abs()
        case "k2":
            value = d.square() / 2
        case "k3":
            bounded = d.clamp(min=-LOG_RATIO_LIMIT)
            value = torch.expm1(-bounded) + bounded
        case _:
            raise ValueError(f"unknown KL estimator {estimator!r}; choose k1, k2, k3, abs, one of them with a +, or unbiased")
    if base == estimator:
        return value
    k2 = d.square() / 2
    value = value.detach() + (k2 - k2.detach())
    if estimator == "unbiased" and old_log_probs is not None:
        value = value * log_ratio(log_probs, old_log_probs).exp().detach()
    return value


def adaptive_kl_multiplier(kl: float, target: float, samples: int, horizon: int) -> float:
    """Factor on the KL coefficient after a step that saw `kl` over `samples` (the controller of arXiv 1909.08593)."""
    return 1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon

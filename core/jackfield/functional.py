"""Pure functions that algorithms and backends share. Shapes: B samples, T tokens, V vocabulary. No function reads behind its mask."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jackfield.batch import Batch

LOG_RATIO_LIMIT = 20.0
"""Log-ratios are clamped to +-20 before exp: beyond that a weight says nothing, and float32 must not overflow."""


# ---- masked reductions --------------------------------------------------------------------------------------------------
def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x` where `mask` (same shape, bool); 0 for an empty mask."""
    return torch.where(mask, x, 0).sum() / mask.sum().clamp(min=1)


def sequence_mean(x: Tensor, mask: Tensor) -> Tensor:
    """[B, T] to [B, 1]: mean of each sample over its mask; 0 for a sample without tokens."""
    return torch.where(mask, x, 0).sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)


def masked_whiten(x: Tensor, mask: Tensor, *, shift: bool = True, eps: float = 1e-8) -> Tensor:
    """`x` with mean 0 (if `shift`) and unbiased variance 1 over `mask`, 0 outside.

    Unchanged where fewer than two are valid; exactly 0 (or the mean) where all valid ones are equal (law 14). `eps` is in the variance.
    """
    count = int(mask.sum())
    clean = torch.where(mask, x, 0)
    if count < 2:
        return clean
    mean = clean.sum(dtype=torch.float64).div(count).to(x.dtype)
    clean.sub_(mean).masked_fill_(~mask, 0)
    variance = clean.square().sum(dtype=torch.float64) / (count - 1)
    low, high = torch.where(mask, x, torch.inf).amin(), torch.where(mask, x, -torch.inf).amax()
    clean.mul_(torch.rsqrt(variance + eps).to(x.dtype) * (high > low))
    return clean if shift else clean.add_(mean).masked_fill_(~mask, 0)


# ---- groups -------------------------------------------------------------------------------------------------------------
def group_index(group_ids: Tensor) -> tuple[Tensor, int]:
    """Dense group numbers int64 [B] and their count."""
    _, index = torch.unique(group_ids, return_inverse=True)
    return index, int(index.max()) + 1 if index.numel() else 0


@dataclass(frozen=True)
class GroupStats:
    """Statistics of each sample's group over its valid samples, [B] each; float64, so that equal rewards stay equal."""

    count: Tensor
    """Valid samples."""
    mean: Tensor
    std: Tensor
    """Unbiased standard deviation; 0 for fewer than two."""
    flat: Tensor
    """bool: the group says nothing, since all its valid values are equal or there are fewer than two (law 14)."""


def group_sum(x: Tensor, index: Tensor, groups: int) -> Tensor:
    """Sums of the rows of `x` [B, ...] by group: [groups, ...]."""
    return x.new_zeros((groups, *x.shape[1:])).index_add_(0, index, x)


def group_stats(x: Tensor, group_ids: Tensor, valid: Tensor) -> GroupStats:
    """Statistics of `x` [B] by group. Samples that are not `valid` count nowhere, so that a masked one equals an absent one (law 4)."""
    index, groups = group_index(group_ids)
    clean = torch.where(valid, x, 0).double()
    count = group_sum(valid.double(), index, groups)
    mean = group_sum(clean, index, groups) / count.clamp(min=1)
    squares = torch.where(valid, clean - mean[index], 0).square()
    std = (group_sum(squares, index, groups) / (count - 1).clamp(min=1)).sqrt()
    low, high = (clean.new_full((groups,), fill) for fill in (torch.inf, -torch.inf))
    low.scatter_reduce_(0, index, torch.where(valid, clean, torch.inf), "amin")
    high.scatter_reduce_(0, index, torch.where(valid, clean, -torch.inf), "amax")
    return GroupStats(count[index], mean[index], std[index], ~(high > low)[index])


def group_center(x: Tensor, group_ids: Tensor, valid: Tensor, *, std: bool = False, eps: float = 1e-6) -> Tensor:
    """`x` [B] less its group's mean, over (the unbiased std + eps) if `std`; exactly 0 in a flat group and where not `valid`."""
    stats = group_stats(x, group_ids, valid)
    centered = x.double() - stats.mean
    if std:
        centered = centered / (stats.std + eps)
    return torch.where(valid & ~stats.flat, centered, 0).to(x.dtype)


def leave_one_out(x: Tensor, group_ids: Tensor, valid: Tensor) -> Tensor:
    """`x` [B] less the mean of the group's other samples; exactly 0 in a flat group and where not `valid`."""
    stats = group_stats(x, group_ids, valid)
    scaled = (x.double() - stats.mean) * stats.count / (stats.count - 1).clamp(min=1)
    return torch.where(valid & ~stats.flat, scaled, 0).to(x.dtype)


def spread(x: Tensor, mask: Tensor) -> Tensor:
    """One value a sample, [B], onto its tokens: [B, T], 0 outside `mask`."""
    return torch.where(mask, x[:, None], 0)


def with_advantages(batch: Batch, values: Tensor) -> Batch:
    """The batch with the advantage `values` [B] on every trainable token of its sample."""
    return batch.replace(advantages=spread(values, batch.loss_mask))


# ---- rewards and returns ------------------------------------------------------------------------------------------------
def trained(batch: Batch) -> Tensor:
    """bool [B]: samples with at least one trainable token; only these count in baselines."""
    return batch.loss_mask.any(-1)


def outcomes(batch: Batch) -> Tensor:
    """[B]: each sample's whole reward: `rewards` and the sum of `token_rewards` (KL in reward)."""
    assert batch.rewards is not None
    return batch.rewards if batch.token_rewards is None else batch.rewards + torch.where(batch.loss_mask, batch.token_rewards, 0).sum(-1)


def placed_rewards(batch: Batch) -> Tensor:
    """[B, T]: `rewards` on each sample's last trainable token, beside `token_rewards`."""
    assert batch.rewards is not None
    mask = batch.loss_mask
    placed = mask.new_zeros(mask.shape, dtype=torch.float32) if batch.token_rewards is None else torch.where(mask, batch.token_rewards, 0)
    rows = trained(batch).nonzero().squeeze(-1)
    last = mask.shape[1] - 1 - mask[rows].flip(1).view(torch.uint8).argmax(1)
    placed[rows, last] += batch.rewards[rows]
    return placed


def _decays(size: int, decay: float, like: Tensor) -> Tensor:
    """[size, size] with decay^(j - i) at [j, i] for j >= i: a row vector times it is the discounted sum from each place on."""
    steps = torch.arange(size, dtype=torch.float64, device=like.device)
    return torch.tril(decay ** (steps[:, None] - steps).clamp(min=0)).to(like.dtype)


def _scan(x: Tensor, decay: float) -> Tensor:
    """y[t] = x[t] + decay * y[t + 1] along the last dimension of [b, T], as two matrix products with blocks of sqrt(T)."""
    rows, length = x.shape
    size = max(math.isqrt(length), 1)
    blocks = -(-length // size)
    inner = torch.nn.functional.pad(x, (0, blocks * size - length)).view(rows, blocks, size) @ _decays(size, decay, x)
    carry = inner[:, 1:, 0] @ _decays(blocks - 1, decay**size, x)
    weights = decay ** torch.arange(size, 0, -1, dtype=torch.float64, device=x.device)
    inner[:, :-1].addcmul_(carry[..., None], weights.to(x.dtype))
    return inner.view(rows, -1)[:, :length]


def _scan_rows(mask: Tensor) -> Iterator[tuple[slice, Tensor, bool]]:
    """Row slices whose temporaries fit a CPU cache, their masks, and whether any mask there has a hole (a tool's output)."""
    size = max(1, 2**18 // max(mask.shape[1], 1))
    for start in range(0, len(mask) if mask.shape[1] else 0, size):
        part = mask[start : start + size]
        starts = part[:, :1].sum(-1) + (part[:, 1:] & ~part[:, :-1]).sum(-1)
        yield slice(start, start + size), part, bool((starts > 1).any())


def _packed(x: Tensor, mask: Tensor, holes: bool) -> Tensor:
    """The valid values of each row side by side, zeros after them; a row without holes may stay where it is."""
    if not holes:
        return torch.where(mask, x, 0)
    front = torch.arange(mask.shape[1], device=mask.device) < mask.sum(-1, keepdim=True)
    return torch.zeros_like(x).masked_scatter_(front, x[mask])


def _unpacked(x: Tensor, mask: Tensor, holes: bool) -> Tensor:
    """Undo `_packed`; 0 outside the mask."""
    if not holes:
        return torch.where(mask, x, 0)
    front = torch.arange(mask.shape[1], device=mask.device) < mask.sum(-1, keepdim=True)
    return torch.zeros_like(x).masked_scatter_(mask, x[front])


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """[B, T]: sum over the valid tokens k >= t of gamma^(k - t) * rewards[k], where masked tokens take no time; 0 outside the mask."""
    returns = torch.zeros_like(rewards)
    for rows, part, holes in _scan_rows(mask):
        returns[rows] = _unpacked(_scan(_packed(rewards[rows], part, holes), gamma), part, holes)
    return returns


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and their returns, arXiv 1506.02438 eq. 11, 16: ([B, T], [B, T]), 0 outside the mask.

    delta[t] = rewards[t] + gamma * values[t'] - values[t] and A[t] = delta[t] + gamma * lam * A[t'], with t' the next valid token:
    masked tokens, such as a tool's output, take no time. Beyond the last valid token value and advantage are 0. returns = A + values.
    """
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for rows, part, holes in _scan_rows(mask):
        value = _packed(values[rows], part, holes)
        delta = _packed(rewards[rows], part, holes).sub_(value)
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)
        delta = _scan(delta, gamma * lam)
        advantages[rows] = _unpacked(delta, part, holes)
        returns[rows] = _unpacked(delta + value, part, holes)
    return advantages, returns


# ---- losses -------------------------------------------------------------------------------------------------------------
def log_ratio(log_probs: Tensor, old_log_probs: Tensor) -> Tensor:
    """log(pi / pi_old) by token, clamped to +-20."""
    return (log_probs - old_log_probs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's loss by token, arXiv 1707.06347 eq. 7: max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0 at most -A * dual
    (arXiv 1912.09729, eq. 5). Also two float masks: where the clip made the loss larger, and where the dual clip made it smaller."""
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    bounded = torch.zeros_like(loss)
    if dual is not None:
        bounded = ((advantages < 0) & (loss > -advantages * dual)).to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)
    return loss, (clipped > plain).to(loss.dtype), bounded


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """The critic's loss by token: half of max((v - R)^2, (clip(v, v_old +- clip) - R)^2), and a float mask of where the clip counted."""
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain)
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, clipped) / 2, (clipped > plain).to(plain.dtype)


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
    """Factor on the KL coefficient after a step that saw `kl` over `samples` (arXiv 1909.08593, section 2.2)."""
    return 1 + min(max(kl / target - 1, -0.2), 0.2) * samples / horizon


# ---- mini-batches -------------------------------------------------------------------------------------------------------
def split_groups(batch: Batch, parts: int, *, seed: int) -> Iterator[Batch]:
    """Up to `parts` mini-batches of whole groups, as even as they come, in an order drawn from `seed`; one part keeps the order."""
    if parts == 1:
        yield batch
        return
    index, groups = group_index(batch.group_ids)
    order = torch.randperm(groups, generator=torch.Generator().manual_seed(seed))
    for chosen in torch.tensor_split(order, min(parts, max(groups, 1))):
        yield batch[torch.isin(index, chosen)]

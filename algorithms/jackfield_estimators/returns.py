"""Rewards, returns and advantages by token, and the critic's loss. B samples, T tokens; scans skip what is masked."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from jackfield.batch import Batch
from jackfield.functional import trained

BLOCK = 32
"""Tokens that a scan treats as one matrix product: a constant, so that its work is linear in tokens."""


def spread(x: Tensor, mask: Tensor) -> Tensor:
    """One value a sample, [B], onto its tokens: [B, T], 0 outside `mask`."""
    return torch.where(mask, x[:, None], 0)


def with_advantages(batch: Batch, values: Tensor) -> Batch:
    """The batch with the advantage `values` [B] on every trainable token of its sample."""
    return batch.replace(advantages=spread(values, batch.loss_mask))


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
    """y[t] = x[t] + decay * y[t + 1] along the last dimension of [b, T]: matrix products within blocks, then a scan over the blocks."""
    rows, length = x.shape
    if length <= BLOCK:
        return x @ _decays(length, decay, x)
    blocks = -(-length // BLOCK)
    inner = torch.nn.functional.pad(x, (0, blocks * BLOCK - length)).view(rows, blocks, BLOCK) @ _decays(BLOCK, decay, x)
    carry = _scan(inner[:, 1:, 0], decay**BLOCK)
    weights = decay ** torch.arange(BLOCK, 0, -1, dtype=torch.float64, device=x.device)
    inner[:, :-1].addcmul_(carry[..., None], weights.to(x.dtype))
    return inner.view(rows, -1)[:, :length]


def _scan_rows(mask: Tensor) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Row slices whose temporaries fit a CPU cache, their masks, and, where a mask has a hole (a tool's output), the first places of each
    row, as many as it has valid tokens."""
    size = max(1, 2**18 // max(mask.shape[1], 1))
    for start in range(0, len(mask) if mask.shape[1] else 0, size):
        part = mask[start : start + size]
        begins = torch.count_nonzero(part[:, 0]) + torch.count_nonzero(part[:, 1:] > part[:, :-1])
        front = None
        if begins > torch.count_nonzero(part.view(torch.uint8).amax(-1)):  # more stretches of valid tokens than rows with any
            front = torch.arange(mask.shape[1], device=mask.device) < part.view(torch.uint8).sum(-1, keepdim=True, dtype=torch.int32)
        yield slice(start, start + size), part, front


def moved(x: Tensor, source: Tensor, target: Tensor) -> Tensor:
    """The values of `x` where `source`, row by row, put where `target` (as many places in each row); 0 elsewhere."""
    return torch.zeros_like(x).masked_scatter_(target, torch.masked_select(x, source))


def discounted_returns(rewards: Tensor, mask: Tensor, *, gamma: float = 1.0) -> Tensor:
    """[B, T]: sum over the valid tokens k >= t of gamma^(k - t) * rewards[k], where masked tokens take no time; 0 outside the mask."""
    returns = torch.zeros_like(rewards)
    for rows, part, front in _scan_rows(mask):
        reward = torch.where(part, rewards[rows], 0) if front is None else moved(rewards[rows], part, front)
        reward = _scan(reward, gamma)
        returns[rows] = torch.where(part, reward, 0) if front is None else moved(reward, front, part)
    return returns


def gae(rewards: Tensor, values: Tensor, mask: Tensor, *, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    """Generalised advantage estimates and their returns, arXiv 1506.02438: ([B, T], [B, T]), 0 outside the mask.

    delta[t] = rewards[t] + gamma * values[t'] - values[t] and A[t] = delta[t] + gamma * lam * A[t'], with t' the next valid token:
    masked tokens, such as a tool's output, take no time. Beyond the last valid token value and advantage are 0. returns = A + values.
    """
    advantages, returns = torch.zeros_like(values), torch.zeros_like(values)
    for rows, part, front in _scan_rows(mask):
        value, delta = (torch.where(part, x[rows], 0) if front is None else moved(x[rows], part, front) for x in (values, rewards))
        delta.sub_(value)
        delta[:, :-1].add_(value[:, 1:], alpha=gamma)
        delta = _scan(delta, gamma * lam)
        advantages[rows] = torch.where(part, delta, 0) if front is None else moved(delta, front, part)
        torch.add(torch.where(part, values[rows], 0), advantages[rows], out=returns[rows])
    return advantages, returns


def clipped_value_loss(values: Tensor, old_values: Tensor, returns: Tensor, clip: float | None) -> tuple[Tensor, Tensor]:
    """The critic's loss by token: half of max((v - R)^2, (clip(v, v_old +- clip) - R)^2), and a float mask of where the clip counted."""
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, torch.zeros_like(plain)
    clipped = (old_values + (values - old_values).clamp(-clip, clip) - returns).square()
    return torch.maximum(plain, clipped) / 2, (clipped > plain).to(plain.dtype)

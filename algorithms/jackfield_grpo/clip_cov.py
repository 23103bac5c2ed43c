"""Clip-Cov: Cui et al., The entropy mechanism of reinforcement learning, arXiv 2505.22617.

    cov[t] = (log pi[t] - mean log pi) (A[t] - mean A), means over all tokens of the mini-batch
    a random share `ratio` of the tokens with cov_low < cov < cov_high gets no gradient; the rest PPO's clipped loss

Tokens of high covariance are what collapses the policy's entropy. A as in GRPO. Departures: the covariance is taken once, from the
log-probs before the update and over the whole mini-batch, so that micro-batches cannot change it; the paper's code takes it by
micro-batch from the running policy and passes over tokens that PPO's clip has caught already, of which there are none at that time.
The random choice is a function of sample and step, not of the order of samples.
"""

from __future__ import annotations

import dataclasses

import torch
from pydantic import Field
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, LossOutput, Needs, Outputs
from jackfield_estimators import ClippedAlgorithm, ClippedConfig
from jackfield_grpo.covariance import first, random_order, token_covariance


def clip_cov_tokens(
    log_probs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    order: Tensor,
    *,
    ratio: float,
    cov_low: float,
    cov_high: float,
    skip: Tensor | None = None,
) -> Tensor:
    """bool [B, T]: the tokens that get no gradient: max(1, ratio * tokens) of those between the bounds and not in `skip`, the first
    by `order`."""
    covariance = token_covariance(log_probs, advantages, mask)
    chosen = (covariance > cov_low) & (covariance < cov_high) & mask
    if skip is not None:
        chosen &= ~skip
    return first(chosen, order, max(int(ratio * int(mask.sum())), 1))


class ClipCov(ClippedAlgorithm):
    """Covariance-clipped policy optimisation."""

    class Config(ClippedConfig):
        """Settings of Clip-Cov."""

        ratio: float = Field(default=2e-4, gt=0, le=1)
        """Share of the tokens that get no gradient; at least one token."""
        cov_low: float = 1.0
        """Covariance above which a token may be chosen."""
        cov_high: float = 5.0
        """Covariance below which a token may be chosen."""
        eps: float = Field(default=1e-6, ge=0)
        """Added to the group's standard deviation."""

    config: Config

    @property
    def needs(self) -> Needs:
        """Two samples a prompt, and log-probs before the update."""
        return dataclasses.replace(super().needs, min_group_size=2, old_log_probs=True)

    def advantage(self, batch: Batch) -> Batch:
        """As in GRPO."""
        rewards = F.outcomes(batch)
        return F.with_advantages(batch, F.group_center(rewards, batch.group_ids, F.trained(batch), std=True, eps=self.config.eps))

    def prepare(self, batch: Batch) -> Batch:
        """Choose the tokens without gradient in the whole mini-batch."""
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        c, order = self.config, random_order(batch.sample_ids, batch.tokens.shape[1], self.step)
        old, advantages, mask = batch.old_log_probs, batch.advantages, batch.loss_mask
        chosen = clip_cov_tokens(old, advantages, mask, order, ratio=c.ratio, cov_low=c.cov_low, cov_high=c.cov_high)
        return batch.with_extras(clip_cov=chosen)

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """The clipped loss, without the chosen tokens; they still count in the denominator."""
        out, chosen = super().loss(outputs, batch), batch.extras["clip_cov"]
        return LossOutput(torch.where(chosen, 0, out.loss), out.stats | {"clip_cov_fraction": chosen.float()}, out.maxima)

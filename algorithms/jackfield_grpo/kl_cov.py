"""KL-Cov: Cui et al., The entropy mechanism of reinforcement learning, arXiv 2505.22617.

    cov[t] = (log pi[t] - mean log pi) (A[t] - mean A), means over all tokens of the mini-batch
    loss = token-mean of -A r, plus beta |log r| on the share `ratio` of tokens with the largest covariance

with r = pi / pi_old and no clip. A as in GRPO. The penalty is on moving away from pi_old, so it acts only where a batch takes several
optimizer steps (`mini_batches`, `epochs`). Departures: the covariance is taken once, from the log-probs before the update and over the
whole mini-batch, so that micro-batches cannot change it; the paper's code takes it by micro-batch from the running policy.
"""

from __future__ import annotations

import dataclasses

import torch
from pydantic import Field
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, LossOutput, Needs, Outputs
from jackfield_estimators import GroupAlgorithm, GroupConfig
from jackfield_grpo.covariance import random_order, token_covariance


def kl_cov_tokens(log_probs: Tensor, advantages: Tensor, mask: Tensor, *, ratio: float, order: Tensor | None = None) -> Tensor:
    """bool [B, T]: the max(1, ratio * tokens) tokens of largest covariance; equal ones by `order`."""
    covariance = token_covariance(log_probs, advantages, mask).flatten()
    places = mask.flatten().nonzero().squeeze(-1)
    if order is not None:
        places = places[order.flatten()[places].argsort()]
    largest = covariance[places].argsort(descending=True, stable=True)[: max(int(ratio * len(places)), 1)]
    result = torch.zeros_like(mask)
    result.view(-1)[places[largest]] = True
    return result


def kl_cov_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, chosen: Tensor, *, beta: float) -> Tensor:
    """-A r by token, plus beta |log r| where `chosen`; [B, T]."""
    log_ratio = F.log_ratio(log_probs, old_log_probs)
    return -advantages * log_ratio.exp() + torch.where(chosen, beta * log_ratio.abs(), 0)


class KLCov(GroupAlgorithm):
    """Covariance-penalised policy optimisation."""

    class Config(GroupConfig):
        """Settings of KL-Cov."""

        ratio: float = Field(default=2e-3, gt=0, le=1)
        """Share of the tokens that is penalised; at least one token. The paper: 2e-3 for 7B, 2e-4 for 32B."""
        beta: float = Field(default=1.0, ge=0)
        """Coefficient of the penalty."""

    config: Config

    @property
    def needs(self) -> Needs:
        """Two samples a prompt, and log-probs before the update."""
        return dataclasses.replace(super().needs, old_log_probs=True)

    def prepare(self, batch: Batch) -> Batch:
        """Choose the tokens to penalise in the whole mini-batch."""
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        order = random_order(batch.sample_ids, batch.tokens.shape[1], self.step)
        chosen = kl_cov_tokens(batch.old_log_probs, batch.advantages, batch.loss_mask, ratio=self.config.ratio, order=order)
        return batch.with_extras(kl_cov=chosen)

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """The policy gradient with the penalty."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        loss = kl_cov_loss(outputs.log_probs, batch.old_log_probs, batch.advantages, batch.extras["kl_cov"], beta=self.config.beta)
        return LossOutput(loss, {"policy_kl": batch.old_log_probs - outputs.log_probs})

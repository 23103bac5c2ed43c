"""Optimal token baseline: arXiv 2602.07078.

    A[t] = G[t] - B[t],  B[t] = sum over the group of G[t] W[t] / sum of W[t],  G[t] = sum over k >= t of r[k]
    W[t] = sum over k <= t of (1 - 2 pi[k] + sum over the vocabulary of pi^2)

W is the squared norm of the score with respect to the logits, accumulated along the sample: B is the baseline of least variance at each
token. t counts the sample's trainable tokens, so that samples line up whatever tools said in between. Where only one sample of the
group is left, B is 0 (`zero_tail`). Departures: a group of equal rewards, or of one sample, has advantage exactly 0 (law 14).
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, Needs
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


def otb_advantages(
    returns: Tensor, log_probs: Tensor, sum_pi_squared: Tensor, mask: Tensor, group_ids: Tensor, *, zero_tail: bool = True
) -> Tensor:
    """`returns` less the optimal token baseline; all [B, T], 0 outside `mask`."""
    front = torch.arange(mask.shape[1], device=mask.device) < mask.sum(-1, keepdim=True)
    energy = F.moved(1 - 2 * log_probs.exp() + sum_pi_squared, mask, front).cumsum_(-1).masked_fill_(~front, 0)
    gains = F.moved(returns, mask, front)
    index, groups = F.group_index(group_ids)
    baseline = F.group_sum(gains * energy, index, groups) / F.group_sum(energy, index, groups).add_(1e-8)
    if zero_tail:
        baseline.masked_fill_(F.group_sum(front.int(), index, groups) < 2, 0)
    return F.moved(gains.sub_(baseline[index]), front, mask)


class OTB(ClippedAlgorithm):
    """Policy gradient with the optimal token baseline."""

    class Config(ClippedConfig):
        """Settings of the optimal token baseline."""

        zero_tail: bool = True
        """No baseline where only one sample of the group is that long; False: its own return, so the tail learns nothing."""

    config: Config

    @property
    def needs(self) -> Needs:
        """Two samples a prompt, and probabilities before the update."""
        return dataclasses.replace(super().needs, min_group_size=2, old_log_probs=True, sum_pi_squared=True)

    def advantage(self, batch: Batch) -> Batch:
        """Returns less the baseline at each token."""
        assert batch.old_log_probs is not None
        returns = F.discounted_returns(F.placed_rewards(batch), batch.loss_mask)
        squares = batch.extras["sum_pi_squared"]
        values = otb_advantages(returns, batch.old_log_probs, squares, batch.loss_mask, batch.group_ids, zero_tail=self.config.zero_tail)
        flat = F.group_stats(F.outcomes(batch), batch.group_ids, F.trained(batch)).flat
        return batch.replace(advantages=values.masked_fill_(flat[:, None], 0))

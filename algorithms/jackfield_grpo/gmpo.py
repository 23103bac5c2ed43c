"""GMPO, geometric-mean policy optimisation: Zhao et al., arXiv 2507.20673.

    loss = mean over samples of -A exp(mean over tokens of log r), log r at most clip_high where A > 0, at least -clip_low where A < 0

with r = pi / pi_old: the geometric mean of the tokens' ratios where GRPO has the arithmetic one. A as in GRPO (one a sample; where
tokens differ, their mean). Every token carries its sample's loss, so that the default reduction gives the paper's mean over samples.
Departures: weights that vary within a sample (off-policy correction) multiply the tokens' equal shares, so they act by their mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, LossOutput, Outputs
from jackfield.algorithm import Reduction
from jackfield.schedule import NonNegative
from jackfield_estimators import GroupAlgorithm, GroupConfig


def gmpo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """GMPO: each sample's loss on all its tokens, [B, T], and a float mask of the tokens whose log-ratio was clipped."""
    log_ratio = log_probs - old_log_probs
    bounded = log_ratio.clamp(-low, high)
    chosen = torch.where(advantages >= 0, torch.minimum(log_ratio, bounded), torch.maximum(log_ratio, bounded))
    ratio = F.sequence_mean(chosen, mask).clamp(max=F.LOG_RATIO_LIMIT).exp()
    loss = -F.sequence_mean(advantages, mask) * ratio
    return loss.expand_as(log_probs), (chosen != log_ratio).to(log_ratio.dtype)


class GMPO(GroupAlgorithm):
    """Geometric-mean policy optimisation."""

    class Config(GroupConfig):
        """Settings of GMPO."""

        reduction: Reduction = "seq-mean-token-mean"
        """How per-token losses become one number; this one gives the paper's mean over samples."""
        clip_low: NonNegative = 0.4
        """Smallest log-ratio of a token is -`clip_low`."""
        clip_high: NonNegative = 0.4
        """Largest log-ratio of a token."""

    config: Config

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """The geometric mean's loss."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        low, high = self.now(self.config.clip_low), self.now(self.config.clip_high)
        loss, clipped = gmpo_loss(outputs.log_probs, batch.old_log_probs, batch.advantages, batch.loss_mask, low=low, high=high)
        return LossOutput(loss, {"clip_fraction": clipped, "policy_kl": batch.old_log_probs - outputs.log_probs})

"""GSPO, group sequence policy optimisation: Zheng et al., arXiv 2507.18071.

    s[i] = (pi(y[i]) / pi_old(y[i]))^(1 / |y[i]|) = exp(mean over tokens of log(pi / pi_old))
    s[i, t] = sg(s[i]) pi[i, t] / sg(pi[i, t]): the value of s[i], the gradient through each token's own pi   (GSPO-token)
    loss = mean over samples of the mean over tokens of max(-A s[i, t], -A clip(s[i, t], 1 - low, 1 + high))

With one advantage a sample GSPO-token has GSPO's value and gradient. A as in GRPO. Departures: none; clip ratios are the paper's
(3e-4 and 4e-4: a mean over tokens moves far less than a token).
"""

from __future__ import annotations

from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, LossOutput, Outputs
from jackfield.algorithm import Reduction
from jackfield.schedule import NonNegative
from jackfield_estimators import GroupAlgorithm, GroupConfig


def gspo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, mask: Tensor, *, low: float, high: float
) -> tuple[Tensor, Tensor]:
    """GSPO-token by token, [B, T] each, and a float mask of where the clip counted."""
    sequence = F.sequence_mean(log_probs - old_log_probs, mask).clamp(max=F.LOG_RATIO_LIMIT)
    ratio = (log_probs - log_probs.detach() + sequence.detach()).exp()
    loss, clipped, _ = F.clipped_surrogate(ratio, advantages, low, high)
    return loss, clipped


class GSPO(GroupAlgorithm):
    """Group sequence policy optimisation."""

    class Config(GroupConfig):
        """Settings of GSPO."""

        reduction: Reduction = "seq-mean-token-mean"
        """How per-token losses become one number; the paper's mean over samples."""
        clip_low: NonNegative = 3e-4
        """The sequence's ratio earns nothing below 1 - `clip_low`."""
        clip_high: NonNegative = 4e-4
        """The sequence's ratio earns nothing above 1 + `clip_high`."""

    config: Config

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """The clipped loss of the sequence's ratio."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        low, high = self.now(self.config.clip_low), self.now(self.config.clip_high)
        loss, clipped = gspo_loss(outputs.log_probs, batch.old_log_probs, batch.advantages, batch.loss_mask, low=low, high=high)
        return LossOutput(loss, {"clip_fraction": clipped, "policy_kl": batch.old_log_probs - outputs.log_probs})

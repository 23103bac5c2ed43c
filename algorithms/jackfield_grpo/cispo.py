"""CISPO, clipped importance-sampling policy optimisation: MiniMax-M1, arXiv 2506.13585.

    loss = token-mean of -sg(clip(r, 1 - low, 1 + high)) A log pi,  r = pi / pi_old

The weight is clipped, not the update: every token keeps a gradient. A as in GRPO. Departures: the paper names no values beyond "a large
low"; here the weight has no lower bound and at most 5.
"""

from __future__ import annotations

from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, LossOutput, Outputs
from jackfield.schedule import NonNegative
from jackfield_estimators import GroupAlgorithm, GroupConfig


def cispo_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, low: float, high: float) -> tuple[Tensor, Tensor]:
    """CISPO by token, [B, T] each, and a float mask of where the weight was clipped."""
    ratio = F.log_ratio(log_probs, old_log_probs).exp().detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return -weight * advantages * log_probs, (weight != ratio).to(ratio.dtype)


class CISPO(GroupAlgorithm):
    """Clipped importance-sampling policy optimisation."""

    class Config(GroupConfig):
        """Settings of CISPO."""

        clip_low: NonNegative = 1.0
        """Smallest weight is 1 - `clip_low`; 1: no lower bound."""
        clip_high: NonNegative = 4.0
        """Largest weight is 1 + `clip_high`."""

    config: Config

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """REINFORCE with a clipped importance weight."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        low, high = self.now(self.config.clip_low), self.now(self.config.clip_high)
        loss, clipped = cispo_loss(outputs.log_probs, batch.old_log_probs, batch.advantages, low=low, high=high)
        return LossOutput(loss, {"clip_fraction": clipped, "policy_kl": batch.old_log_probs - outputs.log_probs})

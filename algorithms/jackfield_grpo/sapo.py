"""SAPO, soft adaptive policy optimisation: Gao et al., arXiv 2511.20347.

    loss = mean over samples of the mean over tokens of -f(r) A,  f(r) = sigmoid(tau (r - 1)) 4 / tau,  r = pi / pi_old

with tau = tau_pos where A > 0 and tau_neg elsewhere: a gate that fades smoothly where PPO's clip cuts off; at r = 1 its slope is 1.
A as in GRPO. Departures: none.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, LossOutput, Outputs
from jackfield.algorithm import Reduction
from jackfield_estimators import GroupAlgorithm, GroupConfig


def sapo_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, tau_pos: float, tau_neg: float) -> Tensor:
    """SAPO by token, [B, T]."""
    ratio = F.log_ratio(log_probs, old_log_probs).exp()
    tau = torch.where(advantages > 0, tau_pos, tau_neg)
    return -torch.sigmoid(tau * (ratio - 1)) * (4 / tau) * advantages


class SAPO(GroupAlgorithm):
    """Soft adaptive policy optimisation."""

    class Config(GroupConfig):
        """Settings of SAPO."""

        reduction: Reduction = "seq-mean-token-mean"
        """How per-token losses become one number; the paper's mean of each sample's mean."""
        tau_pos: float = Field(default=1.0, gt=0)
        """Temperature of the gate for tokens of positive advantage."""
        tau_neg: float = Field(default=1.05, gt=0)
        """Temperature of the gate for the others; larger fades sooner, which the paper found more stable."""

    config: Config

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """The gated loss."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        config = self.config
        loss = sapo_loss(outputs.log_probs, batch.old_log_probs, batch.advantages, tau_pos=config.tau_pos, tau_neg=config.tau_neg)
        return LossOutput(loss, {"policy_kl": batch.old_log_probs - outputs.log_probs})

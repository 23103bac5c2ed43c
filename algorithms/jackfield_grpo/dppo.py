"""DPPO, divergence proximal policy optimisation: arXiv 2602.04879.

    loss = token-mean of -sg(min(r, ratio_max)) A log pi, for the tokens inside the trust region,  r = pi / pi_old
    inside: A > 0: D <= clip_high or pi <= pi_old; otherwise: D <= clip_low or pi >= pi_old

with D the divergence between the two policies' Bernoulli distributions "this token or another": total variation |pi - pi_old|
(Binary-TV) or KL (Binary-KL). Where PPO's ratio lets rare tokens move almost nothing and common ones a lot, D weighs
them by their mass. A as in GRPO. Departures: pi_old is the policy that sampled, as in the paper: `old_log_probs` defaults to `rollout`.
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, LossOutput, Outputs
from jackfield.schedule import NonNegative
from jackfield_estimators import GroupAlgorithm, GroupConfig


def dppo_loss(
    log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, low: float, high: float, ratio_max: float, divergence: str = "tv"
) -> tuple[Tensor, Tensor]:
    """DPPO by token, [B, T] each, and a float mask of the tokens outside the trust region."""
    p, q = log_probs.detach().exp(), old_log_probs.exp()
    if divergence == "tv":
        distance = (p - q).abs()
    else:
        rest = torch.log((1 - q + 1e-8).clamp(min=1e-8) / (1 - p + 1e-8).clamp(min=1e-8))
        distance = q * (old_log_probs - log_probs.detach()) + (1 - q) * rest
    inside = torch.where(advantages > 0, (distance <= high) | (p <= q), (distance <= low) | (p >= q))
    weight = F.log_ratio(log_probs.detach(), old_log_probs).exp().clamp(max=ratio_max)
    return torch.where(inside, -weight * advantages * log_probs, 0), (~inside).to(p.dtype)


class DPPO(GroupAlgorithm):
    """Divergence proximal policy optimisation."""

    class Config(GroupConfig):
        """Settings of DPPO."""

        old_log_probs: Literal["auto", "recompute", "rollout"] = "rollout"
        """Whose log-probs are the centre of the trust region: by default the engine's own."""
        divergence: Literal["tv", "kl"] = "tv"
        """Measure of the distance: total variation, or KL."""
        clip_low: NonNegative = 0.2
        """Divergence beyond which a token of negative advantage gets no gradient; for `kl` 0.05 is a usual value."""
        clip_high: NonNegative = 0.2
        """Divergence beyond which a token of positive advantage gets no gradient."""
        ratio_max: float = Field(default=20.0, gt=1)
        """Largest importance weight."""

    config: Config

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """REINFORCE with a truncated weight, inside the trust region."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        bounds = {"low": self.now(self.config.clip_low), "high": self.now(self.config.clip_high), "ratio_max": self.config.ratio_max}
        loss, outside = dppo_loss(outputs.log_probs, batch.old_log_probs, batch.advantages, divergence=self.config.divergence, **bounds)
        return LossOutput(loss, {"clip_fraction": outside, "policy_kl": batch.old_log_probs - outputs.log_probs})

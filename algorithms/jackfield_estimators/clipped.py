"""PPO's clipped surrogate, and the base of the algorithms that train on it."""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from jackfield.algorithm import Algorithm, AlgorithmConfig, LossOutput
from jackfield.batch import Batch
from jackfield.components import ComponentConfig, Outputs
from jackfield.functional import log_ratio
from jackfield.schedule import NonNegative


def clipped_surrogate(
    ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """PPO's loss by token, arXiv 1707.06347 eq. 7: max(-A r, -A clip(r, 1 - low, 1 + high)); where A < 0 at most -A * dual
    (dual-clip PPO, arXiv 1912.09729). Also two float masks: where the clip made the loss larger, where the dual clip made it smaller."""
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    bounded = torch.zeros_like(loss)
    if dual is not None:
        bounded = ((advantages < 0) & (loss > -advantages * dual)).to(loss.dtype)
        loss = torch.where(advantages < 0, torch.minimum(loss, -advantages * dual), loss)
    return loss, (clipped > plain).to(loss.dtype), bounded


class ClippedConfig(AlgorithmConfig):
    """Settings of algorithms whose loss is PPO's clipped surrogate."""

    clip_low: NonNegative = 0.2
    """The ratio pi / pi_old earns nothing below 1 - `clip_low`."""
    clip_high: NonNegative = 0.2
    """The ratio pi / pi_old earns nothing above 1 + `clip_high`."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Most that a token of negative advantage may count, as a factor on it (dual-clip PPO); None: no bound."""


class ClippedAlgorithm(Algorithm):
    """Base of algorithms that differ in their advantage only: the loss is the clipped surrogate (`clipped_surrogate`)."""

    Config: type[ComponentConfig] = ClippedConfig

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """PPO's clipped loss; on the policy itself, where the ratio is 1, the plain policy gradient."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        ratio_log = log_ratio(outputs.log_probs, batch.old_log_probs)
        low, high, dual = self.now(self.config.clip_low), self.now(self.config.clip_high), self.config.dual_clip
        loss, clipped, bounded = clipped_surrogate(ratio_log.exp(), batch.advantages, low, high, dual)
        stats = {"clip_fraction": clipped, "policy_kl": -ratio_log}
        return LossOutput(loss, stats if dual is None else stats | {"dual_clip_fraction": bounded})

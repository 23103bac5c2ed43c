"""DRO, direct reward optimisation as a policy gradient: Richemond et al., arXiv 2405.19107; Kimi k1.5, arXiv 2501.12599.

    loss = token-mean of -(A log pi - beta / 2 (log pi - log pi_old)^2)

The gradient of a squared error between reward and log-ratio: no clip and no importance weight, so it is sound off-policy too.
A = r - mean(r) over the group, in the place of a learned value. Departures: by token with one advantage a sample, where DRO squares
the whole sequence's log-ratio.
"""

from __future__ import annotations

from pydantic import Field
from torch import Tensor

from jackfield import Batch, LossOutput, Outputs
from jackfield_estimators import GroupAlgorithm, GroupConfig


def dro_loss(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor, *, beta: float) -> Tensor:
    """DRO by token, [B, T]."""
    return -(advantages * log_probs - beta / 2 * (log_probs - old_log_probs).square())


class DRO(GroupAlgorithm):
    """Direct reward optimisation."""

    class Config(GroupConfig):
        """Settings of DRO."""

        std: bool = False
        """Divide by the group's standard deviation."""
        beta: float = Field(default=0.1, gt=0)
        """Coefficient of the squared log-ratio."""

    config: Config

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """The policy gradient with a quadratic pull towards the old policy."""
        assert outputs.log_probs is not None
        assert batch.old_log_probs is not None
        assert batch.advantages is not None
        loss = dro_loss(outputs.log_probs, batch.old_log_probs, batch.advantages, beta=self.config.beta)
        return LossOutput(loss, {"policy_kl": batch.old_log_probs - outputs.log_probs})

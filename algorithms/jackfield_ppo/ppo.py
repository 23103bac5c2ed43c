"""PPO, proximal policy optimisation with a learned critic: Schulman et al., arXiv 1707.06347.

    A[t] = sum_k (gamma lam)^(k-t) delta[k],  delta[t] = r[t] + gamma V[t+1] - V[t]      (GAE, arXiv 1506.02438)
    policy: max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)),  r = pi / pi_old        (eq. 7)
    critic: max((V - R)^2, (clip(V, V_old +- value_clip) - R)^2) / 2,  R = A + V_old

The reward stands on the last trainable token, the KL penalty (`kl.place: reward`) on every token. Departures: `lam` is 1, where papers on
control have 0.95: the one reward stands at the end of the answer, and a smaller lam takes it to the early tokens through the critic alone,
which starts from nothing and is wrong for long; advantages are whitened over the batch, as every implementation for language models
does and the paper does not (`whiten`); clip ratios may differ below and above (DAPO); the critic is a model of its own, so there is no
value coefficient: `critic.optimizer` sets its rate, by default the policy's.

Whitened advantages do not fade as the policy gets better, so what the critic leaves unexplained keeps its full size, and Adam's steps
with it: PPO wants a lower learning rate than the algorithms whose advantage is 0 where a group's rewards are equal.
"""

from __future__ import annotations

import dataclasses

from pydantic import Field

import jackfield_estimators as F
from jackfield import Batch, LossOutput, Needs, Outputs
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


class PPO(ClippedAlgorithm):
    """Proximal policy optimisation."""

    class Config(ClippedConfig):
        """Settings of PPO."""

        gamma: float = Field(default=1.0, ge=0, le=1)
        """Discount by token."""
        lam: float = Field(default=1.0, ge=0, le=1)
        """lambda of generalised advantage estimation: 0 trusts the critic, 1 the return."""
        whiten: bool = True
        """Give the advantages mean 0 and variance 1 over the batch's tokens."""
        value_clip: float | None = Field(default=0.2, gt=0)
        """Most that a value may move from its old one and still lower the critic's loss; None: no clip."""

    config: Config

    @property
    def needs(self) -> Needs:
        """A critic."""
        return dataclasses.replace(super().needs, values=True)

    def advantage(self, batch: Batch) -> Batch:
        """Generalised advantage estimates; the critic's targets are theirs before whitening."""
        assert batch.critic_values is not None
        mask, config = batch.loss_mask, self.config
        advantages, returns = F.gae(F.placed_rewards(batch), batch.critic_values, mask, gamma=config.gamma, lam=config.lam)
        if config.whiten:
            advantages = F.masked_whiten(advantages, mask)
        return batch.replace(advantages=advantages, returns=returns)

    def critic_loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """Clipped squared error."""
        assert outputs.values is not None
        assert batch.critic_values is not None
        assert batch.returns is not None
        loss, clipped = F.clipped_value_loss(outputs.values, batch.critic_values, batch.returns, self.config.value_clip)
        error = (outputs.values - batch.returns).square()
        return LossOutput(loss, {"error": error, "value": outputs.values, "return": batch.returns, "clip_fraction": clipped})

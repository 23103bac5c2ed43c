"""REINFORCE++: Hu et al., arXiv 2501.03262.

    G[t] = sum over k >= t of gamma^(k - t) (reward at the last token - beta KL[k]); A = (G - mean) / std over all tokens of the batch
    loss = token-mean of PPO's clipped loss

No critic and no groups: one sample a prompt will do. Departures: KL is in the reward by k1, as in the paper, once `kl.coef` is set.

The one baseline for all prompts costs variance: answers to a solved prompt are all above the mean and those to a hard one all below it,
and neither fades. It wants a lower learning rate, more prompts a step and something that keeps the policy open (an entropy bonus or
KL) where prompts differ in difficulty; `reinforce_pp_baseline` takes the group's mean instead.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

import jackfield_estimators as F
from jackfield import Batch
from jackfield.algorithm import KLConfig
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


class KLInReward(KLConfig):
    """KL settings with REINFORCE++'s defaults."""

    place: Literal["loss", "reward"] = "reward"
    """Add it to the per-token loss, or subtract it from the reward of each token."""
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "unbiased"] = "k1"
    """Estimator of the KL (docs/algorithms/kl.md)."""


class ReinforcePP(ClippedAlgorithm):
    """REINFORCE with PPO's tricks and no critic."""

    class Config(ClippedConfig):
        """Settings of REINFORCE++."""

        kl: KLInReward = KLInReward()
        """Penalty against the reference policy; in the reward by default."""
        gamma: float = Field(default=1.0, ge=0, le=1)
        """Discount by token."""

    config: Config

    def advantage(self, batch: Batch) -> Batch:
        """Whitened returns."""
        returns = F.discounted_returns(F.placed_rewards(batch), batch.loss_mask, gamma=self.config.gamma)
        return batch.replace(advantages=F.masked_whiten(returns, batch.loss_mask))

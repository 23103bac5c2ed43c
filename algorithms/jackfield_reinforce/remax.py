"""ReMax, REINFORCE with a greedy baseline: Li et al., arXiv 2310.10505.

    A[t] = sum over k >= t of r[k] - reward of the greedy answer to the same prompt
    loss = mean over samples of the sum over tokens of -A log pi

The runner rolls out and scores one greedy answer a prompt. Departures: where a batch takes several optimizer steps, PPO's clipped ratio
stands in for log pi (its gradient is the same on the policy itself).
"""

from __future__ import annotations

import dataclasses

import jackfield_estimators as F
from jackfield import Batch, Needs
from jackfield.algorithm import Reduction
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


class ReMax(ClippedAlgorithm):
    """REINFORCE with a greedy baseline."""

    class Config(ClippedConfig):
        """Settings of ReMax."""

        reduction: Reduction = "seq-mean-token-sum"
        """How per-token losses become one number; the log-prob of a whole answer is the sum."""

    config: Config

    @property
    def needs(self) -> Needs:
        """A greedy answer a prompt."""
        return dataclasses.replace(super().needs, greedy_baseline=True)

    def advantage(self, batch: Batch) -> Batch:
        """Returns less the greedy reward."""
        mask = batch.loss_mask
        returns = F.discounted_returns(F.placed_rewards(batch), mask)
        return batch.replace(advantages=returns.sub_(F.spread(batch.extras["greedy_rewards"], mask)))

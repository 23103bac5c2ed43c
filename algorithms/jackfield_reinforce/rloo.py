"""RLOO, REINFORCE leave-one-out: Ahmadian et al., Back to basics, arXiv 2402.14740; Kool et al. 2019.

    A[i] = r[i] - mean of the other samples' rewards in the group = n / (n - 1) (r[i] - mean(r))
    loss = mean over samples of the sum over tokens of -A log pi: the whole answer is one action

Departures: where a batch takes several optimizer steps, PPO's clipped ratio stands in for log pi (its gradient is the same on the policy
itself); clip ratios as large as you like switch that off.
"""

from __future__ import annotations

import dataclasses

import jackfield_estimators as F
from jackfield import Batch, Needs
from jackfield.algorithm import Reduction
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


class RLOO(ClippedAlgorithm):
    """REINFORCE with the other samples' mean as the baseline."""

    class Config(ClippedConfig):
        """Settings of RLOO."""

        reduction: Reduction = "seq-mean-token-sum"
        """How per-token losses become one number; the log-prob of a whole answer is the sum."""

    config: Config

    @property
    def needs(self) -> Needs:
        """Two samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=2)

    def advantage(self, batch: Batch) -> Batch:
        """Rewards less the mean of the others'."""
        return F.with_advantages(batch, F.leave_one_out(F.outcomes(batch), batch.group_ids, F.trained(batch)))

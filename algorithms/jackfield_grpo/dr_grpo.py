"""Dr. GRPO, GRPO done right: Liu et al., arXiv 2503.20783.

    A[i] = r[i] - mean(r), over the group; loss = sum over tokens / (fixed_length * samples)

Neither the group's standard deviation (which favours prompts that are nearly solved or nearly hopeless) nor the sample's own length
(which favours long wrong answers) divides anything. Departures: none; `fixed_length` defaults to `sampling.max_new_tokens`, the paper's
generation budget.
"""

from __future__ import annotations

import dataclasses

import jackfield_estimators as F
from jackfield import Batch, Needs
from jackfield.algorithm import Reduction
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


class DrGRPO(ClippedAlgorithm):
    """GRPO without its two biases."""

    class Config(ClippedConfig):
        """Settings of Dr. GRPO."""

        reduction: Reduction = "seq-mean-token-sum-norm"
        """How per-token losses become one number; the sum over tokens by `fixed_length`."""

    config: Config

    @property
    def needs(self) -> Needs:
        """Two samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=2)

    def advantage(self, batch: Batch) -> Batch:
        """Rewards less the group's mean."""
        return F.with_advantages(batch, F.group_center(F.outcomes(batch), batch.group_ids, F.trained(batch)))

"""The advantage relative to the group's mean, and the base of the algorithms that share it and differ in their loss."""

from __future__ import annotations

import dataclasses

from pydantic import Field

from jackfield.algorithm import Algorithm, AlgorithmConfig, Needs
from jackfield.batch import Batch
from jackfield.components import ComponentConfig
from jackfield.functional import trained
from jackfield_estimators.groups import group_center
from jackfield_estimators.returns import outcomes, with_advantages


class GroupConfig(AlgorithmConfig):
    """Settings of algorithms whose advantage is GRPO's."""

    std: bool = True
    """Divide by the group's standard deviation."""
    eps: float = Field(default=1e-6, ge=0)
    """Added to the group's standard deviation."""


class GroupAlgorithm(Algorithm):
    """Base of algorithms that differ in their loss only: A = (r - mean(r)) / (std(r) + eps), over the samples of one prompt."""

    Config: type[ComponentConfig] = GroupConfig

    @property
    def needs(self) -> Needs:
        """Two samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=2)

    def advantage(self, batch: Batch) -> Batch:
        """Rewards relative to the group's."""
        values = group_center(outcomes(batch), batch.group_ids, trained(batch), std=self.config.std, eps=self.config.eps)
        return with_advantages(batch, values)

"""REINFORCE++ with a group baseline: Hu et al., arXiv 2501.03262.

    A = (r - mean of the group) on every token, then (A - mean) / std over all tokens of the batch; loss = token-mean of PPO's clipped loss

The group's mean reshapes the reward, the batch's deviation scales it: no prompt's own deviation divides. `kl` is in the loss by k2, as in
the paper, once `kl.coef` is set. Departures: the tokens of a group whose rewards are all equal count in mean and std, but keep advantage
exactly 0 (law 14), where the shift by the mean would give them all the same push.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jackfield_estimators as F
from jackfield import Batch, Needs
from jackfield.algorithm import KLConfig
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


class K2(KLConfig):
    """KL settings with the paper's estimator."""

    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "unbiased"] = "k2"
    """Estimator of the KL (docs/algorithms/kl.md)."""


class ReinforcePPBaseline(ClippedAlgorithm):
    """REINFORCE++ relative to the group's mean."""

    class Config(ClippedConfig):
        """Settings of REINFORCE++ with a baseline."""

        kl: K2 = K2()
        """Penalty against the reference policy."""

    config: Config

    @property
    def needs(self) -> Needs:
        """Two samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=2)

    def advantage(self, batch: Batch) -> Batch:
        """Group-centred rewards, whitened over the batch's tokens."""
        rewards, valid, mask = F.outcomes(batch), F.trained(batch), batch.loss_mask
        stats = F.group_stats(rewards, batch.group_ids, valid)
        centered = F.spread(F.group_center(rewards, batch.group_ids, valid), mask)
        return batch.replace(advantages=F.masked_whiten(centered, mask).masked_fill_(stats.flat[:, None], 0))

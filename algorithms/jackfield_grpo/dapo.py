"""DAPO, decoupled clip and dynamic sampling policy optimisation: Yu et al., arXiv 2503.14476.

    loss = token-mean of max(-A r, -A clip(r, 1 - 0.2, 1 + 0.28)), A as in GRPO          (clip-higher, token-level loss)
    groups whose task rewards are all equal are dropped and others drawn in their place         (dynamic sampling)
    reward += 0 while length <= L - C; (L - C - length) / C up to L; -1 beyond                  (soft overlong punishment, eq. 13)

with L = `max_length` and C = `overlong_buffer`. Departures: whether a group is dropped is decided on the rewards as the tasks gave them,
before the overlong punishment, or on one named score (`filter_on`), since a shaped reward always varies.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from pydantic import Field

import jackfield_estimators as F
from jackfield import Batch, Needs, hookimpl
from jackfield.errors import ConfigError
from jackfield.schedule import NonNegative
from jackfield_estimators import ClippedAlgorithm, ClippedConfig


def overlong_penalty(lengths: torch.Tensor, max_length: int, buffer: int) -> torch.Tensor:
    """Soft overlong punishment, eq. 13: 0 up to `max_length - buffer` tokens, falling linearly to -1 at `max_length`. `lengths`: [B]."""
    return ((max_length - buffer - lengths) / buffer).clamp(-1, 0)


class DAPO(ClippedAlgorithm):
    """Decoupled clip and dynamic sampling policy optimisation."""

    class Config(ClippedConfig):
        """Settings of DAPO."""

        clip_high: NonNegative = 0.28
        """The ratio pi / pi_old earns nothing above 1 + `clip_high`."""
        eps: float = Field(default=1e-6, ge=0)
        """Added to the group's standard deviation."""
        dynamic_sampling: bool = True
        """Drop groups whose task rewards are all equal; the runner draws more prompts (`batch.max_draws`)."""
        filter_on: str | None = None
        """Name of the score that decides whether a group is dropped; None: the weighted sum of all scores."""
        overlong_buffer: int = Field(default=0, ge=0)
        """Tokens before `max_length` in which the punishment grows (C); 0: no punishment. The paper: 4,096 of 20,480."""
        overlong_factor: float = Field(default=1.0, ge=0)
        """Largest punishment, in units of reward."""
        max_length: int | None = Field(default=None, gt=0)
        """Response length from which the punishment is whole (L), in tokens; None: `sampling.max_new_tokens`."""

    config: Config
    max_length: int | None = None

    @property
    def needs(self) -> Needs:
        """Two samples a prompt."""
        return dataclasses.replace(super().needs, min_group_size=2)

    @hookimpl
    def configure(self, run: Any) -> None:
        """Take the longest response from the run; check that the score to filter on exists."""
        self.max_length = self.config.max_length or run.config.sampling.max_new_tokens
        if self.config.overlong_buffer > self.max_length:
            raise ConfigError(f"dapo: overlong_buffer is {self.config.overlong_buffer}, longer than a response ({self.max_length} tokens)")
        names = [spec.label or spec.name for spec in run.config.rewards]
        if self.config.filter_on is not None and self.config.filter_on not in names:
            raise ConfigError(f"dapo: filter_on is {self.config.filter_on!r}, but the rewards are {', '.join(names) or 'none'}")

    @hookimpl
    def filter(self, run: Any, batch: Batch) -> torch.Tensor | None:
        """Keep the groups from whose task rewards something can be learnt."""
        if not self.config.dynamic_sampling:
            return None
        assert batch.scores is not None
        values = batch.rewards if self.config.filter_on is None else batch.scores[self.config.filter_on]
        assert values is not None
        return ~F.group_stats(values, batch.group_ids, F.trained(batch)).flat

    def advantage(self, batch: Batch) -> Batch:
        """Punish length, then compare within groups."""
        rewards, longest = F.outcomes(batch), self.max_length or self.config.max_length
        if self.config.overlong_buffer and longest is not None:
            rewards = rewards + self.config.overlong_factor * overlong_penalty(batch.response_lengths, longest, self.config.overlong_buffer)
        return F.with_advantages(batch, F.group_center(rewards, batch.group_ids, F.trained(batch), std=True, eps=self.config.eps))

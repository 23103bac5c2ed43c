"""Numbers that change over a run: learning rate, clip ratio, KL coefficient."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from jackfield.components import ComponentConfig


class Ramp(ComponentConfig):
    """From `start` to `end` over `steps`, then `end`. Learning rates count optimizer steps, everything else training steps."""

    start: float = Field(allow_inf_nan=False)
    """Value at step 0."""
    end: float = Field(allow_inf_nan=False)
    """Value from step `steps` on."""
    steps: int = Field(gt=0)
    """Length of the ramp, in the unit of whatever it is a schedule of."""
    shape: Literal["linear", "cosine"] = "linear"
    """Path between the two."""


def _never_below_zero(ramp: Ramp) -> Ramp:
    if min(ramp.start, ramp.end) < 0:
        raise ValueError("Ramp should not go below 0")
    return ramp


Schedule = Annotated[float, Field(allow_inf_nan=False)] | Ramp
"""A constant, or a ramp."""
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)] | Annotated[Ramp, AfterValidator(_never_below_zero)]
"""A schedule that never falls below 0: a learning rate, a clip ratio."""


def at(schedule: Schedule, step: int) -> float:
    """The schedule's value at `step`, counted from 0."""
    if not isinstance(schedule, Ramp):
        return float(schedule)
    done = min(max(step / schedule.steps, 0.0), 1.0)
    if schedule.shape == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return schedule.start + (schedule.end - schedule.start) * done

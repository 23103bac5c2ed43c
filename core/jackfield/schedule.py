"""Numbers that change over a run: learning rate, clip ratio, KL coefficient."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field

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


Schedule = Annotated[float, Field(allow_inf_nan=False)] | Ramp
"""A constant, or a ramp."""


def at(schedule: Schedule, step: int) -> float:
    """The schedule's value at `step`, counted from 0."""
    if not isinstance(schedule, Ramp):
        return float(schedule)
    done = min(max(step / schedule.steps, 0.0), 1.0)
    if schedule.shape == "cosine":
        done = (1 - math.cos(math.pi * done)) / 2
    return schedule.start + (schedule.end - schedule.start) * done

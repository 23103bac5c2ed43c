"""From float32 to bfloat16 with a threshold of each element's own, so that small steps show in the mean before they show in each weight.

Weights that come from a bfloat16 checkpoint lie on its grid. Rounded to the nearest, none of them moves until its master has gone half
way to the next grid point, which at reinforcement learning's rates takes several steps: the policy stands still, and then lags. Here
element i rounds up where its remainder reaches its threshold. The thresholds fill the interval evenly and never change, so the mean moves
with the masters from the first step on, nothing flickers, and the same masters always give the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PERIOD = 1 << 16
_STEP = 40503
"""Odd and next to 2^16 times the golden ratio: multiples of it modulo 2^16 visit every threshold, neighbours far apart."""
_ROWS = {"cpu": 4, "cuda": 128}
"""Periods worked on at a time: on a CPU as many as its cache holds."""


def on_grid(master: Tensor) -> bool:
    """Whether every value of a float32 tensor is a bfloat16 number."""
    return not bool((master.view(torch.int32) & (_PERIOD - 1)).any())


def dither(master: Tensor, out: Tensor) -> None:
    """Write contiguous float32 `master` into bfloat16 `out` of the same shape; values that are on the grid stay as they are."""
    thresholds = torch.arange(_PERIOD, dtype=torch.int32, device=master.device).mul_(_STEP).bitwise_and_(_PERIOD - 1)
    bits, target = master.view(-1).view(torch.int32), out.view(-1)
    size = _PERIOD * _ROWS.get(master.device.type, 128)
    rounded = torch.empty(min(size, len(bits)), dtype=torch.int32, device=master.device)
    for start in range(0, len(bits), size):
        part = bits[start : start + size]
        whole = len(part) // _PERIOD * _PERIOD
        for low, high, shape in ((0, whole, (-1, _PERIOD)), (whole, len(part), (1, -1))):
            if low < high:
                torch.add(part[low:high].view(shape), thresholds[: min(high - low, _PERIOD)], out=rounded[low:high].view(shape))
        done = rounded[: len(part)].bitwise_and_(-_PERIOD)
        target[start : start + len(part)].copy_(done.view(torch.float32))

"""Checksums that notice any changed, moved or missing element: a weighted sum of the bit patterns, modulo 2^64."""

from __future__ import annotations

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 24
_FACTOR = 0x9E3779B1
"""An odd constant (2^32 over the golden ratio), so that weights of neighbours differ in many bits and none is even."""


def bits(tensor: Tensor) -> Tensor:
    """The tensor's elements as integers of the same width, flattened; a copy only where it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])


def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor's values in order, independent of strides and storage."""
    flat = bits(tensor)
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), _CHUNK):
        part = flat[begin : begin + _CHUNK].to(torch.int64)
        weight = torch.arange(begin, begin + part.numel(), device=flat.device, dtype=torch.int64) * (2 * _FACTOR) + _FACTOR
        total += (part * weight).sum()
    return int(total)

"""Checksums that notice any changed, moved or missing element: a weighted sum of the bit patterns, modulo 2^64."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_CHUNK = 1 << 20
_FACTOR = 0x9E3779B1
"""An odd constant (2^32 over the golden ratio), so that weights of neighbours differ in many bits and none is even."""


@lru_cache(maxsize=4)
def _weights(device: torch.device) -> Tensor:
    """Weight of element i of a chunk: (2 i + 1) x factor."""
    return torch.arange(_CHUNK, device=device, dtype=torch.int64) * (2 * _FACTOR) + _FACTOR


def _signed(value: int) -> int:
    """A number modulo 2^64 as int64 holds it."""
    value %= 1 << 64
    return value - (1 << 64) if value >= 1 << 63 else value


def bits(tensor: Tensor) -> Tensor:
    """The tensor's elements as integers of the same width, flattened; a copy only where it is not contiguous."""
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])


def checksum(tensor: Tensor) -> int:
    """Checksum of a tensor's values in order, independent of strides and storage: sum of (2 i + 1) x factor x bits of element i."""
    flat = bits(tensor)
    weights, total = _weights(flat.device), torch.zeros((), dtype=torch.int64, device=flat.device)
    for begin in range(0, flat.numel(), _CHUNK):
        part = flat[begin : begin + _CHUNK].to(torch.int64)
        own = weights[: part.numel()]
        total += (part * own).sum() if part.is_cuda else torch.dot(part, own)
        if begin:
            total += part.sum() * _signed(begin * 2 * _FACTOR)
    return int(total)

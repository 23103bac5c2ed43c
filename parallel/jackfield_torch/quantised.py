"""Sums of gradients over ranks that travel in 8 bits: a quarter of float32's bytes, nothing remembered from step to step.

Each block of `BLOCK` values goes as integers in [-127, 127] and one float32 scale. As in ZeRO++ (Wang et al. 2023, arXiv:2306.10209, qgZ)
nothing is added in 8 bits: every rank sends each other one its part, which adds the parts in float32 and sends the sum round. So a value
is rounded twice, whatever the number of ranks, and all ranks decode the same bytes. Rounding is stochastic: a value below a step is right
in the mean. The nearest integer would always be 0, and a weight with small gradients, which Adam makes as large as others, would not move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 128
"""Values that share a scale: 132 bytes for 128 values."""
PIECE = 1 << 24
"""Most values that are encoded at once: what is needed in float32 while a large matrix is encoded is bounded by it."""


def encode(values: Tensor, noise: torch.Generator) -> Tensor:
    """Float32 values [rows, BLOCK] as int8 [rows, BLOCK + 4], the last four being the scale. A row that is not finite has such a scale."""
    # the largest value comes out just below 127, so that what is added to it cannot round up to 128
    scale = torch.linalg.vector_norm(values, torch.inf, dim=1, keepdim=True) * ((1 + 1e-6) / 127)
    steps = torch.rand(values.shape, generator=noise, device=values.device)
    steps.addcdiv_(values, scale.clamp(min=torch.finfo(torch.float32).tiny))
    coded = torch.empty(len(values), BLOCK + 4, dtype=torch.int8, device=values.device)
    coded[:, :BLOCK] = steps.floor_()
    coded.view(torch.float32)[:, BLOCK // 4 :] = scale
    return coded


def decode(coded: Tensor) -> Tensor:
    """Float32 values [rows, BLOCK] of what `encode` made."""
    return coded[:, :BLOCK] * coded.view(torch.float32)[:, BLOCK // 4 :]


@torch.no_grad()
def all_reduce(gradients: Sequence[Tensor], seed: int) -> None:
    """Replace float32 matrices by their sums over the default group, equal bit for bit on all ranks; collective.

    `seed`: of the rounding, another one for each step. A block that is not finite on some rank is not finite in the sum.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    pieces = [piece for gradient in gradients for piece in _pieces(gradient)]
    if not pieces:
        return
    noise = torch.Generator(pieces[0].device).manual_seed(seed * ranks + rank)
    parts = []
    for piece in pieces:
        flat, missing = piece.reshape(-1), -piece.numel() % (ranks * BLOCK)
        sent = encode((pad(flat, (0, missing)) if missing else flat).view(-1, BLOCK), noise)
        received = torch.empty_like(sent)
        parts.append((received, dist.all_to_all_single(received, sent, async_op=True)))
    sums = []
    for received, work in parts:
        work.wait()
        own = encode(decode(received).view(ranks, -1, BLOCK).sum(dim=0), noise)
        sums.append((received, dist.all_gather(list(received.chunk(ranks)), own, async_op=True)))
    for piece, (total, work) in zip(pieces, sums, strict=True):
        work.wait()
        piece.copy_(decode(total).flatten()[: piece.numel()].view_as(piece))


def _pieces(gradient: Tensor) -> Iterator[Tensor]:
    """Views of whole rows of at most PIECE values, or one row."""
    yield from gradient.split(max(1, PIECE // max(1, gradient[0].numel())))

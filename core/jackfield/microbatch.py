"""Splitting a batch over DP ranks and micro-batches: balanced, with the same number of micro-batches on every rank (law 20)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jackfield.batch import Batch


def plan(lengths: Sequence[int], ranks: int, budget: int, groups: Sequence[int] = ()) -> list[list[list[int]]]:
    """Sample indices by rank and micro-batch; every rank has the same number of micro-batches.

    Samples go to the rank with the fewest tokens so far, longest first; each rank fills micro-batches of at most `budget` tokens (a
    longer sample goes alone), group by group where `groups` gives each sample's, so that backends that run a shared prompt once have
    its samples together, and splits them where other ranks have more. An empty list is a filler micro-batch: a rank that has too few
    samples computes one without loss.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    heap = [(0, 0, rank) for rank in range(ranks)]
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for i in order:
        tokens, count, rank = heapq.heappop(heap)
        shares[rank].append(i)
        heapq.heappush(heap, (tokens + lengths[i], count + 1, rank))
    bins = [_first_fit(sorted(share, key=lambda i: groups[i] if groups else 0), lengths, budget) for share in shares]
    wanted = max(len(b) for b in bins)
    return [_split(b, lengths, wanted) for b in bins]


def _first_fit(share: list[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    bins: list[list[int]] = []
    room: list[int] = []
    for i in share:
        for k, free in enumerate(room):
            if lengths[i] <= free:
                bins[k].append(i)
                room[k] -= lengths[i]
                break
        else:
            bins.append([i])
            room.append(budget - lengths[i])
    return bins


def _split(bins: list[list[int]], lengths: Sequence[int], wanted: int) -> list[list[int]]:
    """Halves the largest of `bins`, which it may change, until there are as many as wanted or nothing is left to halve."""
    while len(bins) < wanted and any(len(b) > 1 for b in bins):
        largest = max(range(len(bins)), key=lambda k: (len(bins[k]) > 1, sum(lengths[i] for i in bins[k])))
        whole = bins.pop(largest)
        bins += [whole[::2], whole[1::2]]
    return [sorted(b) for b in bins] + [[] for _ in range(wanted - len(bins))]


@dataclass(frozen=True)
class Share:
    """One DP rank's samples, micro-batch after micro-batch: they travel in one piece and are cut where they are used."""

    batch: Batch
    """Its samples, or a batch that holds them among others."""
    sizes: list[int]
    """Samples of each micro-batch."""
    samples: Tensor | None = None
    """int64: which samples of `batch`. They are gathered as late as can be, straight into what carries them to another process."""


def share(batch: Batch, bins: list[list[int]]) -> Share:
    """The samples of one rank; a rank without any gets the shortest, for its fillers."""
    return Share(batch, [len(b) for b in bins], torch.tensor([i for b in bins for i in b] or [int(batch.lengths.argmin())]))


def cut(share: Share, device: torch.device) -> list[Batch]:
    """A share's micro-batches, clean, on a device: views of one storage."""
    batch = (share.batch if share.samples is None else share.batch[share.samples].trim()).clean().to(device)
    parts = batch.split([*share.sizes, len(batch) - sum(share.sizes)])[:-1]
    return [part.trim() if size else take(batch, []) for part, size in zip(parts, share.sizes, strict=True)]


def take(batch: Batch, indices: list[int]) -> Batch:
    """The micro-batch of these samples; for none, a filler: a real sample (so that every optional field is there) without loss."""
    if indices:
        return batch[torch.tensor(indices)].trim()
    filler = batch[torch.tensor([int(batch.lengths.argmin())])].trim()
    scale = None if filler.loss_scale is None else torch.zeros_like(filler.loss_scale)
    return filler.replace(loss_mask=torch.zeros_like(filler.loss_mask), loss_scale=scale)

"""Log-probs and entropy with the vocabulary split over tensor-parallel ranks, in memory that does not grow with tokens x vocabulary.

Logits exist for one chunk of positions at a time, in the forward pass and (computed again) in the backward pass; ranks exchange only
numbers per position.
N positions, V vocabulary, H hidden; each rank holds V / tp rows of the output weight, the last ones padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jackfield.components import OutputRequest
from jackfield_logits import truncate
from jackfield_logits.passes import concluded, scan, slopes


@dataclass(frozen=True)
class Vocabulary:
    """This rank's part of the vocabulary."""

    group: Any
    """Tensor-parallel process group."""
    first: int
    """Token id of the first local row."""
    real: int
    """Local rows that are tokens; the rest is padding and takes no part in the softmax (law 25)."""
    chunk: int
    """Positions whose logits exist at one time."""

    def all_reduce(self, x: Tensor, op: Any = dist.ReduceOp.SUM) -> Tensor:
        """In place over the ranks."""
        if self.group.size() > 1:
            dist.all_reduce(x, op=op, group=self.group)
        return x


def _logits(hidden: Tensor, weight: Tensor, labels: Tensor, request: OutputRequest, vocabulary: Vocabulary) -> tuple[Tensor, float]:
    """Logits [n, V / tp] and what they are still to be multiplied by. Top-k and top-p are decided over the whole vocabulary."""
    logits = hidden @ weight.t()
    scale = 1 / request.temperature
    if request.top_p >= 1 and not request.top_k:
        return logits, scale
    scores = logits.float() * scale
    scores[:, vocabulary.real :] = -torch.inf
    size, width = vocabulary.group.size(), scores.shape[1]
    if size == 1:
        return truncate(scores, request.top_p, request.top_k, labels), 1.0
    parts = [torch.empty_like(scores) for _ in range(size)]
    dist.all_gather(parts, scores, group=vocabulary.group)
    # all ranks but the last are full, so that a label's id is its column
    whole = truncate(torch.cat(parts, dim=1), request.top_p, request.top_k, labels)
    first = vocabulary.group.rank() * width
    return whole[:, first : first + width], 1.0


def _combine(scanned: Tensor, mine: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Over the ranks: (log-prob, entropy, sum p^2) [3, n] and the log of the normaliser [n]."""
    top, total, at, weighted, squares = scanned
    best = vocabulary.all_reduce(top.clone(), dist.ReduceOp.MAX)
    shrink = (top - best).exp()
    sums = torch.stack((total * shrink, torch.where(mine, at, 0), weighted * shrink, squares * shrink.square()))
    return concluded(torch.cat((best[None], vocabulary.all_reduce(sums))))


class _Statistics(torch.autograd.Function):
    """Saves no logits. The gradient of `hidden` is this rank's part; whoever calls sums it over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, request: OutputRequest, vocabulary: Vocabulary) -> Any:
        results = hidden.new_zeros(3, len(hidden), dtype=torch.float32)
        normalisers = torch.zeros_like(results[0])
        more = request.entropy or request.sum_pi_squared
        for start in range(0, len(hidden), vocabulary.chunk):
            rows = slice(start, start + vocabulary.chunk)
            local, mine = _local(labels[rows], vocabulary)
            logits, scale = _logits(hidden[rows], weight, labels[rows], request, vocabulary)
            results[:, rows], normalisers[rows] = _combine(scan(logits, local, scale, vocabulary.real, more), mine, vocabulary)
        ctx.save_for_backward(hidden, weight, labels, normalisers, results)
        ctx.request, ctx.vocabulary = request, vocabulary
        return tuple(results.clone())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """Logits again, chunk by chunk; nothing is communicated, as the normalisers are kept."""
        hidden, weight, labels, normalisers, results = ctx.saved_tensors
        request, vocabulary = ctx.request, ctx.vocabulary
        more = request.entropy or request.sum_pi_squared
        wanted = torch.tensor([1.0, request.entropy, request.sum_pi_squared], device=hidden.device)[:, None]
        numbers = torch.cat((normalisers[None], results[1:], torch.stack(grads) * wanted))
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), vocabulary.chunk):
            rows = slice(start, start + vocabulary.chunk)
            local, mine = _local(labels[rows], vocabulary)
            logits, scale = _logits(hidden[rows], weight, labels[rows], request, vocabulary)
            local, now = torch.where(mine, local, -1), numbers[:, rows].contiguous()
            grad = slopes(logits, local, now, scale, vocabulary.real, 1 / request.temperature, more, hidden.dtype)
            del logits
            torch.mm(grad, weight, out=grad_hidden[rows])
            if hidden.dtype == torch.float32:
                grad_weight.addmm_(grad.t(), hidden[rows])
            else:
                grad_weight += grad.t() @ hidden[rows]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _local(labels: Tensor, vocabulary: Vocabulary) -> tuple[Tensor, Tensor]:
    """Local row of each label (0 where another rank holds it) and whether it is here."""
    local = labels - vocabulary.first
    mine = (local >= 0) & (local < vocabulary.real)
    return torch.where(mine, local, 0), mine


def statistics(hidden: Tensor, weight: Tensor, labels: Tensor, request: OutputRequest, vocabulary: Vocabulary) -> tuple[Tensor, ...]:
    """Log-prob of `labels` [N], entropy and sum of squared probabilities, float32 [N] each, the same on every rank of the group.

    `hidden` [N, H] is the same on every rank, `weight` [V / tp, H] its own rows.
    """
    return _Statistics.apply(hidden, weight, labels, request, vocabulary)

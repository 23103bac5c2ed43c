"""Log-probs and entropy with the vocabulary split over tensor-parallel ranks, in memory that does not grow with tokens x vocabulary.

Logits exist for one chunk of positions at a time, in the forward pass and (computed again) in the backward pass, in float32.
N positions, V vocabulary, H hidden; each rank holds V / tp rows of the output weight, the last ones padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jackfield.components import OutputRequest
from jackfield.logits import truncate


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


def _kept(scores: Tensor, labels: Tensor, request: OutputRequest, vocabulary: Vocabulary) -> Tensor:
    """`scores` [n, V / tp] with -inf on what top-k and top-p drop, decided over the whole vocabulary."""
    size, width = vocabulary.group.size(), scores.shape[1]
    if size == 1:
        return truncate(scores, request.top_p, request.top_k, labels)
    parts = [torch.empty_like(scores) for _ in range(size)]
    dist.all_gather(parts, scores.contiguous(), group=vocabulary.group)
    whole = truncate(torch.cat(parts, dim=1), request.top_p, request.top_k, labels)
    first = vocabulary.group.rank() * width
    return whole[:, first : first + width]


def _scores(hidden: Tensor, weight: Tensor, labels: Tensor, request: OutputRequest, vocabulary: Vocabulary) -> Tensor:
    scores = (hidden @ weight.t()).float()
    if request.temperature != 1:
        scores /= request.temperature
    if vocabulary.real < weight.shape[0]:
        scores[:, vocabulary.real :] = -torch.inf
    if request.top_p < 1 or request.top_k:
        scores = _kept(scores, labels, request, vocabulary)
    return scores


def _log_softmax(scores: Tensor, vocabulary: Vocabulary) -> Tensor:
    """Log-probabilities of the local tokens, normalised over all ranks."""
    if vocabulary.group.size() == 1:
        return scores.log_softmax(-1)
    top = vocabulary.all_reduce(scores.amax(-1, keepdim=True), dist.ReduceOp.MAX)
    scores = scores - top
    total = vocabulary.all_reduce(scores.exp().sum(-1, keepdim=True))
    return scores.sub_(total.log_())


class _Statistics(torch.autograd.Function):
    """Saves no logits. The gradient of `hidden` is this rank's part; whoever calls sums it over the ranks."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, request: OutputRequest, vocabulary: Vocabulary) -> Any:
        ctx.save_for_backward(hidden, weight, labels)
        ctx.request, ctx.vocabulary = request, vocabulary
        results = hidden.new_zeros(3, len(hidden), dtype=torch.float32)
        for start in range(0, len(hidden), vocabulary.chunk):
            rows = slice(start, start + vocabulary.chunk)
            log_pi = _log_softmax(_scores(hidden[rows], weight, labels[rows], request, vocabulary), vocabulary)
            local, mine = _local(labels[rows], vocabulary)
            results[0, rows] = torch.where(mine, log_pi.gather(-1, local[:, None])[:, 0], 0)
            if request.entropy or request.sum_pi_squared:
                pi = log_pi.exp()
                results[2, rows] = pi.square().sum(-1)
                results[1, rows] = pi.mul_(log_pi.clamp_(min=-1e30)).sum(-1).neg_()
        vocabulary.all_reduce(results)
        ctx.results = results.detach().clone() if request.entropy or request.sum_pi_squared else None
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """With p the probabilities: d log_prob = onehot - p, d entropy = -p (log p + entropy), d sum p^2 = 2 p (p - sum)."""
        hidden, weight, labels = ctx.saved_tensors
        request, vocabulary = ctx.request, ctx.vocabulary
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for start in range(0, len(hidden), vocabulary.chunk):
            rows = slice(start, start + vocabulary.chunk)
            grad_log_prob, grad_entropy, grad_squares = (g[rows, None] for g in grads)
            log_pi = _log_softmax(_scores(hidden[rows], weight, labels[rows], request, vocabulary), vocabulary)
            local, mine = _local(labels[rows], vocabulary)
            pi = log_pi.exp()
            slope = -grad_log_prob
            if request.entropy:
                slope = slope - grad_entropy * (log_pi.clamp_(min=-1e30) + ctx.results[1, rows, None])
            if request.sum_pi_squared:
                slope = slope + 2 * grad_squares * (pi - ctx.results[2, rows, None])
            grad = pi.mul_(slope).scatter_add_(-1, local[:, None], torch.where(mine[:, None], grad_log_prob, 0))
            if request.temperature != 1:
                grad /= request.temperature
            grad = grad.to(hidden.dtype)
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

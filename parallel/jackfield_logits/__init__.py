"""Log-probs, entropy and sum of squared probabilities of a sampling distribution, in memory that does not grow with tokens x vocabulary.

Logits are worked on in chunks of tokens, forward and backward (recomputed unless small), in float32 whatever their type.
N tokens, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jackfield.components import OutputRequest, Outputs
from jackfield_logits.passes import LOW, concluded, scan, slopes

_CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 256 << 20}
_FUSED = 4
"""Times as many tokens where a chunk is passed over once: nothing of it is then in memory but its logits and their gradients."""
_KEEP_BYTES = {"cpu": 512 << 20, "cuda": 1 << 30}
"""Log-probs of all the vocabulary are kept for backward up to this size, which saves one of four products with the head."""
_BLOCK_BYTES = {"cpu": 256 << 20}
"""Gradients of logits are gathered up to this size before they are multiplied: each product reads and writes the head's whole gradient,
which costs as much as the arithmetic of a chunk that suits a CPU's cache. Elsewhere chunk by chunk."""
_TOP = 256
"""Candidates in which the nucleus is looked for before all of the vocabulary is sorted."""


def truncate(scores: Tensor, top_p: float, top_k: int, keep: Tensor | None = None) -> Tensor:
    """`scores` (float32 [N, V], already divided by the temperature) with -inf outside top-k, then top-p of what top-k left.

    Tokens that tie with the last kept one are kept. `keep` int64 [N] names a token of each row that is kept in any case.
    """
    vocabulary = scores.shape[-1]
    if not 0 < top_k < vocabulary and top_p >= 1:
        return scores
    kept = None if keep is None else scores.gather(-1, keep[:, None])
    if 0 < top_k < vocabulary:
        best = scores.topk(top_k).values
        scores = scores.masked_fill(scores < best[:, -1:], -torch.inf)
    if top_p < 1:
        total = scores.logsumexp(-1, keepdim=True)
        if not 0 < top_k < vocabulary:
            best = scores.topk(min(_TOP, vocabulary)).values
        reached = (best - total).exp_().cumsum(-1)
        if bool((reached[:, -1] < top_p).any()) and best.shape[-1] < vocabulary:
            best = scores.sort(descending=True).values
            reached = (best - total).exp_().cumsum(-1)
        last = (reached < top_p).sum(-1, keepdim=True).clamp_(max=best.shape[-1] - 1)
        scores = scores.masked_fill(scores < best.gather(-1, last), -torch.inf)
    return scores if keep is None or kept is None else scores.scatter(-1, keep[:, None], kept)


def token_stats(logits: Tensor, labels: Tensor, request: OutputRequest) -> Outputs:
    """What `request` asks for, float32 [N] each, from `logits` [N, V] of any float type; `labels` int64 [N]."""
    return _outputs(request, logits, None, None, labels)


def log_probs_from_hidden(hidden: Tensor, weight: Tensor, labels: Tensor, request: OutputRequest, bias: Tensor | None = None) -> Outputs:
    """As `token_stats` for the logits `hidden @ weight.T + bias`, which are never all in memory.

    `hidden` [N, H], `weight` [V, H], `bias` [V]: differentiable, of one type; the products are taken in that type, all else in float32.
    """
    return _outputs(request, hidden, weight, bias, labels)


def _outputs(request: OutputRequest, *inputs: Tensor | None) -> Outputs:
    stats = _TokenStats.apply(*inputs, request)  # type: ignore[no-untyped-call]
    return Outputs(stats[0], stats[1] if request.entropy else None, stats[2] if request.sum_pi_squared else None)


def _chunks(tokens: int, vocabulary: int, device: torch.device, fused: bool) -> list[slice]:
    size = max(1, (_FUSED if fused else 1) * _CHUNK_BYTES.get(device.type, 256 << 20) // (4 * vocabulary))
    return [slice(i, min(i + size, tokens)) for i in range(0, tokens, size)]


def _blocks(tokens: int, vocabulary: int, x: Tensor, fused: bool) -> list[list[slice]]:
    """Chunks whose gradients are multiplied together."""
    chunks = _chunks(tokens, vocabulary, x.device, fused)
    size = max(1, _BLOCK_BYTES.get(x.device.type, 0) // (x.element_size() * vocabulary * (chunks[0].stop if chunks else 1)))
    return [chunks[i : i + size] for i in range(0, len(chunks), size)]


def _fused(x: Tensor, request: OutputRequest) -> bool:
    """Whether a chunk of logits is passed over once: on a GPU, where the whole vocabulary takes part."""
    return x.is_cuda and request.top_p >= 1 and not request.top_k


def _logits(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return x if weight is None else torch.nn.functional.linear(x, weight, bias)


class _TokenStats(torch.autograd.Function):
    """`x` is logits where `weight` is None, else hidden states. Beyond `_KEEP_BYTES` nothing of size [N, V] is saved."""

    @staticmethod
    def scores(logits: Tensor, labels: Tensor, request: OutputRequest) -> Tensor:
        scores = logits.float()
        if request.temperature != 1:
            scores = scores / request.temperature
        return truncate(scores, request.top_p, request.top_k, labels)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, labels: Tensor, request: OutputRequest) -> Any:
        ctx.request = request
        vocabulary = x.shape[-1] if weight is None else weight.shape[0]
        fused, more = _fused(x, request), request.entropy or request.sum_pi_squared
        keep = not fused and len(x) * vocabulary * 4 <= _KEEP_BYTES.get(x.device.type, 0) and any(ctx.needs_input_grad)
        ctx.kept = {}
        log_probs, entropy, squares, normaliser = x.new_zeros(4, len(x), dtype=torch.float32).unbind()
        for rows in _chunks(len(x), vocabulary, x.device, fused):
            logits = _logits(x[rows], weight, bias)
            if fused:
                found, normaliser[rows] = concluded(scan(logits, labels[rows], 1 / request.temperature, vocabulary, more))
                log_probs[rows], entropy[rows], squares[rows] = found
                continue
            log_pi = _TokenStats.scores(logits, labels[rows], request).log_softmax(-1)
            log_probs[rows] = log_pi.gather(-1, labels[rows, None])[:, 0]
            if keep:
                ctx.kept[rows.start] = log_pi
            if more:
                pi = log_pi.exp()
                squares[rows] = pi.square().sum(-1)
                entropy[rows] = pi.mul_(log_pi.clamp(min=LOW)).sum(-1).neg_()
        ctx.save_for_backward(x, weight, bias, labels, *((normaliser, entropy.clone(), squares.clone()) if fused else ()))
        return log_probs, entropy, squares

    @staticmethod
    def gradient(log_pi: Tensor, labels: Tensor, grads: Sequence[Tensor], request: OutputRequest) -> Tensor:
        """The gradient of the logits in float32, in the memory of `log_pi` where nothing else needs that."""
        grad_log_prob, grad_entropy, grad_squares = grads
        pi = log_pi.exp() if request.entropy else log_pi.exp_()
        slope = -grad_log_prob
        if request.entropy:
            log_pi = log_pi.clamp(min=LOW)
            slope = slope - grad_entropy * (log_pi - (pi * log_pi).sum(-1, keepdim=True))
        if request.sum_pi_squared:
            slope = slope + 2 * grad_squares * (pi - pi.square().sum(-1, keepdim=True))
        grad = pi.mul_(slope).scatter_add_(-1, labels[:, None], grad_log_prob)
        return grad.div_(request.temperature) if request.temperature != 1 else grad

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        """With p the probabilities: d log_prob = onehot - p, d entropy = -p (log p + entropy), d sum = 2 p (p - sum)."""
        x, weight, bias, labels, *fused = ctx.saved_tensors
        request: OutputRequest = ctx.request
        need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_x = torch.empty_like(x) if need_x else None
        vocabulary = x.shape[-1] if weight is None else weight.shape[0]
        blocks = _blocks(len(x), vocabulary, x, bool(fused))
        # one block of a narrow type is its own sum: no float32 gradient of the head is filled, added to and narrowed
        alone = need_weight and len(blocks) == 1 and x.dtype != torch.float32
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight and not alone else None
        grad_bias = torch.zeros_like(bias, dtype=torch.float32) if need_bias else None
        numbers = torch.stack((*fused, *grads)) if fused else None
        for block in blocks:
            start, stop = block[0].start, block[-1].stop
            whole = x.new_empty(stop - start, vocabulary) if len(block) > 1 else None
            for rows in block:
                log_pi = ctx.kept.pop(rows.start, None)
                logits = None if log_pi is not None else _logits(x[rows], weight, bias)
                if numbers is not None:
                    more, factor = request.entropy or request.sum_pi_squared, 1 / request.temperature
                    now = numbers[:, rows].contiguous()
                    grad = slopes(logits, labels[rows], now, factor, vocabulary, factor, more, x.dtype)
                else:
                    if log_pi is None:
                        log_pi = _TokenStats.scores(logits, labels[rows], request).log_softmax(-1)
                    grad = _TokenStats.gradient(log_pi, labels[rows], [g[rows, None] for g in grads], request)
                if whole is None:
                    grad = grad.to(x.dtype)
                else:
                    whole[rows.start - start : rows.stop - start].copy_(grad)
            rows, grad = slice(start, stop), grad if whole is None else whole
            if grad_bias is not None:
                grad_bias += grad.sum(0, dtype=torch.float32)
            if alone:
                grad_weight = grad.t() @ x[rows]
            elif grad_weight is not None:
                grad_weight.add_(grad.t() @ x[rows]) if x.dtype != torch.float32 else grad_weight.addmm_(grad.t(), x[rows])
            if grad_x is not None:
                torch.mm(grad, weight, out=grad_x[rows]) if weight is not None else grad_x[rows].copy_(grad)
        cast = [g if g is None else g.to(t.dtype) for g, t in ((grad_weight, weight), (grad_bias, bias))]
        return grad_x, *cast, None, None

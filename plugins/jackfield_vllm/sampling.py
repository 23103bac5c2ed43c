"""Sampling keyed by (sample's seed, position): one uniform number a token, whatever else is in the batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _splitmix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014, figure 17) over uint64."""
    x = (x ^ (x >> np.uint64(30))) * _MIX[0]
    x = (x ^ (x >> np.uint64(27))) * _MIX[1]
    return x ^ (x >> np.uint64(31))


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 [B] in [0, 1): a function of seed (uint64) and position (int64) alone, so that batching cannot change a sample."""
    with np.errstate(over="ignore"):
        mixed = _splitmix(_splitmix(seeds + _GOLDEN) + positions.astype(np.uint64) * _GOLDEN)
    return (mixed >> np.uint64(11)) * 2.0**-53


def choose(weights: Tensor, uniform: Tensor) -> Tensor:
    """Index i of each row with probability weights[i] / sum, by inversion of the cumulative sum.

    weights: float32 [B, V], not negative; uniform: float64 [B] in [0, 1). Sums run in float64 over blocks of the vocabulary, so the
    weights are read twice and no noise of their size is drawn. An index of weight 0 is never chosen. Returns int64 [B].
    """
    rows, vocab = weights.shape
    block = math.gcd(vocab, 1024)
    if block < 32:
        block = 256
        weights = torch.nn.functional.pad(weights, (0, -vocab % block))
    blocks = weights.view(rows, -1, block)
    sums = blocks.sum(-1, dtype=torch.float64).cumsum(-1)
    target = uniform[:, None] * sums[:, -1:]
    which = _first_above(sums, target)
    before = torch.where(which > 0, sums.gather(1, (which - 1).clamp(min=0)), 0.0)
    inner = blocks.gather(1, which[..., None].expand(-1, -1, block))[:, 0].cumsum(-1, dtype=torch.float64)
    return (which * block + _first_above(inner, target - before))[:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds `target`; rounding cannot push it past the last index of positive weight."""
    last = cumulative[:, -1:]
    below_last = torch.nextafter(last, torch.zeros_like(last))
    return torch.searchsorted(cumulative, torch.minimum(target, below_last), right=True)


def keep_top(scores: Tensor, top_k: Tensor | None, top_p: Tensor | None) -> Tensor:
    """Scores with -inf outside the top-k and top-p sets: sorted descending, a token is kept while the probability before it is below p.

    scores: float32 [B, V]; top_k: int [B] (V keeps all); top_p: float32 [B].
    """
    if top_k is None and top_p is None:
        return scores
    ordered, order = scores.sort(dim=-1, descending=True)
    drop = torch.zeros_like(ordered, dtype=torch.bool)
    if top_k is not None:
        drop = torch.arange(scores.shape[1], device=scores.device) >= top_k[:, None]
        ordered = ordered.masked_fill(drop, -torch.inf)
    if top_p is not None:
        probs = ordered.softmax(-1)
        drop = drop | (probs.cumsum(-1) - probs >= top_p[:, None])
    drop[:, 0] = False
    return scores.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), -torch.inf)


class SampleTable:
    """What the sampler must know of the samples in flight: seed, and whether the most likely token is taken."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}
        self.greedy: set[str] = set()

    def add(self, key: str, seed: int, greedy: bool) -> None:
        """Register a sample before it is handed to vLLM."""
        self.seeds[key] = seed % 2**64
        if greedy:
            self.greedy.add(key)

    def remove(self, key: str) -> None:
        """Forget a finished sample."""
        self.seeds.pop(key, None)
        self.greedy.discard(key)


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None, uniform: Tensor, greedy: Tensor | None) -> Any:
    """Tokens int64 [B] and their log-probs float32 [B] under the distribution they were drawn from.

    logits: [B, V] of any float type; temperature: float32 [B]. `greedy` (bool [B], or None for nowhere) takes the most likely token.
    """
    scores = logits.float()
    scores = scores / temperature[:, None] if scores is logits else scores.div_(temperature[:, None])
    scores = keep_top(scores, top_k, top_p)
    peak, best = scores.max(-1, keepdim=True)
    weights = (scores - peak).exp_()
    tokens = choose(weights, uniform)
    if greedy is not None:
        tokens = torch.where(greedy, best[:, 0], tokens)
    log_sum = weights.sum(-1, dtype=torch.float64).log().float()
    return tokens, (scores.gather(1, tokens[:, None]) - peak)[:, 0] - log_sum

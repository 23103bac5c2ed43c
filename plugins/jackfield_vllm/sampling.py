"""Sampling keyed by (sample's seed, position): one uniform number a token, whatever else is in the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from jackfield_logits import truncate

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


def choose(weights: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Index i of each row with probability weights[i] / sum, by inversion of the cumulative sum; and the sum, float64 [B].

    weights: float32 [B, V], not negative; uniform: float64 [B] in [0, 1). Sums run over blocks of the vocabulary, so the
    weights are read twice and no noise of their size is drawn. An index of weight 0 is never chosen, int64 [B].
    """
    rows, vocab = weights.shape
    block = math.gcd(vocab, 1024)
    if block < 32:
        block = 256
        weights = torch.nn.functional.pad(weights, (0, -vocab % block))
    blocks = weights.view(rows, -1, block)
    # on a CPU a sum in float64 converts a copy of everything first; there float32's order of summation does not depend on the batch
    sums = blocks.sum(-1, dtype=torch.float64 if weights.is_cuda else None).cumsum(-1, dtype=torch.float64)
    target = uniform[:, None] * sums[:, -1:]
    which = _first_above(sums, target)
    before = torch.where(which > 0, sums.gather(1, (which - 1).clamp(min=0)), 0.0)
    inner = blocks.gather(1, which[..., None].expand(-1, -1, block))[:, 0].cumsum(-1, dtype=torch.float64)
    return (which * block + _first_above(inner, target - before))[:, 0], sums[:, -1]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index whose cumulative weight exceeds `target`; rounding cannot push it past the last index of positive weight."""
    last = cumulative[:, -1:]
    below_last = torch.nextafter(last, torch.zeros_like(last))
    return torch.searchsorted(cumulative, torch.minimum(target, below_last), right=True)


Kind = tuple[float, float, int]
"""Temperature, top-p, top-k."""


class SampleTable:
    """What the sampler must know of the samples in flight: each one's seed and sampling settings."""

    def __init__(self) -> None:
        self.seeds: dict[str, int] = {}
        self.kinds: dict[str, Kind] = {}
        self.added = 0
        """How many samples ever were: a key may come again with another seed."""

    def add(self, key: str, seed: int, kind: Kind) -> None:
        """Register a sample before it is handed to vLLM."""
        self.seeds[key], self.kinds[key] = seed % 2**64, kind
        self.added += 1

    def remove(self, key: str) -> None:
        """Forget a finished sample."""
        self.seeds.pop(key, None)
        self.kinds.pop(key, None)


def _draw(logits: Tensor, kind: Kind, uniform: Tensor) -> tuple[Tensor, Tensor]:
    temperature, top_p, top_k = kind
    scores = logits.float()
    if temperature not in (0.0, 1.0):
        scores = scores / temperature
    scores = truncate(scores, top_p, top_k)
    peak = scores.amax(-1, keepdim=True)
    tokens, total = choose((scores - peak).exp_(), uniform)
    if not temperature:
        tokens = scores.argmax(-1)
    return tokens, (scores.gather(1, tokens[:, None]) - peak)[:, 0] - total.log().float()


_fused = torch.compile(_draw)


def draw(logits: Tensor, kind: Kind, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [B] and their log-probs float32 [B] under the distribution they were drawn from; logits [B, V] of any float type.

    Temperature 0 takes the most likely token and reports its log-prob at temperature 1, which is how training scores it. On a GPU
    the two dozen kernels of a draw without top-p and top-k are compiled to a few: launching them takes the host longer than running them.
    """
    if not logits.is_cuda or kind[1:] != (1.0, 0):
        return _draw(logits, kind, uniform)
    for tensor in (logits, uniform):
        torch._dynamo.maybe_mark_dynamic(tensor, 0)
    return _fused(logits, kind, uniform)


def draw_mixed(logits: Tensor, kinds: Sequence[Kind], uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`draw` where rows may differ in their settings."""
    different = list(dict.fromkeys(kinds))
    if len(different) == 1:
        return draw(logits, different[0], uniform)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    log_probs = torch.empty(len(logits), dtype=torch.float32, device=logits.device)
    for kind in different:
        rows = torch.tensor([i for i, other in enumerate(kinds) if other == kind], device=logits.device)
        tokens[rows], log_probs[rows] = draw(logits[rows], kind, uniform[rows])
    return tokens, log_probs

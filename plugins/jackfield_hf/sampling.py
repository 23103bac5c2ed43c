"""Drawing tokens: one uniform number a token from the sample's own generator, so that a sample does not depend on its company."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from jackfield.config import SamplingConfig
from jackfield_logits import truncate

_BLOCK = 256


def draw(logits: Tensor, sampling: SamplingConfig, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Tokens int64 [n] and their log-probs float32 [n] under the sampling distribution, from `logits` [n, V], `uniforms` float64 [n].

    Temperature 0 takes the most likely token and reports its log-prob at temperature 1, which is how training scores it.
    """
    scores = logits.float()
    if sampling.temperature not in (0.0, 1.0):
        scores = scores / sampling.temperature
    probabilities = truncate(scores, sampling.top_p, sampling.top_k).softmax(-1)
    tokens = probabilities.argmax(-1) if sampling.temperature == 0 else pick(probabilities, uniforms)
    return tokens, probabilities.gather(-1, tokens[:, None])[:, 0].log()


def pick(probabilities: Tensor, uniforms: Tensor) -> Tensor:
    """Invert the distribution function of each row at its uniform number: int64 [n]. A token of probability 0 is never picked.

    In two levels, blocks of the vocabulary and then tokens of a block: a fraction of the work of one running sum over all of it,
    or of noise for every entry, and without the rounding error of a long float32 sum.
    """
    count, vocabulary = probabilities.shape
    whole = vocabulary // _BLOCK * _BLOCK
    mass = probabilities[:, :whole].reshape(count, -1, _BLOCK).sum(-1)
    if whole < vocabulary:
        mass = torch.cat([mass, probabilities[:, whole:].sum(-1, keepdim=True)], 1)
    mass = mass.double()
    reached = mass.cumsum(-1)
    target = uniforms.clamp(max=1 - 1e-12) * reached[:, -1]  # less than the whole even when rounded
    block = (reached <= target[:, None]).sum(-1, keepdim=True).clamp_(max=mass.shape[1] - 1)
    inside = mass.gather(1, block)
    share = (target[:, None] - (reached.gather(1, block) - inside)) / inside
    places = block * _BLOCK + torch.arange(min(_BLOCK, vocabulary), device=block.device)
    fine = probabilities.gather(1, places.clamp(max=vocabulary - 1)).double()
    reached = fine.masked_fill_(places >= vocabulary, 0).cumsum(-1)
    target = share.clamp_(0, 1 - 1e-9) * reached[:, -1:]
    return (block * _BLOCK + (reached <= target).sum(-1, keepdim=True))[:, 0]


class Uniforms:
    """The stream of uniform numbers of one sample, float64, drawn in blocks."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.numbers: list[float] = []
        self.used = 0

    def __next__(self) -> float:
        if self.used == len(self.numbers):
            self.numbers = torch.rand(64, generator=self.generator, dtype=torch.float64).tolist()
            self.used = 0
        self.used += 1
        return self.numbers[self.used - 1]


def draw_mixed(logits: Tensor, samplings: Sequence[SamplingConfig], uniforms: Tensor) -> tuple[list[int], list[float]]:
    """`draw` where rows may differ in their settings."""
    kinds = list(dict.fromkeys((s.temperature, s.top_p, s.top_k) for s in samplings))
    if len(kinds) == 1:
        tokens, log_probs = draw(logits, samplings[0], uniforms)
        return tokens.tolist(), log_probs.tolist()
    out: dict[int, tuple[int, float]] = {}
    for kind in kinds:
        rows = [i for i, s in enumerate(samplings) if (s.temperature, s.top_p, s.top_k) == kind]
        tokens, log_probs = draw(logits[rows], samplings[rows[0]], uniforms[rows])
        out |= zip(rows, zip(tokens.tolist(), log_probs.tolist(), strict=True), strict=True)
    return [out[i][0] for i in range(len(samplings))], [out[i][1] for i in range(len(samplings))]

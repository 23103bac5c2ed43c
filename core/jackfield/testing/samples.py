"""Requests for an engine, and what a backend says about its samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from jackfield.batch import Batch, Prompt, Trajectory
from jackfield.components import Backend, Engine, OutputRequest, Request, Sample
from jackfield.config import SamplingConfig

Samples = dict[tuple[int, int], Sample]
"""Samples by (request, index)."""


def prompts(count: int, length: int = 12, *, vocab: int = 60, seed: int = 0, shared: int = 0) -> list[tuple[int, ...]]:
    """`count` random prompts of `length` tokens, special ones left out; the first `shared` tokens are the same in all."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randint(4, vocab, (shared,), generator=generator).tolist()
    return [(*head, *torch.randint(4, vocab, (length - shared,), generator=generator).tolist()) for _ in range(count)]


def requests(texts: Sequence[Sequence[int]], group: int = 2, *, seed: int = 0, **sampling: Any) -> list[Request]:
    """`group` samples of each prompt, with seeds of their own."""
    settings = SamplingConfig(**{"max_new_tokens": 16, **sampling})
    return [Request(i, tuple(p), tuple(seed + 1000 * i + k for k in range(group)), settings) for i, p in enumerate(texts)]


def generate(engine: Engine, asked: Sequence[Request]) -> Samples:
    """All samples, each wanted one exactly once."""
    found = list(engine.generate(asked))
    by_key = {(s.request_id, s.index): s for s in found}
    assert sorted((s.request_id, s.index) for s in found) == sorted((r.id, i) for r in asked for i in range(len(r.seeds)))
    return by_key


def tokens(samples: Samples) -> dict[tuple[int, int], list[int]]:
    """The token ids alone."""
    return {key: s.tokens for key, s in samples.items()}


def batch_of(asked: Sequence[Request], samples: Samples) -> Batch:
    """The samples as a batch, request by request."""
    items = []
    for request in asked:
        for index in range(len(request.seeds)):
            s, n = samples[request.id, index], len(request.tokens)
            mask = [False] * n + [True] * len(s.tokens)
            log_probs, versions = [0.0] * n + list(s.log_probs), [-1] * n + list(s.versions)
            items.append(Trajectory(Prompt(request.id, {}), [*request.tokens, *s.tokens], n, mask, log_probs, versions, s.finish_reason))
    return Batch.from_trajectories(items, group_size=max(len(r.seeds) for r in asked))


def gap(backend: Backend, asked: Sequence[Request], samples: Samples) -> Tensor:
    """|difference| of the engine's log-probs and the backend's at each sampled token, float32 [tokens] (law 11)."""
    batch, s = batch_of(asked, samples), asked[0].sampling
    request = OutputRequest(temperature=s.temperature or 1.0, top_p=s.top_p, top_k=s.top_k)
    scored = backend.forward([batch], request)[0].log_probs
    assert scored is not None
    return (scored - batch.rollout_log_probs)[batch.response_mask].abs()

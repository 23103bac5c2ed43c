"""Requests, and what the trainer says about their samples."""

import torch

from jackfield.batch import Batch, Prompt, Trajectory
from jackfield.components import OutputRequest, Request
from jackfield.config import SamplingConfig


def prompts(count, length=12, vocab=500, seed=0, shared=0):
    """`count` random prompts; the first `shared` tokens are the same in all."""
    generator = torch.Generator().manual_seed(seed)
    head = torch.randint(4, vocab, (shared,), generator=generator).tolist()
    return [(*head, *torch.randint(4, vocab, (length - shared,), generator=generator).tolist()) for _ in range(count)]


def requests(texts, group=2, seed=0, **sampling):
    settings = SamplingConfig(**{"max_new_tokens": 16, **sampling})
    return [Request(i, tuple(p), tuple(seed + 1000 * i + k for k in range(group)), settings) for i, p in enumerate(texts)]


def generate(engine, asked):
    """Samples by (request, index)."""
    found = list(engine.generate(asked))
    by_key = {(s.request_id, s.index): s for s in found}
    assert len(by_key) == len(found) == sum(len(r.seeds) for r in asked)
    return by_key


def tokens(samples):
    return {key: s.tokens for key, s in samples.items()}


def batch_of(asked, samples):
    items = []
    for request in asked:
        for index in range(len(request.seeds)):
            s, n = samples[request.id, index], len(request.tokens)
            mask = [False] * n + [True] * len(s.tokens)
            log_probs, versions = [0.0] * n + s.log_probs, [-1] * n + s.versions
            items.append(Trajectory(Prompt(request.id, {}), [*request.tokens, *s.tokens], n, mask, log_probs, versions, s.finish_reason))
    return Batch.from_trajectories(items, group_size=max(len(r.seeds) for r in asked))


def gap(backend, asked, samples):
    """|difference| of the engine's log-probs and the trainer's at each sampled token, float32 [tokens]."""
    batch, s = batch_of(asked, samples), asked[0].sampling
    request = OutputRequest(temperature=s.temperature or 1.0, top_p=s.top_p, top_k=s.top_k)
    scored = backend.forward([batch], request)[0].log_probs
    return (scored - batch.rollout_log_probs)[batch.response_mask].abs()

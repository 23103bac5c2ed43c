"""A run of nothing but what rollouts touch, and an engine that answers by rule and finishes in a shuffled order."""

from __future__ import annotations

import random
from types import SimpleNamespace

from jackfield.components import Sample
from jackfield.config import SamplingConfig


class RulePolicy:
    """`answer(request, index)` gives (tokens, finish reason). Every call's requests are kept."""

    def __init__(self, answer, shuffle=0):
        self.answer, self.shuffle, self.calls = answer, shuffle, []

    def generate(self, requests):
        self.calls.append(list(requests))
        samples = []
        for request in requests:
            for index in range(len(request.seeds)):
                tokens, reason = self.answer(request, index)
                log_probs = [-0.5 - k for k in range(len(tokens))]
                samples.append(Sample(request.id, index, tokens, log_probs, [7] * len(tokens), reason))
        random.Random(self.shuffle).shuffle(samples)
        yield from samples


def make_run(model, policy, *, group_size=2, max_new_tokens=4, seed=3, step=5, rows=()):
    """A run whose dataset is `rows`."""
    config = SimpleNamespace(policy=SimpleNamespace(model=SimpleNamespace(path=str(model), head="lm")))
    sampling = SamplingConfig(max_new_tokens=max_new_tokens)
    run = SimpleNamespace(config=config, policy=policy, seed=seed, step=step, group_size=group_size, sampling=sampling)
    run.metrics, run.tokenizer, run.prompts = {}, None, SimpleNamespace(dataset=rows)
    return run

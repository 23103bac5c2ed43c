"""The parts of a step that are not hooks: they call hooks and models, and put what comes back into the batch."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from jackfield.batch import Batch, Prompt, any_token
from jackfield.results import answered
from jackfield.rewards import combine
from jackfield.run import Run


def rate(run: Run, batch: Batch, prompts: list[Prompt]) -> Batch:
    """Score the samples of `prompts`, with a greedy one of each where the algorithm compares with it, and keep those that pass the filters.

    A sample that could not be scored is masked, not lost; one whose every token was rejected goes.
    """
    with phase(run, "score"):
        batch = score(run, batch)
        if run.algorithm.needs.greedy_baseline:
            with run.sampling_as(temperature=0.0, group_size=1):
                greedy = score(run, run.hook.rollout(run=run, prompts=prompts))
            where = (batch.group_ids[:, None] == greedy.group_ids[None, :]).int().argmax(-1)
            batch = batch.with_extras(greedy_rewards=greedy.rewards[where])  # type: ignore[index]
    keep = any_token(batch.loss_mask) | ~any_token(batch.response_mask)
    for verdict in answered(run.hook.filter, run.hook.filter(run=run, batch=batch)):
        keep = keep & verdict
    return batch.keep(keep)


def score(run: Run, batch: Batch) -> Batch:
    """Every reward's scores, and their weighted sum."""
    found = [result for result in run.hook.score(run=run, batch=batch) or () if result]
    scores = {name: values for result in answered(run.hook.score, found or None) for name, values in result.items()}
    rewards, scored = combine(scores, run.config.rewards, len(batch))
    return batch.replace(scores=batch.extras.empty().update(scores), rewards=rewards, loss_mask=batch.loss_mask & scored[:, None])


def prepare(run: Run, batch: Batch) -> Batch:
    """What the algorithm needs from models: log-probs under the old and the reference policy, values, distribution statistics."""
    needs = run.algorithm.needs
    if run.algorithm.config.old_log_probs == "rollout":
        batch = batch.replace(old_log_probs=batch.rollout_log_probs)
    elif needs.old_log_probs or needs.entropy or needs.sum_pi_squared:
        request = run.policy.request(entropy=needs.entropy, sum_pi_squared=needs.sum_pi_squared)
        out = run.policy.forward(batch, request)
        batch = batch.replace(old_log_probs=out.log_probs)
        extras = {"entropy": out.entropy, "sum_pi_squared": out.sum_pi_squared}
        batch = batch.with_extras(**{n: v for n, v in extras.items() if v is not None and getattr(needs, n)})
    if needs.reference:
        batch = batch.replace(ref_log_probs=run.reference.log_probs(batch))
    if needs.values:
        batch = batch.replace(critic_values=run.critic.values(batch))
    return batch


def summarise(run: Run, batch: Batch) -> None:
    """The step's metrics about its samples."""
    assert batch.rewards is not None and batch.scores is not None
    scores = {name: values for name, values in batch.scores.items() if isinstance(values, torch.Tensor)}
    scored = combine(scores, run.config.rewards, len(batch))[1]
    values = {f"reward/{name}": values for name, values in scores.items()} | {"reward": batch.rewards[scored]}
    values |= {"response/length": batch.response_lengths.float(), "response/truncated": (batch.finish_reasons == 1).float()}
    run.metrics |= {n: float(v.nanmean()) if len(v) else 0.0 for n, v in values.items()}
    run.metrics |= {"samples": float(len(batch)), "samples/trained": float(any_token(batch.loss_mask).sum())}


@contextmanager
def phase(run: Run, name: str) -> Iterator[None]:
    """Add the block's wall seconds to the step's `time/<name>`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        run.metrics[f"time/{name}"] = run.metrics.get(f"time/{name}", 0.0) + time.perf_counter() - start

"""RL post-training, whole: the loop below is all there is. Every arrow of docs/architecture.md is a hook call here."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from jackfield.batch import Batch, Prompt
from jackfield.rewards import combine
from jackfield.run import Run


def train(run: Run) -> None:
    """Train until `run.config.steps` steps are done."""
    while run.step < run.config.steps:
        step(run)


def step(run: Run) -> dict[str, float]:
    """One step: rollout, score, filter, advantage, update, sync."""
    metrics: dict[str, float] = {}
    run.metrics = metrics
    start = time.perf_counter()
    run.hook.step_start(run=run)
    batch = collect(run)
    with phase(run, "prepare"):
        batch = prepare(run, batch)
    with phase(run, "advantage"):
        batch = run.hook.advantage(run=run, batch=batch.clean())
    with phase(run, "update"):
        metrics |= run.hook.update(run=run, batch=batch) or {}
    with phase(run, "sync"):
        report = run.policy.sync(run.step + 1)
        run.hook.weights_synced(run=run, report=report)
    summarise(run, batch)
    metrics["time/step"] = time.perf_counter() - start
    run.step += 1
    run.hook.step_end(run=run, metrics=metrics)
    return metrics


def collect(run: Run) -> Batch:
    """Roll out and score until enough groups pass the filters; after `batch.max_draws` rounds the batch stays short."""
    wanted, parts, last = run.config.batch.prompts, [], None
    kept = drawn = 0
    for _ in range(run.config.batch.max_draws):
        prompts = run.prompts.take(wanted - kept)
        drawn += len(prompts)
        last = roll(run, prompts)
        keep = last.loss_mask.any(-1) | ~last.response_mask.any(-1)
        for verdict in run.hook.filter(run=run, batch=last):
            keep = keep & verdict
        parts.append(last[keep])
        kept += len(torch.unique(last.group_ids[keep]))
        if kept >= wanted:
            break
    run.metrics |= {"prompts/drawn": float(drawn), "prompts/trained": float(kept), "prompts/dropped": float(drawn - kept)}
    return Batch.concat(parts)


def roll(run: Run, prompts: list[Prompt]) -> Batch:
    """Sample and score one round of prompts. A sample that could not be scored is masked, not lost."""
    with phase(run, "rollout"):
        batch: Batch = run.hook.rollout(run=run, prompts=prompts)
    with phase(run, "score"):
        batch = score(run, batch)
        if run.algorithm.needs.greedy_baseline:
            with run.sampling_as(temperature=0.0, group_size=1):
                greedy = score(run, run.hook.rollout(run=run, prompts=prompts))
            where = (batch.group_ids[:, None] == greedy.group_ids[None, :]).int().argmax(-1)
            batch = batch.with_extras(greedy_rewards=greedy.rewards[where])  # type: ignore[index]
    return batch


def score(run: Run, batch: Batch) -> Batch:
    """Every reward's scores, and their weighted sum."""
    scores = {name: values for result in run.hook.score(run=run, batch=batch) for name, values in result.items()}
    rewards, scored = combine(scores, {spec.label or spec.name: spec.weight for spec in run.config.rewards}, len(batch))
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
    lengths, trained = batch.response_lengths.float(), batch.loss_mask.any(-1)
    assert batch.rewards is not None
    assert batch.scores is not None
    values = {"response/length": lengths, "response/truncated": (batch.finish_reasons == 1).float()}
    values |= {f"reward/{name}": scores for name, scores in batch.scores.items() if isinstance(scores, torch.Tensor)}
    values["reward"] = batch.rewards[trained]
    run.metrics |= {n: float(v.nanmean()) if len(v) else 0.0 for n, v in values.items()}
    run.metrics |= {"samples": float(len(batch)), "samples/trained": float(trained.sum())}


@contextmanager
def phase(run: Run, name: str) -> Iterator[None]:
    """Add the block's wall seconds to the step's `time/<name>`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        run.metrics[f"time/{name}"] = run.metrics.get(f"time/{name}", 0.0) + time.perf_counter() - start

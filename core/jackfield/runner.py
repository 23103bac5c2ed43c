"""RL post-training, whole: this loop is all there is, and every stage of it is a hook that a plugin implements or wraps."""

from __future__ import annotations

import torch

from jackfield.batch import Batch
from jackfield.results import answered
from jackfield.run import Run
from jackfield.stages import phase, prepare, rate, summarise


def step(run: Run) -> dict[str, float]:
    """One step: rollout, score, filter, advantage, update, sync. The trainer calls it until `steps` are done."""
    run.metrics = {}
    with phase(run, "step"):
        run.hook.step_start(run=run)
        batch = train(run, collect(run))
        with phase(run, "sync"):
            report = run.policy.sync(run.step + 1)
        run.hook.weights_synced(run=run, report=report)
        summarise(run, batch)
    run.step += 1
    run.hook.step_end(run=run, metrics=run.metrics)
    return run.metrics


def collect(run: Run) -> Batch:
    """Roll out and score until enough groups pass the filters; after `batch.max_draws` rounds the batch stays short."""
    wanted, kept, drawn, parts = run.config.batch.prompts, 0, 0, []
    for _ in range(run.config.batch.max_draws):
        prompts = run.prompts.take(wanted - kept)
        drawn += len(prompts)
        with phase(run, "rollout"):
            batch = answered(run.hook.rollout, run.hook.rollout(run=run, prompts=prompts))
        parts.append(rate(run, batch, prompts))
        kept += len(torch.unique(parts[-1].group_ids))
        if kept >= wanted:
            break
    run.metrics |= {"prompts/drawn": float(drawn), "prompts/trained": float(kept), "prompts/dropped": float(drawn - kept)}
    return Batch.concat(parts)


def train(run: Run, batch: Batch) -> Batch:
    """Advantages and update of a rated batch, which is returned with what they took: log-probs, values, advantages."""
    with phase(run, "prepare"):
        batch = prepare(run, batch)
    with phase(run, "advantage"):
        batch = answered(run.hook.advantage, run.hook.advantage(run=run, batch=batch.clean()))
    with phase(run, "update"):
        run.metrics |= answered(run.hook.update, run.hook.update(run=run, batch=batch))
    return batch

"""Rollout `single_turn`: one prompt, one response, `group_size` times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jackfield.batch import Batch, Prompt, Trajectory
from jackfield.components import ComponentConfig, Request, Rollout, Sample
from jackfield.errors import ConfigError
from jackfield.hookspecs import hookimpl
from jackfield_rollout.prompts import Encoded, PromptConfig, PromptEncoder, load_tokenizer
from jackfield_rollout.seeds import gather, sample_seed

TRIED = 512
"""Rows whose prompts are checked before the run starts; the others are when their turn comes."""


class PromptedRollout(Rollout):
    """What rollouts share: the tokenizer (set as `run.tokenizer`), prompts, and the hook."""

    Config: type[ComponentConfig] = PromptConfig
    config: Any
    encoder: PromptEncoder

    @hookimpl
    def configure(self, run: Any) -> None:
        """Load the tokenizer before any model is, and try it on the first rows."""
        if run.config.policy.model is None:
            raise ConfigError("policy.model is missing: name a local Hugging Face folder or a hub model")
        if run.config.policy.model.head != "lm":
            raise ConfigError("policy.model.head is 'value', with which nothing can be sampled: leave it out (a critic has it by itself)")
        path = run.config.policy.model.path
        run.tokenizer = load_tokenizer(path)
        self.encoder = PromptEncoder(self.config, path, run.tokenizer)
        rows = run.prompts.dataset
        first = [Prompt(i, rows[i]) for i in range(min(len(rows), TRIED))]
        self.encoder.select(first, run.sampling.max_new_tokens)

    @hookimpl
    def rollout(self, run: Any, prompts: Sequence[Prompt]) -> Batch:
        """The `rollout` hook."""
        return self.collect(run, prompts)

    def select(self, run: Any, prompts: Sequence[Prompt]) -> list[Encoded]:
        """Encoded prompts that fit; the others are counted in `rollout/overlong`."""
        kept, dropped = self.encoder.select(prompts, run.sampling.max_new_tokens)
        count(run, "rollout/overlong", dropped)
        return kept


class SingleTurn(PromptedRollout):
    """Samples by one call of the engine. Samples that the engine aborted stay in the batch but are not trained on."""

    def collect(self, run: Any, prompts: Sequence[Prompt]) -> Batch:
        """See Rollout.collect. The batch keeps the order of `prompts`, whatever the order in which samples finish."""
        encoded = self.select(run, prompts)
        group = run.group_size
        requests = [
            Request(
                id=e.prompt.id,
                tokens=e.tokens,
                seeds=tuple(sample_seed(run.seed, run.step, e.prompt.id * group + k) for k in range(group)),
                sampling=run.sampling,
            )
            for e in encoded
        ]
        groups = gather(requests, run.policy.generate(requests))
        texts = iter(
            run.tokenizer.batch_decode([np.asarray(s.tokens).tolist() for samples in groups for s in samples], skip_special_tokens=True)
        )
        arrays = [np.asarray(e.tokens, np.int64) for e in encoded]
        items = [_trajectory(e, a, s, next(texts)) for e, a, samples in zip(encoded, arrays, groups, strict=True) for s in samples]
        return finished(run, items)


def _trajectory(encoded: Encoded, before: Any, sample: Sample, response: str) -> Trajectory:
    """`before`: the prompt's tokens as an array. Arrays throughout: a list costs 0.1 s for a million tokens."""
    return Trajectory(
        prompt=encoded.prompt,
        tokens=np.concatenate([before, sample.tokens]),
        prompt_length=len(before),
        sampled=np.ones(len(sample.tokens), np.bool_),
        log_probs=sample.log_probs,
        versions=sample.versions,
        finish_reason=sample.finish_reason,
        record=reward_record(encoded.prompt.record, encoded.text, response, len(sample.tokens), sample.finish_reason),
    )


def reward_record(row: dict[str, Any], text: str, response: str, response_tokens: int, finish_reason: str) -> dict[str, Any]:
    """What rewards read: the row, `prompt` and `response` as text, `messages` where the row had them, and how the response ended."""
    chat = {} if isinstance(row["prompt"], str) else {"messages": row["prompt"]}
    own = {"prompt": text, "response": response, "response_tokens": response_tokens, "finish_reason": finish_reason}
    return {**row, **chat, **own}


def finished(run: Any, items: Sequence[Trajectory]) -> Batch:
    """The batch of finished samples; aborted ones lose their loss mask and are counted in `rollout/aborted`."""
    batch = Batch.from_trajectories(items, group_size=run.group_size)
    aborted = [item.finish_reason == "abort" for item in items]
    count(run, "rollout/aborted", sum(aborted))
    if any(aborted):
        mask = batch.loss_mask.clone()
        mask[[i for i, bad in enumerate(aborted) if bad]] = False
        batch = batch.replace(loss_mask=mask)
    return batch


def count(run: Any, name: str, number: int) -> None:
    """Add to a counter of this step's metrics; a step may draw more than once."""
    run.metrics[name] = run.metrics.get(name, 0.0) + number

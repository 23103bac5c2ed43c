"""Rollout `multi_turn`: the engine and an environment take turns on one growing conversation."""

from __future__ import annotations

import importlib.util
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from pydantic import Field

from jackfield.batch import Batch, Prompt, Trajectory
from jackfield.components import ComponentConfig, Request
from jackfield.errors import ConfigError, PluginError
from jackfield.hookspecs import hookimpl
from jackfield_rollout.prompts import Encoded, PromptConfig
from jackfield_rollout.seeds import gather, sample_seed
from jackfield_rollout.single_turn import PromptedRollout, count, finished, reward_record


class Environment(Protocol):
    """What the user writes: one instance a sample."""

    def reset(self, record: dict[str, Any]) -> None:
        """A sample begins. `record` is its own copy of the dataset's row: what is put there, rewards can read."""

    def step(self, text: str) -> tuple[str | None, bool]:
        """The model has said `text`: what it sees next (None for nothing), and whether the sample is over."""


class MultiTurnConfig(PromptConfig):
    """Settings of `multi_turn`."""

    environment: str
    """`path/to/file.py:Class` or `package.module:Class`: see Environment."""
    options: dict[str, Any] = {}
    """Keyword arguments of the environment's class."""
    max_turns: int = Field(default=4, gt=0)
    """Most calls of the engine a sample; `sampling.max_new_tokens` bounds each."""
    role: Literal["user", "tool"] = "user"
    """Role under which the environment speaks where the chat template is in use."""


@dataclass
class _Talk:
    """One sample under way."""

    encoded: Encoded
    sample_id: int
    environment: Any
    record: dict[str, Any]
    tokens: list[int]
    sampled: list[bool]
    log_probs: list[float]
    versions: list[int]
    said: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None

    def fail(self) -> None:
        """The environment has raised: end the sample and keep the traceback."""
        self.finish_reason, self.error = "abort", traceback.format_exc()


class MultiTurn(PromptedRollout):
    """Many calls of the engine a sample. Sampled tokens are kept as they are, never decoded and encoded again; what the
    environment says is tokenized on its own, appended, and not trained on. An environment that raises costs its own sample."""

    Config: type[ComponentConfig] = MultiTurnConfig

    @hookimpl
    def configure(self, run: Any) -> None:
        """Load the tokenizer and the environment's class."""
        super().configure(run)
        self.make = _resolve(self.config.environment)
        self.before, self.after = self._seam() if self.encoder.chats else ("", "")

    def collect(self, run: Any, prompts: Sequence[Prompt]) -> Batch:
        """See Rollout.collect."""
        talks = [self._start(e, e.prompt.id * run.group_size + k) for e in self.select(run, prompts) for k in range(run.group_size)]
        for turn in range(self.config.max_turns):
            live = [t for t in talks if t.finish_reason is None]
            if not live:
                break
            requests = [
                Request(t.sample_id, tuple(t.tokens), (sample_seed(run.seed, run.step, t.sample_id, turn),), run.sampling) for t in live
            ]
            for talk, (sample,) in zip(live, gather(requests, run.policy.generate(requests)), strict=True):
                tokens, log_probs, versions = (np.asarray(v).tolist() for v in (sample.tokens, sample.log_probs, sample.versions))
                _extend(talk, tokens, True, log_probs, versions)
                text = run.tokenizer.decode(tokens, skip_special_tokens=True)
                talk.said.append(text)
                if sample.finish_reason != "stop":
                    talk.finish_reason = sample.finish_reason
                    continue
                try:
                    seen, done = talk.environment.step(text)
                except Exception:  # noqa: BLE001 - the environment is the user's code; it costs its own sample and is counted
                    talk.fail()
                    continue
                self._answer(run, talk, seen, done or turn + 1 == self.config.max_turns)
        self._report_failures(run, talks)
        count(run, "rollout/turns", sum(len(t.said) for t in talks))
        return finished(run, [_trajectory(t) for t in talks])

    def _start(self, encoded: Encoded, sample_id: int) -> _Talk:
        n = len(encoded.tokens)
        record = dict(encoded.prompt.record)
        talk = _Talk(encoded, sample_id, None, record, list(encoded.tokens), [False] * n, [0.0] * n, [-1] * n)
        try:
            talk.environment = self.make(**self.config.options)
            talk.environment.reset(record)
        except Exception:  # noqa: BLE001 - the environment is the user's code; it costs its own sample and is counted
            talk.fail()
        return talk

    def _report_failures(self, run: Any, talks: Sequence[_Talk]) -> None:
        errors = [t.error for t in talks if t.error is not None]
        count(run, "rollout/environment_failed", len(errors))
        if talks and len(errors) == len(talks):
            name = self.config.environment
            raise PluginError(f"environment {name!r} raised in all {len(talks)} samples of step {run.step}; the first:\n{errors[0]}")

    def _answer(self, run: Any, talk: _Talk, seen: str | None, done: bool) -> None:
        """Append what the environment says; end the sample where it is over or no further turn fits the context."""
        if done:
            talk.finish_reason = "stop"
            return
        if self.encoder.chats:
            ended = talk.tokens[-1] == run.tokenizer.eos_token_id
            head, tail = self.before, self.after
            text = (head if ended else run.tokenizer.eos_token + head) + (seen or "") + tail
        else:
            text = seen or ""
        ids = run.tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        limit = self.encoder.context
        if limit is not None and len(talk.tokens) + len(ids) + run.sampling.max_new_tokens > limit:
            talk.finish_reason = "length"
            return
        _extend(talk, ids, False, [0.0] * len(ids), [-1] * len(ids))

    def _seam(self) -> tuple[str, str]:
        """What the template writes between the assistant's end token and the environment's words, and after them."""
        mark, end = "<<jackfield seam>>", self.encoder.tokenizer.eos_token
        turns = [{"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}, {"role": self.config.role, "content": mark}]
        text = self.encoder.render(turns)
        head, _, tail = text.partition(mark)
        _, found, _ = self.encoder.render(turns[:2], open_turn=False).rpartition(end)
        if not found or not tail:
            raise ConfigError(
                f"the chat template does not end the assistant's turn with {end!r} or leaves out role {self.config.role!r}, "
                "which multi_turn needs; set rollout.template, rollout.role, or chat=never"
            )
        return head[self.encoder.render(turns[:2], open_turn=False).rindex(end) + len(end) :], tail


def _extend(talk: _Talk, tokens: Sequence[int], sampled: bool, log_probs: Sequence[float], versions: Sequence[int]) -> None:
    talk.tokens.extend(tokens)
    talk.sampled.extend([sampled] * len(tokens))
    talk.log_probs.extend(log_probs)
    talk.versions.extend(versions)


def _trajectory(talk: _Talk) -> Trajectory:
    reason = talk.finish_reason or "length"
    record = reward_record(talk.record, talk.encoded.text, talk.said[-1] if talk.said else "", sum(talk.sampled), reason)
    return Trajectory(
        prompt=talk.encoded.prompt,
        tokens=talk.tokens,
        prompt_length=len(talk.encoded.tokens),
        sampled=talk.sampled,
        log_probs=talk.log_probs,
        versions=talk.versions,
        finish_reason=reason,
        record={**record, "turns": talk.said},
    )


def _resolve(name: str) -> Any:
    """The class behind `file.py:Class` or `module:Class`. Raises ConfigError."""
    source, _, attribute = name.rpartition(":")
    try:
        if source.endswith(".py"):
            path = Path(source)
            if not path.is_file():
                raise ConfigError(f"rollout.environment {name!r}: there is no file {source!r}")
            spec = importlib.util.spec_from_file_location(f"jackfield_environment_{path.stem}", path)
            module = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(module)
        else:
            module = importlib.import_module(source)
        found = getattr(module, attribute)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"rollout.environment {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    missing = [m for m in ("reset", "step") if not callable(getattr(found, m, None))]
    if missing:
        raise ConfigError(f"rollout.environment {name!r} lacks {' and '.join(missing)}: see jackfield_rollout.multi_turn.Environment")
    return found

"""Conformance of rewards, datasets and rollouts: subclass, name yours, and get the laws as tests (docs/laws.md).

class TestMine(RewardConformance):
    reward = "mine"                       # or the class, or "path/to/file.py:Mine"
    records = [{"prompt": "2 + 2 =", "response": "4", "answer": "4"}, ...]
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from jackfield import registry
from jackfield.batch import FINISH_REASONS, Prompt
from jackfield.components import Request, Sample
from jackfield.config import ComponentSpec, ModelConfig, SamplingConfig
from jackfield.errors import PluginError
from jackfield.hookspecs import hookimpl
from jackfield.testing.runs import fake_run


def build(kind: str, named: Any, config: dict[str, Any]) -> Any:
    """The component under test, from a name as in a config or from the class itself."""
    if isinstance(named, str):
        return registry.build(kind, ComponentSpec(name=named, options=config))
    return named(named.Config(**config))


def _numbers(scores: Sequence[Any]) -> list[float | None]:
    return [None if x is None or isinstance(x, Exception) or math.isnan(x) else float(x) for x in scores]


class RewardConformance:
    """Laws 17 and 18 for a reward. Set `reward`, `records` (at least three that differ) and, where needed, `config`."""

    reward: Any
    config: dict[str, Any] = {}
    records: Sequence[dict[str, Any]]

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """A fresh reward's scores."""
        reward = build("reward", self.reward, self.config)
        try:
            return list(reward.score(records))
        finally:
            if hasattr(reward, "run_end"):
                reward.run_end(None)

    def test_law_17_one_score_a_record(self) -> None:
        """Finite numbers, or None where a record cannot be scored; as many as records; also for one record and for none."""
        for records in (self.records, self.records[:1], self.records[:0]):
            found = self.score(copy.deepcopy(list(records)))
            assert len(found) == len(records), f"law 17: {len(found)} scores for {len(records)} records"
            for value in found:
                failed = value is None or isinstance(value, Exception)
                assert failed or hasattr(value, "__float__"), f"law 17: a score is a number or None, not {value!r}"
                assert failed or not math.isinf(float(value)), f"law 17: a score must be finite, not {value!r}"

    def test_law_18_a_score_belongs_to_its_record(self) -> None:
        """Reversing the records reverses the scores."""
        forward, backward = self.score(list(self.records)), self.score(list(self.records)[::-1])
        assert _numbers(forward) == _numbers(backward[::-1]), (
            f"law 18: scores follow the position, not the record: {forward}, reversed {backward}"
        )

    def test_law_17_records_are_only_read(self) -> None:
        """Records belong to the batch; other rewards read them after this one."""
        records = copy.deepcopy(list(self.records))
        self.score(records)
        assert records == list(self.records), "law 17: the reward changed the records that it was given"

    def test_law_29_scoring_twice_gives_the_same(self) -> None:
        """A resumed run scores the same samples to the same values."""
        first, second = self.score(list(self.records)), self.score(list(self.records))
        assert _numbers(first) == _numbers(second), f"law 29: two fresh rewards score the same records differently: {first} and {second}"


class DatasetConformance:
    """Laws 19 and 29 for a dataset. Set `dataset` and, where needed, `config`."""

    dataset: Any
    config: dict[str, Any] = {}

    def rows(self) -> Any:
        """A fresh dataset."""
        return build("dataset", self.dataset, self.config)

    def test_law_19_finite_and_indexable(self) -> None:
        """`len` rows, each a dict with a prompt: text, or chat messages."""
        rows = self.rows()
        assert len(rows) > 0, "law 19: the dataset is empty"
        for index in {0, len(rows) // 2, len(rows) - 1}:
            row = rows[index]
            assert isinstance(row, dict), f"a row is a dict, not {row!r}"
            assert "prompt" in row, f"a row needs `prompt`; this has {sorted(row)}"
            prompt = row["prompt"]
            chat = isinstance(prompt, list) and all(isinstance(m, dict) and {"role", "content"} <= m.keys() for m in prompt)
            assert chat or isinstance(prompt, str), f"a prompt is text or a list of messages with role and content, not {prompt!r}"

    def test_law_29_rows_depend_on_the_index_alone(self) -> None:
        """Whatever was read before, and after a restart: a resumed run must see the same rows."""
        first, second = self.rows(), self.rows()
        order = list(range(min(len(first), 16)))
        forward = {i: copy.deepcopy(first[i]) for i in order}
        backward = {i: second[i] for i in reversed(order)}
        assert len(first) == len(second), "law 29: two fresh datasets differ in length"
        assert forward == backward, "law 29: a row depends on what was read before it, or differs in a fresh dataset"

    def test_rows_are_plain_data(self) -> None:
        """Rows travel to reward processes and into the run's folder."""
        rows = self.rows()
        json.dumps(rows[0])


class ScriptedPolicy:
    """Stands for `run.policy`: yields samples out of order, some ending with the end token and some cut off."""

    def __init__(self, words: int, end: int) -> None:
        self.words, self.end, self.version = words, end, 7
        self.samples: list[Sample] = []

    def generate(self, requests: Sequence[Request]) -> Iterator[Sample]:
        """Tokens depend on the seed alone."""
        made = []
        for request in requests:
            for index, seed in enumerate(request.seeds):
                rng = torch.Generator().manual_seed(seed)
                count = int(torch.randint(1, min(6, request.sampling.max_new_tokens) + 1, (1,), generator=rng))
                tokens = torch.randint(4, self.words, (count,), generator=rng).tolist()
                stops = bool(torch.rand(1, generator=rng) < 0.5)
                tokens[-1] = self.end if stops else tokens[-1]
                log_probs = (-torch.rand(count, generator=rng) - 0.1).tolist()
                made.append(Sample(request.id, index, tokens, log_probs, [self.version] * count, "stop" if stops else "length"))
        order = torch.randperm(len(made), generator=torch.Generator().manual_seed(3)).tolist()
        self.samples += [made[i] for i in order]
        yield from (made[i] for i in order)


class RolloutConformance:
    """Laws 8 to 10, 18 and 19 for a rollout. Set `rollout`, `config`, and `rows` where its prompts need more than `prompt`."""

    rollout: Any
    config: dict[str, Any] = {}
    rows: Sequence[dict[str, Any]] = ({"prompt": "t1 t2 t3"}, {"prompt": "t4"}, {"prompt": "t1 t2 t3"})
    group_size = 4

    def collect(self, model: Path, folder: Path, step: int = 5) -> tuple[Any, ScriptedPolicy]:
        """A batch for `rows` from a scripted policy."""
        from jackfield.testing.models import EOS

        rollout, policy = build("rollout", self.rollout, self.config), ScriptedPolicy(64, EOS)
        config = SimpleNamespace(policy=SimpleNamespace(model=ModelConfig(path=str(model))), seed=1, rollout=None)
        stream = SimpleNamespace(dataset=[dict(row) for row in self.rows])
        run: Any = SimpleNamespace(config=config, policy=policy, prompts=stream, seed=1, step=step, dir=folder)
        run.sampling, run.group_size, run.metrics, run.tokenizer = SamplingConfig(max_new_tokens=8), self.group_size, {}, None
        if hasattr(rollout, "configure"):
            rollout.configure(run)
        prompts = [Prompt(10 + i, dict(row)) for i, row in enumerate(self.rows)]
        return rollout.collect(run, prompts), policy

    def test_law_18_exactly_group_size_samples_of_each_prompt(self, jackfield_tiny_model: Path, tmp_path: Path) -> None:
        """Grouped by id, though two prompts have the same text; sample ids are unique."""
        batch, _ = self.collect(jackfield_tiny_model, tmp_path)
        groups = batch.group_ids.tolist()
        counts = {g: groups.count(g) for g in groups}
        wanted = {10 + i: self.group_size for i in range(len(self.rows))}
        assert counts == wanted, f"law 18: samples by prompt id are {counts}, {wanted} are wanted"
        assert len(set(batch.sample_ids.tolist())) == len(batch), "law 18: sample ids are not unique"
        first = batch.tokens[batch.group_ids == 10]
        assert len({tuple(row) for row in first.tolist()}) > 1, "law 18: all samples of a group are equal"

    def test_law_9_trainable_means_sampled(self, jackfield_tiny_model: Path, tmp_path: Path) -> None:
        """The mask covers exactly the engine's tokens, in order, with its log-probs and its version; nothing else is trained."""
        batch, policy = self.collect(jackfield_tiny_model, tmp_path)
        made: dict[tuple[int, ...], list[Sample]] = {}
        for sample in policy.samples:
            made.setdefault(tuple(sample.tokens), []).append(sample)
        total = sum(len(s.tokens) for s in policy.samples)
        assert int(batch.response_mask.sum()) == total, (
            f"law 9: {total} tokens were sampled, {int(batch.response_mask.sum())} are trainable"
        )
        assert not (batch.loss_mask & ~batch.response_mask).any(), "law 9: a token is trained that the engine did not sample"
        known = {t: lp for s in policy.samples for t, lp in zip(s.tokens, s.log_probs, strict=True)}
        for row in range(len(batch)):
            mask = batch.response_mask[row]
            assert not mask[: batch.prompt_lengths[row]].any(), "law 9: a prompt token is trainable"
            assert (batch.versions[row][mask] == policy.version).all(), "law 9: the version that sampled a token is not recorded"
            assert (batch.versions[row][~mask] == -1).all(), "law 9: a version is recorded for a token that was not sampled"
            assert all(int(t) in known for t in batch.tokens[row][mask]), "law 8: the mask is shifted against the sampled tokens"
            assert (batch.rollout_log_probs[row][mask] < 0).all(), "law 8: log-probs are shifted against the mask"
            assert (batch.rollout_log_probs[row][~mask] == 0).all(), "law 8: a log-prob stands where nothing was sampled"

    def test_law_10_the_end_token_counts(self, jackfield_tiny_model: Path, tmp_path: Path) -> None:
        """A stopped response ends with its end token, trainable; a truncated one says `length`."""
        from jackfield.testing.models import EOS

        batch, _ = self.collect(jackfield_tiny_model, tmp_path)
        for row in range(len(batch)):
            last = int(batch.response_mask[row].nonzero()[-1])
            assert last == int(batch.lengths[row]) - 1, "law 10: the last sampled token is not trainable, or something follows it"
            reason = FINISH_REASONS[int(batch.finish_reasons[row])]
            ended = int(batch.tokens[row, last]) == EOS
            assert (reason == "stop") == ended, f"law 10: finish reason {reason!r}, but the end token comes last: {ended}"

    def test_rewards_can_read_prompt_and_response(self, jackfield_tiny_model: Path, tmp_path: Path) -> None:
        """Each record has the row's fields and the texts."""
        batch, _ = self.collect(jackfield_tiny_model, tmp_path)
        for record in batch.records:
            assert {"prompt", "response"} <= set(record), f"a record needs prompt and response; this has {sorted(record)}"

    def test_law_29_depends_on_seed_and_step_alone(self, jackfield_tiny_model: Path, tmp_path: Path) -> None:
        """The same step gives the same batch, another step another."""
        a, b, c = (self.collect(jackfield_tiny_model, tmp_path, step)[0] for step in (5, 5, 6))
        assert torch.equal(a.tokens, b.tokens), "law 29: the same step of the same run gave other samples"
        assert a.tokens.shape != c.tokens.shape or not torch.equal(a.tokens, c.tokens), "law 18: two steps of a run gave the same samples"


class TrackerConformance:
    """A tracker shows and never changes. Set `tracker` (a name or class) and, where needed, `config`."""

    tracker: Any
    config: dict[str, Any] = {}

    def test_law_training_is_bit_identical_with_and_without(self, tmp_path: Path) -> None:
        """Weights, samples and the metrics that other plugins see."""
        bare = fake_run(tmp_path / "bare")
        tracked = fake_run(tmp_path / "tracked", plugins=[build("tracker", self.tracker, self.config)])
        assert tracked.same_training(bare), "design law 6: the tracker changed the training"
        assert tracked.metrics == bare.metrics, "design law 6: the tracker changed the metrics"

    def test_survives_an_error_and_a_resume(self, tmp_path: Path) -> None:
        """`run_error` must not raise, and a second run in the same folder goes on."""

        class Fails:
            @hookimpl
            def step_start(self, run: Any) -> None:
                if run.step == 2:
                    raise RuntimeError("on purpose")

        raised: list[PluginError] = []

        class Watches:
            @hookimpl(wrapper=True)
            def run_error(self, run: Any, error: BaseException) -> Iterator[None]:
                try:
                    return (yield)
                except PluginError as second:
                    raised.append(second)
                    raise

        plugins = [build("tracker", self.tracker, self.config), Fails(), Watches()]
        try:
            fake_run(tmp_path / "run", plugins=plugins, checkpoint={"every": 1})
        except PluginError as error:
            assert "on purpose" in str(error), f"the tracker hid the error of the run: {error}"
        assert not raised, f"the tracker raised when the run failed, which keeps other plugins from cleaning up: {raised[0]}"
        done = fake_run(tmp_path / "run", plugins=[build("tracker", self.tracker, self.config)])
        assert done.run.step == 3

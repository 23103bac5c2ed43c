"""The laws of docs/laws.md that the core alone answers for: denominators, splitting, order, and steps with little or nothing to train."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield import hookimpl, microbatch
from jackfield.algorithm import Algorithm, LossOutput
from jackfield.batch import Batch, Prompt, Trajectory
from jackfield.components import OutputRequest, Outputs
from jackfield.loss import BoundLoss, finish, reduction_scale
from jackfield.testing.runs import fake_config
from jackfield.trainer import Trainer


class Given(Algorithm):
    """Its loss is what stands in the advantages."""

    def advantage(self, batch):
        return batch

    def loss(self, outputs, batch):
        return LossOutput(batch.advantages, {"advantage": batch.advantages})


def batch_of(losses):
    """A batch whose sample i has len(losses[i]) sampled tokens with these losses, after a prompt of one token."""
    items = [
        Trajectory(
            Prompt(i, {}), [1] + [2] * len(row), 1, [False] + [True] * len(row), [0.0] * (len(row) + 1), [0] * (len(row) + 1), "stop"
        )
        for i, row in enumerate(losses)
    ]
    batch = Batch.from_trajectories(items, group_size=1)
    advantages = torch.zeros(batch.tokens.shape)
    for i, row in enumerate(losses):
        advantages[i, 1 : 1 + len(row)] = torch.tensor(row)
    return batch.replace(advantages=advantages)


def reduced(batch, reduction, ranks=1, budget=10_000):
    """Loss and metrics of a batch, split over ranks and micro-batches as roles.py splits it."""
    batch = batch.replace(loss_scale=reduction_scale(batch.loss_mask, reduction, 16))
    loss = BoundLoss(Given(), "policy", OutputRequest())
    parts = []
    for bins in microbatch.plan(batch.lengths.tolist(), ranks, budget):
        for micro in microbatch.cut(microbatch.share(batch, bins), torch.device("cpu")):
            parts.append(loss(Outputs(log_probs=torch.zeros(micro.tokens.shape)), micro)[1])
    return finish(parts)


def test_law_1_denominators_are_global():
    batch = batch_of([[1.0] * 10, [4.0] * 2])
    assert reduced(batch, "token-mean", ranks=2)["loss"] == pytest.approx(1.5)
    assert reduced(batch, "token-mean", ranks=1)["loss"] == pytest.approx(1.5)
    assert reduced(batch, "seq-mean-token-mean", ranks=2)["loss"] == pytest.approx(2.5)
    assert reduced(batch, "seq-mean-token-sum", ranks=2)["loss"] == pytest.approx(9.0)
    assert reduced(batch, "seq-mean-token-sum-norm", ranks=2)["loss"] == pytest.approx(9.0 / 16)
    assert reduced(batch, "token-sum", ranks=2)["loss"] == pytest.approx(18.0)


ragged = st.lists(st.lists(st.floats(-5, 5, width=32), max_size=7), min_size=1, max_size=9)


@settings(max_examples=40, deadline=None)
@given(losses=ragged, ranks=st.integers(1, 4), budget=st.integers(1, 20), reduction=st.sampled_from(["token-mean", "seq-mean-token-mean"]))
def test_laws_1_2_7_any_split_gives_the_same_loss_and_metrics(losses, ranks, budget, reduction):
    batch = batch_of(losses)
    whole, split = reduced(batch, reduction), reduced(batch, reduction, ranks, budget)
    assert whole.keys() == split.keys()
    for name, value in whole.items():
        assert split[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def test_law_4_masked_samples_equal_absent_ones():
    whole = batch_of([[1.0, 2.0], [9.0] * 5, [3.0], [7.0] * 3])
    mask = whole.loss_mask.clone()
    mask[1], mask[3] = False, False
    for reduction in ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"):
        masked, absent = reduced(whole.replace(loss_mask=mask), reduction), reduced(batch_of([[1.0, 2.0], [3.0]]), reduction)
        assert masked["loss"] == pytest.approx(absent["loss"])


def test_law_15_nan_behind_the_mask_stays_there():
    batch = batch_of([[1.0, 2.0], [3.0]])
    dirty = batch.replace(advantages=torch.where(batch.loss_mask, batch.advantages, torch.nan), rollout_log_probs=batch.rollout_log_probs)
    assert reduced(dirty, "token-mean") == reduced(batch, "token-mean")


def test_law_20_equal_micro_batch_counts_on_all_ranks():
    plan = microbatch.plan([8, 8, 8, 4, 4, 4], 2, 8)
    assert [len(bins) for bins in plan] == [len(plan[0])] * 2
    assert sorted(i for bins in plan for indices in bins for i in indices) == list(range(6))
    assert sum(not indices for bins in microbatch.plan([5] * 8, 4, 5) for indices in bins) == 0
    assert sum(not indices for bins in microbatch.plan([5] * 7, 4, 5) for indices in bins) == 1


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=30), ranks=st.integers(1, 8), budget=st.integers(1, 40))
def test_law_20_every_sample_goes_somewhere_within_the_budget(lengths, ranks, budget):
    plan = microbatch.plan(lengths, ranks, budget, [i % 3 for i in range(len(lengths))])
    assert len({len(bins) for bins in plan}) == 1
    assert sorted(i for bins in plan for indices in bins for i in indices) == list(range(len(lengths)))
    for bins in plan:
        for indices in bins:
            assert sum(lengths[i] for i in indices) <= budget or len(indices) == 1


def test_micro_batches_hold_whole_groups_where_they_fit():
    """What shares a prompt is together, however ragged: then the prompt runs once, and not once in each micro-batch."""
    lengths, groups = [40 + (7 * i) % 13 for i in range(64)], [i // 8 for i in range(64)]
    whole, mixed = (microbatch.plan(lengths, 1, 1100, g)[0] for g in (groups, ()))
    assert len(whole) == len(mixed) == 3
    prompts = [sum(len({groups[i] for i in indices}) for indices in bins) for bins in (whole, mixed)]
    assert prompts[0] <= 8 + 2 < prompts[1]


def test_law_20_fillers_have_every_field_and_no_loss():
    batch = batch_of([[1.0, 2.0]])
    batch = batch.replace(loss_scale=reduction_scale(batch.loss_mask, "token-mean", 1), ref_log_probs=torch.ones(batch.tokens.shape))
    filler = microbatch.take(batch, [])
    assert not filler.loss_mask.any()
    assert not filler.loss_scale.any()
    assert filler.ref_log_probs is not None


class Gone:
    """Masks or drops every sample."""

    @hookimpl
    def score(self, run, batch):
        return {"broken": torch.full((len(batch),), torch.nan)}


class Picky:
    """Keeps the groups whose number is even."""

    @hookimpl
    def filter(self, run, batch):
        return batch.group_ids % 2 == 0


def trained(folder, *plugins, **fields):
    trainer = Trainer(fake_config(folder, **fields))
    for plugin in plugins:
        trainer.run.manager.register(plugin)
    run = trainer.train()
    return run, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_law_16_a_step_with_nothing_to_train_ends_and_moves_nothing(tmp_path):
    run, rows = trained(tmp_path, Gone(), steps=2)
    table = run.policy.group.worker.backends["policy"].table
    fresh = Trainer(fake_config(tmp_path / "fresh", steps=1))
    fresh._start()
    assert torch.equal(table, fresh.run.policy.group.worker.backends["policy"].table)
    assert [row["skipped"] for row in rows] == [1.0, 1.0]
    assert [row["samples/trained"] for row in rows] == [0.0, 0.0]


class Half:
    """Trains on every second sample."""

    @hookimpl(wrapper=True)
    def advantage(self, run, batch):
        batch = yield
        mask = batch.loss_mask.clone()
        mask[1::2] = False
        return batch.replace(loss_mask=mask)


class Numbered:
    """Rates sample i with i, and cannot rate the last."""

    @hookimpl
    def score(self, run, batch):
        values = torch.arange(len(batch)).float()
        values[-1] = torch.nan
        return {"number": values}


def test_the_reward_is_that_of_all_samples_that_were_rated_whichever_are_trained(tmp_path):
    _, rows = trained(tmp_path, Numbered(), Half(), steps=1, rewards=[], batch={"prompts": 4, "group_size": 2})
    assert rows[0]["samples/trained"] == 4
    assert rows[0]["reward"] == rows[0]["reward/number"] == sum(range(7)) / 7


def test_law_19_every_prompt_is_trained_or_reported_dropped(tmp_path):
    run, rows = trained(tmp_path, Picky(), steps=3, batch={"prompts": 4, "group_size": 2, "max_draws": 3})
    assert sum(row["prompts/drawn"] for row in rows) == run.prompts.drawn
    for row in rows:
        assert row["prompts/drawn"] == row["prompts/trained"] + row["prompts/dropped"]
        assert row["prompts/dropped"] > 0

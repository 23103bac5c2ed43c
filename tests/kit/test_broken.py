"""A broken plugin of each kind fails the law that it breaks, and the failure says which."""

import itertools
import random
from dataclasses import replace

import pytest
import torch

from jackfield import Launcher
from jackfield.batch import Batch
from jackfield.errors import PluginError
from jackfield.hookspecs import hookimpl
from jackfield.registry import load
from jackfield.shard import SyncReport
from jackfield.testing import (
    DatasetConformance,
    HooksConformance,
    LauncherConformance,
    RewardConformance,
    RolloutConformance,
    TrackerConformance,
    TransportConformance,
)
from jackfield.testing.fakes import FakeDataset, FakeReward, FakeTransport
from jackfield_workers.local import LocalGroup, LocalLauncher

SingleTurn = load("rollout", "single_turn")


def fails(method, *args, law):
    with pytest.raises(AssertionError, match=law):
        method(*args)


class OneTooFew(FakeReward):
    def score(self, records):
        return super().score(records)[:-1]


class ByPosition(FakeReward):
    def score(self, records):
        return [float(i) for i in range(len(records))]


class Spoils(FakeReward):
    def score(self, records):
        for record in records:
            record["response"] = record["response"].strip() + "!"
        return [0.0] * len(records)


class Words(FakeReward):
    def score(self, records):
        return ["good" for _ in records]


class Dice(FakeReward):
    def score(self, records):
        return [random.random() for _ in records]


@pytest.mark.parametrize(
    ("reward", "method", "law"),
    [
        (OneTooFew, "test_law_17_one_score_a_record", "law 17: 2 scores for 3"),
        (Words, "test_law_17_one_score_a_record", "law 17: a score is a number"),
        (ByPosition, "test_law_18_a_score_belongs_to_its_record", "law 18"),
        (Spoils, "test_law_17_records_are_only_read", "law 17: the reward changed"),
        (Dice, "test_law_29_scoring_twice_gives_the_same", "law 29"),
    ],
)
def test_rewards(reward, method, law):
    case = RewardConformance()
    case.reward, case.records = reward, [{"prompt": str(i), "response": f"{i} 5 ", "answer": "5"} for i in range(3)]
    fails(getattr(case, method), law=law)


class Drifts(FakeDataset):
    reads = itertools.count()

    def __getitem__(self, index):
        return {"prompt": f"{index} {next(self.reads)}"}


class Empty(FakeDataset):
    def __len__(self):
        return 0


class NoPrompt(FakeDataset):
    def __getitem__(self, index):
        return {"question": "?"}


@pytest.mark.parametrize(
    ("dataset", "method", "law"),
    [
        (Drifts, "test_law_29_rows_depend_on_the_index_alone", "law 29"),
        (Empty, "test_law_19_finite_and_indexable", "law 19"),
        (NoPrompt, "test_law_19_finite_and_indexable", "needs `prompt`"),
    ],
)
def test_datasets(dataset, method, law):
    case = DatasetConformance()
    case.dataset = dataset
    fails(getattr(case, method), law=law)


class Altered(SingleTurn):
    """single_turn, with one thing done to its batch."""

    def alter(self, batch: Batch) -> Batch:
        raise NotImplementedError

    def collect(self, run, prompts):
        return self.alter(super().collect(run, prompts))


class LosesOne(Altered):
    def alter(self, batch):
        return batch[torch.arange(len(batch) - 1)]


class TrainsPrompts(Altered):
    def alter(self, batch):
        return batch.replace(loss_mask=batch.attention_mask)


class Shifted(Altered):
    def alter(self, batch):
        return batch.replace(response_mask=batch.response_mask.roll(-1, 1), loss_mask=batch.loss_mask.roll(-1, 1))


class NoEnd(Altered):
    def alter(self, batch):
        from jackfield.testing.models import EOS

        keep = batch.tokens != EOS
        return batch.replace(response_mask=batch.response_mask & keep, loss_mask=batch.loss_mask & keep)


class ByText(Altered):
    def alter(self, batch):
        ids = batch.group_ids.clone()
        ids[ids == 12] = 10
        return batch.replace(group_ids=ids)


class SameSeeds(SingleTurn):
    def collect(self, run, prompts):
        run.step = 0
        return super().collect(run, prompts)


@pytest.mark.parametrize(
    ("rollout", "method", "law"),
    [
        (LosesOne, "test_law_18_exactly_group_size_samples_of_each_prompt", "law 18"),
        (ByText, "test_law_18_exactly_group_size_samples_of_each_prompt", "law 18"),
        (TrainsPrompts, "test_law_9_trainable_means_sampled", "law 9"),
        (Shifted, "test_law_9_trainable_means_sampled", "law"),
        (NoEnd, "test_law_10_the_end_token_counts", "law 10"),
        (SameSeeds, "test_law_29_depends_on_seed_and_step_alone", "law 18: two steps"),
    ],
)
def test_rollouts(rollout, method, law, jackfield_tiny_model, tmp_path):
    case = RolloutConformance()
    case.rollout = rollout
    fails(getattr(case, method), jackfield_tiny_model, tmp_path, law=law)


class Doubles(LocalGroup):
    def stream(self, method, shares):
        for item in super().stream(method, shares):
            yield item
            yield item


class DoublingLauncher(LocalLauncher):
    def start(self, config, roles):
        return {role: Doubles(group.worker) for role, group in super().start(config, roles).items()}


class Scaled(LocalGroup):
    def scatter(self, method, role, shares, *args):
        if method == "update":
            shares = [replace(s, batch=s.batch.replace(loss_scale=s.batch.loss_scale / 2)) for s in shares]
        return super().scatter(method, role, shares, *args)


class AveragingLauncher(LocalLauncher):
    def start(self, config, roles):
        return {role: Scaled(group.worker) for role, group in super().start(config, roles).items()}


class TwoWorkers(Launcher):
    def start(self, config, roles):
        return LocalLauncher().start(config, roles)

    def stop(self):
        pass


def test_launchers(tmp_path):
    case = LauncherConformance()
    case.launcher = f"{__file__}:DoublingLauncher"
    fails(case.test_results_come_by_rank, tmp_path, law="law 18: samples lost or doubled")
    case.launcher = f"{__file__}:AveragingLauncher"
    fails(case.test_law_1_the_trajectory_is_that_of_one_worker, tmp_path, law="law 1: (loss|grad_norm)")
    case.launcher, case.workers = f"{__file__}:TwoWorkers", 2
    fails(case.test_results_come_by_rank, tmp_path, law="started 1 workers")


class Copies(FakeTransport):
    """Right, as a base to break."""

    skip: tuple[str, ...] = ()

    def connect(self, source, destination, context):
        self.source, self.destination = source, destination

    def sync(self, version):
        total = 0
        for have, need in zip(self.source.shards(), self.destination.shards(), strict=True):
            if have.name not in self.skip:
                need.tensor.copy_(have.tensor)
            total += need.tensor.nbytes
        self.destination.weights_updated(version)
        return SyncReport(version, bytes_copied=total)


class ForgetsBuffers(Copies):
    skip = ("router.expert_bias",)


class ForgetsBias(Copies):
    skip = ("layer.bias",)


class CopiesOnce(Copies):
    done = False

    def sync(self, version):
        self.skip = ("embed.weight",) if self.done else ()
        self.done = True
        return super().sync(version)


class KeepsCaches(Copies):
    def sync(self, version):
        report = super().sync(version)
        self.destination.dropped.pop()
        return report


class Forgets(Copies):
    def sync(self, version):
        return SyncReport(super().sync(version).version)


def test_transports():
    case = TransportConformance()
    case.transport = Copies
    for name in [n for n in dir(case) if n.startswith("test_")]:
        getattr(case, name)()
    for transport, method, law in [
        (ForgetsBuffers, case.test_law_23_every_sync_is_complete, "law 24"),
        (ForgetsBias, case.test_law_23_every_sync_is_complete, "law 23: layer.bias"),
        (CopiesOnce, case.test_law_23_every_sync_is_complete, "after sync 2"),
        (KeepsCaches, case.test_law_26_caches_are_dropped_with_every_version, "law 26"),
        (Forgets, case.test_the_report_accounts_for_every_byte, "accounts for 0 bytes"),
    ]:
        case.transport = transport
        fails(method, law=law)


class Meddles(load("tracker", "console")):
    @hookimpl
    def advantage(self, run, batch):
        return batch.replace(advantages=batch.loss_mask.float())


class Adds(load("tracker", "console")):
    @hookimpl(tryfirst=True)
    def step_end(self, run, metrics):
        metrics["mine"] = 1.0


class Raises(load("tracker", "console")):
    @hookimpl
    def run_error(self, run, error):
        raise ValueError("the tracker's own")


def test_trackers(tmp_path):
    case = TrackerConformance()
    case.tracker = Meddles
    fails(case.test_law_training_is_bit_identical_with_and_without, tmp_path / "a", law="changed the training")
    case.tracker = Adds
    fails(case.test_law_training_is_bit_identical_with_and_without, tmp_path / "b", law="changed the metrics")
    case.tracker = Raises
    fails(case.test_survives_an_error_and_a_resume, tmp_path / "c", law="raised when the run failed")


class Hook:
    class Config:
        pass

    def __init__(self, config=None):
        pass


class PatchesTheCore(Hook):
    @hookimpl
    def run_start(self, run):
        FakeDataset.__getitem__ = lambda self, index: {"prompt": "3", "answer": "3"}


class Forgetful(Hook):
    """Curriculum that starts anew with each process."""

    def __init__(self, config=None):
        self.seen = 0

    @hookimpl(wrapper=True)
    def advantage(self, run, batch):
        self.seen += 1
        batch = yield
        return batch.replace(advantages=batch.advantages * self.seen)


class Swallows(Hook):
    @hookimpl(wrapper=True)
    def score(self, run, batch):
        try:
            return (yield)
        except PluginError:
            return [{"mine": torch.zeros(len(batch))}]


def test_hooks(tmp_path, monkeypatch):
    case = HooksConformance()
    monkeypatch.setattr(FakeDataset, "__getitem__", FakeDataset.__getitem__)
    case.plugin = PatchesTheCore
    fails(case.test_law_6_leaves_nothing_behind, tmp_path / "a", law="does not name it")
    monkeypatch.undo()
    case.plugin = Forgetful
    fails(case.test_law_6_leaves_nothing_behind, tmp_path / "b", law="changes_training = True")
    fails(case.test_law_29_resume, tmp_path / "c", law="law 29: a resumed run")
    case.plugin = Swallows
    fails(case.test_an_error_of_the_run_stays_visible, tmp_path / "d", law="swallowed")

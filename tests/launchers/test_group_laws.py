"""Laws across the workers of a group, with a real model on each training backend: the role handle, launcher `fork`, real collectives.

One rank's part of them, law 6 among it, is in the conformance kit, which tests/torch, tests/fsdp and tests/megatron run on several ranks;
law 22 is in test_same_run.py.
"""

import importlib.util
import math
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from jackfield import load_config, microbatch, registry
from jackfield.errors import WorkerError
from jackfield.roles import Policy, Role
from jackfield.testing.models import random_batch, tiny_model
from jackfield.testing.samples import batch_of, requests

CONFIG = """
policy: {model: MODEL, backend: BACKEND, optimizer: {lr: 1e3, eps: 1e3, max_grad_norm: .inf}}
engine: hf
transport: {name: p2p, verify: true, bucket_bytes: 4096}
algorithm: TOUCHY
dataset: copy
sampling: {max_new_tokens: 8, temperature: 0.8}
"""
"""AdamW with so large an eps moves a weight by its gradient. Every sync compares checksums, and sends about a tensor at a time."""

MEGATRON = [pytest.mark.megatron, pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")]
LAYOUTS = [
    pytest.param((2, "{name: torch}"), id="torch-dp2"),
    pytest.param((2, "{name: fsdp}"), id="fsdp-dp2"),
    pytest.param((4, "{name: megatron, pp: 2}"), id="megatron-pp2-dp2", marks=MEGATRON),
    pytest.param((2, "{name: megatron, cp: 2}"), id="megatron-cp2", marks=MEGATRON),
]


class Workers:
    """A group of a layout; `update` takes one optimizer step from the model's files."""

    def __init__(self, home, count, backend, launcher):
        touchy = Path(__file__).with_name("touchy.py")
        text = CONFIG.replace("MODEL", str(home / "model")).replace("BACKEND", backend).replace("TOUCHY", f"{touchy}:Touchy")
        (home / f"{launcher}-{count}.yaml").write_text(text)
        self.home, self.config = home, load_config(home / f"{launcher}-{count}.yaml", [f"dir={home / 'run'}"])
        kind = registry.load("launcher", launcher)
        self.launcher = kind(kind.Config(**({"workers": count, "device": "cpu"} if launcher == "fork" else {})))
        self.groups = self.launcher.start(self.config, ["policy"])
        self.algorithm = registry.build("algorithm", self.config.algorithm)
        self.before = load_file(home / "model" / "model.safetensors")

    def update(self, batch, budget=10**6):
        """(what the step adds to each weight, metrics)."""
        config = self.config.model_copy(update={"policy": self.config.policy.model_copy(update={"micro_batch_tokens": budget})})
        role = Role("policy", self.groups["policy"], config)
        self.dp = role.positions[0].dp_size
        metrics = role.update(self.algorithm, batch)
        out = self.home / f"out-{time.monotonic_ns()}"
        out.mkdir()
        role.export(out)
        after = load_file(out / "model.safetensors")
        return {name: after[name] - value for name, value in self.before.items()}, metrics


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = tmp_path_factory.mktemp("laws")
    tiny_model(folder / "model", "qwen2")
    return folder


@pytest.fixture(scope="module")
def alone(home):
    return Workers(home, 1, "{name: torch}", "local")


@pytest.fixture(scope="module", params=LAYOUTS)
def workers(request, home):
    made = Workers(home, *request.param, "fork")
    yield made
    made.launcher.stop()


def same(got, want):
    """Changes agree to 1e-5 of the largest, metrics to 1e-4."""
    largest = max(float(v.abs().max()) for v in want[0].values())
    for name, value in want[0].items():
        assert float((got[0][name] - value).abs().max()) <= 1e-5 * largest, name
    assert got[1].keys() == want[1].keys()
    assert got[1] == pytest.approx(want[1], rel=1e-4, abs=1e-6)
    assert got[1]["grad_norm"] == pytest.approx(want[1]["grad_norm"], rel=1e-5)


def test_laws_1_2_3_7_20_splits_do_not_show(workers, alone):
    """Against one worker with the whole batch: seven samples over the ranks, in one micro-batch or alone, with fillers, in any order."""
    batch = random_batch(7)
    want = alone.update(batch)
    same(workers.update(batch), want)
    kept = batch.lengths[batch.loss_mask.any(-1)].tolist()
    assert any(not indices for bins in microbatch.plan(kept, 2, 1) for indices in bins), "a rank has a filler"
    same(workers.update(batch[torch.randperm(7)], budget=1), want)


def test_laws_4_5_15_what_is_masked_is_absent(workers):
    batch = random_batch(7)
    mask = batch.loss_mask.clone()
    mask[[2, 5]] = False
    absent = workers.update(batch[torch.tensor([0, 1, 3, 4, 6])])
    same(workers.update(batch.replace(loss_mask=mask)), absent)
    dirty = workers.update(random_batch(7, garbage=10).replace(loss_mask=mask))
    clean = workers.update(batch.replace(loss_mask=mask))
    assert all(torch.equal(dirty[0][name], value) for name, value in clean[0].items())
    assert all(value.isfinite().all() for value in dirty[0].values())


def test_laws_16_21_nothing_to_train_on_one_rank_or_on_all(workers, alone):
    batch = random_batch(7)
    nothing = torch.zeros_like(batch.loss_mask)
    change, metrics = workers.update(batch.replace(loss_mask=nothing))
    assert metrics == {"skipped": 1.0} and not any(value.any() for value in change.values())
    one = nothing.clone()
    one[3] = batch.loss_mask[3]
    same(workers.update(batch.replace(loss_mask=one)), alone.update(batch.replace(loss_mask=one)))


def test_laws_11_23_24_after_an_update_the_engine_has_every_weight(workers):
    """The transport compares checksums after each sync and raises where they differ; the engine samples what the trainer scores."""
    policy = Policy(workers.groups, workers.config)
    report = policy.sync(0)
    told = [report.bytes_aliased + report.bytes_copied + report.bytes_sent]
    policy.update(workers.algorithm, random_batch(7))
    report = policy.sync(1)
    told.append(report.bytes_aliased + report.bytes_copied + report.bytes_sent)
    total = sum(value.nbytes for value in workers.before.values())
    assert told == [total * policy.replicas[0].dp_size] * 2
    asked = requests([[5, 6, 7], [8, 9], [10]], group=2, max_new_tokens=8, temperature=0.8)
    samples = {(s.request_id, s.index): s for s in policy.generate(asked)}
    assert len(samples) == 6 and all(set(s.versions.tolist()) == {1} for s in samples.values())
    batch = batch_of(asked, samples)
    gap = (policy.log_probs(batch) - batch.rollout_log_probs)[batch.response_mask].abs().max()
    assert math.isfinite(gap) and gap < 1e-4


def test_law_21_a_loss_that_raises_on_one_rank_ends_all(workers, monkeypatch):
    """Last, since it ends the workers: the others wait for a collective that never comes, and are ended after a moment.

    Ranks of one CP group work on the same samples and all raise, which leaves them usable.
    """
    monkeypatch.setattr("jackfield_workers.group.GRACE", 1.0)
    batch = random_batch(7)
    batch = batch.replace(sample_ids=torch.where(torch.arange(7) == 3, 999, batch.sample_ids))
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"policy worker \d of \d raised ValueError in update: the metric fell over"):
        workers.update(batch)
    assert time.monotonic() - start < 60
    if workers.dp > 1:
        with pytest.raises(WorkerError, match="have been stopped"):
            workers.update(batch)

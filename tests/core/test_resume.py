"""Law 29: a run that was killed, at any instant, continues to the same trajectory as one that never was."""

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from jackfield import checkpoint, hookimpl
from jackfield.errors import CheckpointError
from jackfield.testing.runs import fake_run

SETTINGS = {
    "steps": 7,
    "checkpoint": {"every": 1, "keep": 2},
    # The rate depends on the optimizer's step; twelve rows and four prompts a step cross an epoch every three steps.
    "policy": {"optimizer": {"lr": {"start": 2.0, "end": 0.5, "steps": 7}}},
}


class Noise:
    """Draws from both global generators, and keeps a file of its own in each checkpoint, slowly."""

    def __init__(self):
        self.history = []

    @hookimpl(wrapper=True)
    def advantage(self, run, batch):
        batch = yield
        factor = 1 + 0.1 * torch.rand(()).item() + 0.1 * random.random()
        self.history.append([run.step, factor, batch.sample_ids.tolist()])
        return batch.replace(advantages=batch.advantages * factor)

    @hookimpl
    def checkpoint_save(self, run, folder):
        text = json.dumps(self.history)
        with (folder / "noise.json").open("w") as file:
            for start in range(0, len(text), max(len(text) // 8, 1)):
                file.write(text[start : start + max(len(text) // 8, 1)])
                file.flush()
                time.sleep(0.002)

    @hookimpl
    def checkpoint_load(self, run, folder):
        self.history = json.loads((folder / "noise.json").read_text())


def outcome(folder: Path) -> tuple[dict, list, list]:
    """Weights, plugin's history and metrics at the end of a run."""
    last = checkpoint.complete(folder)[-1]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    clock = ("time/", "sync/", "resume/")
    metrics = [{k: v for k, v in row.items() if not k.startswith(clock)} for row in rows]
    return torch.load(last / "policy" / "table.pt"), json.loads((last / "noise.json").read_text()), metrics


def same(a, b) -> bool:
    return torch.equal(a[0]["table"], b[0]["table"]) and a[0]["steps"] == b[0]["steps"] and a[1:] == b[1:]


def start(folder: Path) -> int:
    """A child with everything imported already that trains in `folder`; its process id."""
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            torch.set_num_threads(1)
            fake_run(folder, plugins=[Noise()], **SETTINGS)
            status = 0
        finally:
            os._exit(status)
    return pid


def finish(folder: Path) -> None:
    _, status = os.waitpid(start(folder), 0)
    assert status == 0


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight")
    begin = time.monotonic()
    finish(folder)
    return outcome(folder), time.monotonic() - begin


@pytest.mark.parametrize("attempt", range(20))
def test_kill_dash_nine(attempt, straight, tmp_path):
    """Ten kills at random moments, ten while a checkpoint is being written."""
    expected, seconds = straight
    rng = random.Random(attempt)
    pid = start(tmp_path)
    if attempt % 2:
        wait = rng.uniform(0, 1) * seconds
        deadline = time.monotonic() + wait
        while time.monotonic() < deadline and os.waitpid(pid, os.WNOHANG) == (0, 0):
            time.sleep(0.001)
    else:
        wanted = rng.randrange(1, 7)
        partial = tmp_path / "checkpoints" / f".partial-{wanted:08d}"
        while not partial.exists():
            assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run ended before it was killed"
        time.sleep(rng.uniform(0, 0.015))
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    except (ProcessLookupError, ChildProcessError):
        pass
    finish(tmp_path)
    assert same(outcome(tmp_path), expected)
    assert not list((tmp_path / "checkpoints").glob(".partial-*")), "what the kill left half written stays about"


def test_six_steps_are_three_and_three(tmp_path):
    settings = {k: v for k, v in SETTINGS.items() if k != "steps"}
    fake_run(tmp_path / "straight", plugins=[Noise()], steps=6, **settings)
    fake_run(tmp_path / "halves", plugins=[Noise()], steps=3, **settings)
    fake_run(tmp_path / "halves", plugins=[Noise()], steps=6, **settings)
    assert same(outcome(tmp_path / "halves"), outcome(tmp_path / "straight"))


def test_the_comparison_can_fail(tmp_path):
    settings = {k: v for k, v in SETTINGS.items() if k != "steps"}
    fake_run(tmp_path / "a", plugins=[Noise()], steps=3, **settings)
    fake_run(tmp_path / "b", plugins=[Noise()], steps=3, seed=1, **settings)
    assert not same(outcome(tmp_path / "a"), outcome(tmp_path / "b"))


def test_only_the_newest_are_kept(tmp_path):
    fake_run(tmp_path, plugins=[Noise()], **SETTINGS)
    assert [p.name for p in checkpoint.complete(tmp_path)] == ["step-00000006", "step-00000007"]


def test_from_a_named_checkpoint(tmp_path):
    fake_run(tmp_path / "a", plugins=[Noise()], **SETTINGS)
    older = checkpoint.complete(tmp_path / "a")[0]
    resumed = fake_run(tmp_path / "b", plugins=[Noise()], **{**SETTINGS, "checkpoint": {"every": 1, "resume": older}})
    assert len(resumed.sample_ids) == 1
    assert torch.equal(outcome(tmp_path / "a")[0]["table"], outcome(tmp_path / "b")[0]["table"])


@pytest.mark.parametrize("victim", ["run.json", "rng.pt", "policy/table.pt"])
def test_a_truncated_file_is_named(victim, tmp_path):
    fake_run(tmp_path, plugins=[Noise()], **{**SETTINGS, "steps": 1})
    file = checkpoint.complete(tmp_path)[-1] / victim
    file.write_bytes(file.read_bytes()[:20])
    with pytest.raises(CheckpointError, match=r"step-00000001 is no readable checkpoint: .*; remove it to resume from the one before it"):
        fake_run(tmp_path, plugins=[Noise()], **SETTINGS)

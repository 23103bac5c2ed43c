"""One run at a time in a folder: a second live one is refused, and one that was killed keeps nobody out."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from jackfield import checkpoint, hookimpl
from jackfield.errors import ConfigError
from jackfield.testing.runs import fake_run


class Stuck:
    """Does not come back from the second step."""

    @hookimpl
    def step_start(self, run):
        while run.step == 1:
            time.sleep(0.01)


def child(work) -> int:
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return pid


def stuck(folder: Path) -> int:
    """A live run in `folder` that has saved its first step; its process id."""
    pid = child(lambda: fake_run(folder, plugins=[Stuck()], steps=3, checkpoint={"every": 1}))
    while not checkpoint.complete(folder):
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
        time.sleep(0.01)
    return pid


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


def test_a_second_live_run_is_refused_and_harms_nothing(tmp_path):
    pid = stuck(tmp_path)
    half_written = tmp_path / "checkpoints" / ".partial-00000002"
    half_written.mkdir()
    before = (tmp_path / "config.json").read_text()
    try:
        with pytest.raises(ConfigError, match=rf"is in use by a live run, process {pid} on .+: choose another dir, or end that run first$"):
            fake_run(tmp_path, steps=5, seed=1)
        assert half_written.is_dir(), "the live run's half-written checkpoint was taken for a killed one's"
        assert (tmp_path / "config.json").read_text() == before
    finally:
        kill(pid)


def test_a_killed_run_is_resumed_at_once(tmp_path):
    kill(stuck(tmp_path))
    fake_run(tmp_path, steps=3)
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_a_process_forked_by_the_run_keeps_nobody_out(tmp_path):
    """Workers and rewards' processes may outlive the run that was killed by a moment."""
    lock = checkpoint.claim(tmp_path)
    inherited = child(lambda: time.sleep(60))
    try:
        lock.close()
        _, status = os.waitpid(child(lambda: checkpoint.claim(tmp_path)), 0)
        assert status == 0
    finally:
        kill(inherited)


def test_a_finished_run_lets_go(tmp_path):
    fake_run(tmp_path, steps=1)
    _, status = os.waitpid(child(lambda: fake_run(tmp_path, steps=2)), 0)
    assert status == 0


def test_a_refused_resume_leaves_the_record_of_the_run(tmp_path):
    fake_run(tmp_path, steps=1)
    before = (tmp_path / "config.json").read_text()
    with pytest.raises(ConfigError, match="choose another dir"):
        fake_run(tmp_path, steps=2, seed=1, checkpoint={"resume": "never"})
    assert (tmp_path / "config.json").read_text() == before

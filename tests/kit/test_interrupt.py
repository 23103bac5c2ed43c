"""`jackfield train` and the signals that end it: after the step with a checkpoint, at the second at once."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from jackfield import checkpoint, cli
from jackfield.testing.runs import fake_run

FAKE = Path(__file__).parents[1] / "core" / "fake.yaml"


def start(folder: Path, *overrides: str) -> int:
    """A child that runs the command as a terminal would; what it says is in `folder/said`."""
    pid = os.fork()
    if pid == 0:
        status = 99
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            said = os.open(folder / "said", os.O_CREAT | os.O_WRONLY)
            os.dup2(said, 1)
            os.dup2(said, 2)
            sys.stdout, sys.stderr = os.fdopen(1, "w", closefd=False), os.fdopen(2, "w", closefd=False)
            sys.argv = ["jackfield", "train", str(FAKE), f"dir={folder / 'run'}", "trackers=[]", *overrides]
            cli.main()
            status = 0
        except SystemExit as ended:
            status = ended.code
        finally:
            sys.stderr.flush()
            os._exit(status)
    return pid


def steps(folder: Path) -> int:
    file = folder / "run" / "metrics.jsonl"
    return file.read_text().count("\n") if file.exists() else 0


def wait_for(condition, pid: int) -> None:
    while not condition():
        assert os.waitpid(pid, os.WNOHANG) == (0, 0), "the run ended by itself"
        time.sleep(0.002)


def ended(pid: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_saves_and_the_run_goes_on_as_if_it_had_not_been(tmp_path, number):
    pid = start(tmp_path, "steps=100000")
    wait_for(lambda: steps(tmp_path) >= 2, pid)
    os.kill(pid, number)
    assert ended(pid) == 128 + number
    done = steps(tmp_path)
    assert [c.name for c in checkpoint.complete(tmp_path / "run")] == [f"step-{done:08d}"]
    said = (tmp_path / "said").read_text()
    assert "ending after this step with a checkpoint" in said
    assert f"ended after step {done} of 100000; the same command goes on from {tmp_path}/run/checkpoints/step-{done:08d}" in said
    assert "Traceback" not in said
    (tmp_path / "straight").mkdir()
    assert ended(start(tmp_path, f"steps={done + 2}")) == 0
    assert ended(start(tmp_path / "straight", f"steps={done + 2}")) == 0

    def learnt(folder):
        rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if not k.startswith(("time/", "sync/", "resume/"))} for row in rows]

    assert learnt(tmp_path) == learnt(tmp_path / "straight")


def test_the_second_signal_ends_at_once(tmp_path):
    (tmp_path / "slow.py").write_text(
        "import time\nfrom jackfield import hookimpl\n\n\nclass Slow:\n    @hookimpl\n    def step_start(self, run):\n"
        "        while run.step == 2:\n            time.sleep(0.01)\n"
    )
    pid = start(tmp_path, f"hooks=['{tmp_path}/slow.py:Slow']")
    wait_for(lambda: steps(tmp_path) == 2, pid)
    os.kill(pid, signal.SIGINT)
    wait_for(lambda: "once more" in (tmp_path / "said").read_text(), pid)
    os.kill(pid, signal.SIGINT)
    assert ended(pid) == 130
    assert checkpoint.complete(tmp_path / "run") == []
    assert "Traceback" not in (tmp_path / "said").read_text()


def test_a_finished_run_says_that_there_is_nothing_to_train(tmp_path):
    assert ended(start(tmp_path, "steps=2")) == 0
    assert ended(start(tmp_path, "steps=1")) == 0
    assert "nothing to train: the run is at step 2, and steps is 1" in (tmp_path / "said").read_text()


def test_the_python_interface_leaves_signals_alone(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    fake_run(tmp_path, steps=1)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

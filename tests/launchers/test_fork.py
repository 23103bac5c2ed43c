"""Launcher `fork`: the same numbers as in one process, and every way a worker can go wrong."""

import dataclasses
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from jackfield import Trainer
from jackfield.errors import ConfigError, PluginError, WorkerError
from jackfield.microbatch import Share
from jackfield.testing.models import random_batch, tiny_model
from jackfield_workers import fork

FORK2 = ["launcher.name=fork", "launcher.workers=2", "launcher.device=cpu"]


def table(config):
    return torch.load(config.dir / "checkpoints" / "step-00000003" / "policy" / "table.pt")["table"]


@pytest.fixture
def pids(monkeypatch):
    """Process ids of all workers that were started."""
    found = []
    before = fork.ForkedProcess.__init__

    def remember(self, *arguments):
        before(self, *arguments)
        found.append(self.pid)

    monkeypatch.setattr(fork.ForkedProcess, "__init__", remember)
    return found


def gone(pids):
    """All processes have ended (a zombie has too)."""

    def ended(pid):
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] == "Z"
        except FileNotFoundError:
            return True

    for _ in range(200):
        if all(ended(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_the_run_is_the_same_on_one_process_one_worker_and_three(fake, pids):
    results = []
    for folder, overrides in [("local", []), ("one", ["launcher=fork"]), ("three", ["launcher.name=fork", "launcher.workers=3"])]:
        config = fake(*overrides, folder=folder)
        run = Trainer(config).train()
        results.append((table(config), run.metrics))
    for weights, metrics in results[1:]:
        torch.testing.assert_close(weights, results[0][0], rtol=1e-5, atol=1e-7)
        for name in ("reward", "loss", "grad_norm", "tokens", "rollout_gap/max"):
            assert metrics[name] == pytest.approx(results[0][1][name], rel=1e-5, abs=1e-7), name
    assert len(pids) == 4 and gone(pids)


def test_resume_on_another_number_of_workers(fake):
    whole = fake(*FORK2, folder="whole")
    Trainer(whole).train()
    Trainer(fake(*FORK2, "steps=2", folder="parts")).train()
    resumed = fake(folder="parts")
    Trainer(resumed).train()
    torch.testing.assert_close(table(resumed), table(whole), rtol=1e-5, atol=1e-7)


def test_an_exception_arrives_with_rank_and_traceback(fake, misbehave, pids):
    config = fake(*FORK2, *misbehave("raise"))
    with pytest.raises(
        WorkerError, match=r"policy worker 1 of 2 raised ValueError in update: the sky is falling; .*policy-1\.log"
    ) as found:
        Trainer(config).train()
    assert "\n" not in str(found.value)
    assert "forward_backward" in found.value.__notes__[0] and "misbehave.py" in found.value.__notes__[0]
    assert gone(pids)


@pytest.mark.parametrize(("what", "fate"), [("die", "was killed by signal 9"), ("exit", "exited with code 3")])
def test_a_dead_worker_is_noticed_at_once_and_named(fake, misbehave, pids, what, fate):
    start = time.monotonic()
    with pytest.raises(WorkerError, match=rf"policy worker 1 of 2 \(pid \d+\) {fate}.* during update; its output is in .*policy-1\.log"):
        Trainer(fake(*FORK2, *misbehave(what))).train()
    assert gone(pids) and time.monotonic() - start < 60  # law 22's own bound, not a speed


@pytest.mark.parametrize("what", ["late", "no gradient"])
def test_a_late_rank_and_one_without_gradients_are_waited_for(fake, misbehave, what):
    run = Trainer(fake(*FORK2, *misbehave(what))).train()
    assert run.step == 3


def test_an_error_of_all_ranks_leaves_them_usable(fake, misbehave):
    launcher = fork.ForkLauncher(fork.ForkLauncher.Config(workers=2, device="cpu"))
    try:
        group = launcher.start(fake(*misbehave("", name="RaisesOnAll")), ["policy"])["policy"]
        group.call("setup", "policy")
        with pytest.raises(WorkerError, match=r"policy worker \d of 2 raised OutOfMemoryError in forward: out of memory: wanted 7 GiB"):
            group.call("forward", "policy", Share(random_batch(2), [2]), None)
        assert [p.dp_rank for p in group.call("setup", "policy")] == [0, 1]
    finally:
        launcher.stop()
    with pytest.raises(WorkerError):
        group.call("setup", "policy")


def test_a_stream_may_be_abandoned(fake):
    from jackfield.components import Request
    from jackfield.config import SamplingConfig

    launcher = fork.ForkLauncher(fork.ForkLauncher.Config(workers=2, device="cpu"))
    try:
        group = launcher.start(fake(), ["policy"])["policy"]
        group.call("setup", "policy")
        group.call("setup_engine")
        group.call("sync", 0)
        request = Request(0, (2, 3), tuple(range(400)), SamplingConfig(max_new_tokens=64, ignore_eos=True))
        stream = group.stream("generate", [[request], [request]])
        assert len(next(stream).tokens) == 64
        stream.close()
        assert sum(1 for _ in group.stream("generate", [[request], []])) == 400
        half = group.stream("generate", [[request], []])
        next(half)
        assert len(group.call("sync", 1)) == 2, "a call in the middle of a stream waits for its turn"
        assert sum(1 for _ in half) == 399
    finally:
        launcher.stop()


def test_a_plugin_that_is_another_one_on_the_worker_is_named(fake, monkeypatch):
    real = fork.fingerprint
    monkeypatch.setattr(fork, "fingerprint", lambda config: tuple((n, "0.0.9" if n == "jackfield" else v) for n, v in real(config)))
    with pytest.raises(PluginError, match=r"policy worker \d of 2: .*resolves jackfield to '.*', the controller to '0\.0\.9'"):
        Trainer(fake(*FORK2)).train()
    monkeypatch.setattr(fork, "fingerprint", lambda config: real(config)[::-1])
    with pytest.raises(PluginError, match=r"policy worker \d of 2.* has other plugins or another order than the controller"):
        Trainer(fake(*FORK2)).train()


def test_a_missing_extra_on_one_worker_is_named_before_the_first_step(fake, monkeypatch, tmp_path):
    """PEFT is installed here and for worker 0, but not for worker 1."""
    (tmp_path / "without" / "peft").mkdir(parents=True)
    (tmp_path / "without" / "peft" / "__init__.py").write_text("raise ImportError('No module named peft')\n")
    before = fork.ForkedProcess.__init__

    def without(self, name, order):
        hidden = [str(tmp_path / "without")] if order.argument[0].rank == 1 else []
        before(self, name, dataclasses.replace(order, path=[*hidden, *order.path]))

    monkeypatch.setattr(fork.ForkedProcess, "__init__", without)
    config = fake(*FORK2, f"policy.model={tiny_model(tmp_path / 'model')}", "policy.backend={name: torch, lora: {r: 4}}")
    with pytest.raises(PluginError, match=r"policy worker 1 of 2: backend: lora needs PEFT; pip install 'jackfield\[lora\]'"):
        Trainer(config).train()
    assert not list(config.dir.glob("metrics*"))


def test_roles_with_workers_of_their_own(fake, pids):
    launcher = fork.ForkLauncher(fork.ForkLauncher.Config(workers=3, device="cpu"))
    try:
        groups = launcher.start(fake("critic.gpus=1"), ["policy", "reference", "critic"])
        assert groups["policy"] is groups["reference"] and (groups["policy"].size, groups["critic"].size) == (2, 1)
        assert sorted(p.dp_size for role in ("policy", "critic") for p in groups[role].call("setup", role)) == [1, 2, 2]
    finally:
        launcher.stop()
    assert len(pids) == 3 and gone(pids)


def test_no_gpu_is_an_error_where_one_is_demanded(fake):
    if torch.cuda.is_available():
        pytest.skip("this host has a GPU")
    with pytest.raises(ConfigError, match="device is 'cuda' but torch finds no GPU: set device to 'cpu' or 'auto'"):
        Trainer(fake("launcher.name=fork", "launcher.device=cuda")).train()


def test_killing_the_controller_ends_its_workers(fake, tmp_path):
    script = tmp_path / "main.py"
    script.write_text(
        "import os, sys, time\n"
        "from jackfield import load_config\n"
        "from jackfield_workers.fork import ForkLauncher\n"
        "launcher = ForkLauncher(ForkLauncher.Config(workers=2, device='cpu'))\n"
        "groups = launcher.start(load_config(sys.argv[1], [f'dir={sys.argv[2]}']), ['policy'])\n"
        "print(*(p.pid for p in groups['policy'].processes), flush=True)\n"
        "time.sleep(600)\n"
    )
    config = os.path.join(os.path.dirname(__file__), "..", "core", "fake.yaml")
    process = subprocess.Popen([sys.executable, str(script), config, str(tmp_path / "run")], stdout=subprocess.PIPE, text=True)
    workers = [int(pid) for pid in process.stdout.readline().split()]
    assert len(workers) == 2 and gone([]) is not False
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(workers)


RESTART = ["checkpoint.every=1", "checkpoint.max_restarts=1"]
PPO = ["algorithm.name=ppo", "algorithm.kl.coef=0.01", "critic.optimizer.lr=0.5"]


def test_the_seeds_case_at_quarter_scale(fake, pids):
    """Actor on 2, critic on 1, reward model on 1, and an engine on 1 of its own: the same run as in one process."""
    together = fake(*PPO, folder="together")
    Trainer(together).train()
    apart = fake(
        *PPO,
        *["launcher.name=fork", "launcher.workers=5", "launcher.device=cpu"],
        *["policy.gpus=2", "critic.gpus=1", "engine.name=jackfield.testing.fakes:FakeEngine", "engine.gpus=1"],
        "rewards=[{name: 'jackfield.testing.fakes:FakeReward', gpus: 1}]",
        folder="apart",
    )
    run = Trainer(apart).train()
    assert len(pids) == 5 and gone(pids)
    torch.testing.assert_close(table(apart), table(together), rtol=1e-5, atol=1e-7)
    critics = [torch.load(c.dir / "checkpoints" / "step-00000003" / "critic" / "table.pt")["table"] for c in (together, apart)]
    torch.testing.assert_close(*critics, rtol=1e-5, atol=1e-7)
    assert {p.name for p in run.policy.engines.processes} == {"engine worker 0 of 1"}
    assert run.metrics["sync/bytes_sent"] > 0


def test_a_reward_on_workers_is_isolated_there(fake, tmp_path):
    file = tmp_path / "fussy.py"
    file.write_text(
        "from jackfield.components import Reward\n"
        "class Fussy(Reward):\n"
        "    def score(self, records):\n"
        "        if any(r['row'] == 3 for r in records):\n"
        "            raise ValueError('no threes')\n"
        "        return [float(r['row']) for r in records]\n"
    )
    config = fake(
        "dataset.name=jackfield.testing.fakes:FakeDataset",
        "dataset.rows=4",
        "launcher.name=fork",
        "launcher.workers=3",
        f"rewards=[{{name: '{file}:Fussy', gpus: 2}}]",
        "steps=1",
    )
    seen = []

    class Look:
        from jackfield import hookimpl

        @hookimpl
        def filter(self, run, batch):
            seen.extend((r["row"], float(s)) for r, s in zip(batch.records, batch.scores["Fussy"], strict=True))
            return torch.ones(len(batch), dtype=torch.bool)

    trainer = Trainer(config)
    trainer.run.manager.register(Look(), "look")
    trainer.train()
    assert {row for row, _ in seen} == {0, 1, 2, 3}
    for row, score in seen:
        assert score != score if row == 3 else score == row


def test_a_run_resumes_by_itself_when_a_worker_is_killed(fake, misbehave, tmp_path, capfd):
    whole = fake(*FORK2, folder="whole")
    Trainer(whole).train()
    killed = fake(
        *FORK2, *misbehave("die", marker=str(tmp_path / "once")), "checkpoint.every=1", "checkpoint.max_restarts=1", folder="killed"
    )
    assert Trainer(killed).train().step == 3
    assert "was killed by signal 9" in capfd.readouterr().err
    assert torch.equal(table(killed), table(whole))
    lines = (killed.dir / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 3


def test_restarts_are_counted(fake, misbehave):
    with pytest.raises(WorkerError, match="was killed by signal 9"):
        Trainer(fake(*FORK2, *misbehave("die"), "checkpoint.max_restarts=1")).train()


def test_local_says_what_it_cannot_do(fake):
    with pytest.raises(ConfigError, match="critic wants gpus: 4, but launcher local is one process: use launcher fork or ray"):
        Trainer(fake(*PPO, "critic.gpus=4")).train()

"""Trackers against runs of the core with fake models; wandb and mlflow against fakes of their libraries."""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest

from jackfield import registry
from jackfield.config import ComponentSpec, RunConfig
from jackfield.errors import PluginError
from jackfield.trainer import Trainer


def config(folder, trackers, **changes):
    fakes = "jackfield.testing.fakes"
    base = {
        "dir": folder,
        "steps": 3,
        "policy": {"model": "none", "backend": f"{fakes}:FakeBackend", "optimizer": {"lr": 2.0}},
        "engine": f"{fakes}:FakeEngine",
        "transport": f"{fakes}:FakeTransport",
        "rollout": f"{fakes}:FakeRollout",
        "dataset": f"{fakes}:FakeDataset",
        "rewards": [f"{fakes}:FakeReward"],
        "algorithm": "grpo",
        "sampling": {"max_new_tokens": 6},
        "batch": {"prompts": 2, "group_size": 4},
        "trackers": trackers,
    }
    return RunConfig(**(base | changes))


def train(folder, trackers, **changes):
    return Trainer(config(folder, trackers, **changes)).train()


def logged(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def scalars(folder, name):
    loader = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    found = loader.EventAccumulator(str(folder / "tensorboard"))
    found.Reload()
    return [(e.step, pytest.approx(e.value, rel=1e-5)) for e in found.Scalars(name)]


def test_tensorboard_has_every_step_and_metric(tmp_path):
    pytest.importorskip("tensorboard")
    train(tmp_path, ["tensorboard"])
    rows = logged(tmp_path)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for name in ("reward", "loss", "time/step"):
        assert [(row["step"], row[name]) for row in rows] == scalars(tmp_path, name)


def test_tensorboard_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    train(tmp_path, ["tensorboard"])
    train(tmp_path, ["tensorboard"], steps=5)
    assert [(row["step"], row["reward"]) for row in logged(tmp_path)] == scalars(tmp_path, "reward")


def test_samples(tmp_path):
    train(tmp_path, [{"name": "samples", "every": 2, "count": 3}], steps=5)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1] * 3 + [2] * 3 + [4] * 3 + [5] * 3
    assert {row["sample"] for row in rows[:3]} == {0, 2, 5}
    first = rows[0]
    words = first["response"].split()
    assert first["reward"] == pytest.approx(words.count(first["prompt"]) / len(words))
    assert first["scores"] == {"FakeReward": pytest.approx(first["reward"])}
    assert first["tokens"] == len(words)
    assert first["finish_reason"] in ("stop", "length")
    assert first["trained"] is True


def test_samples_of_steps_done_again_are_dropped(tmp_path):
    train(tmp_path, [{"name": "samples", "every": 1, "count": 1}])
    kept = (tmp_path / "samples.jsonl").read_text()
    (tmp_path / "samples.jsonl").write_text(kept + kept.splitlines()[-1].replace('"step": 3', '"step": 4') + '\n{"step": 4, "pro')
    train(tmp_path, [{"name": "samples", "every": 1, "count": 1}], steps=4)
    rows = [json.loads(line) for line in (tmp_path / "samples.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]


class FakeWandb(ModuleType):
    def __init__(self):
        super().__init__("wandb")
        self.inits, self.rows, self.ends = [], [], []

    def init(self, **options):
        self.inits.append(options)
        return SimpleNamespace(id=options["id"] or "run-1", log=lambda m, step: self.rows.append((step, m)), finish=self.finish)

    def finish(self, exit_code):
        self.ends.append(exit_code)


class FakeMlflow(ModuleType):
    def __init__(self):
        super().__init__("mlflow")
        self.uris, self.params, self.rows, self.ends, self.broken = [], {}, [], [], False
        self.utils = SimpleNamespace(time=SimpleNamespace(get_current_time_millis=lambda: 1))
        self.entities = SimpleNamespace(Metric=lambda name, value, time, step: (step, name, value))

    def MlflowClient(self, tracking_uri):
        self.uris.append(tracking_uri)
        return self

    def get_experiment_by_name(self, name):
        return None

    def create_experiment(self, name):
        return "7"

    def create_run(self, experiment, run_name):
        return SimpleNamespace(info=SimpleNamespace(run_id=f"{experiment}/{run_name}"))

    def log_param(self, run, name, value):
        self.params[name] = value

    def log_batch(self, run, metrics):
        if self.broken:
            raise ConnectionError("no route to the server")
        self.rows += metrics

    def set_terminated(self, run, status):
        self.ends.append((run, status))


@pytest.fixture(params=[FakeWandb, FakeMlflow])
def library(request, monkeypatch):
    fake = request.param()
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.delitem(sys.modules, f"jackfield_trackers.{fake.__name__}", raising=False)
    yield fake
    sys.modules.pop(f"jackfield_trackers.{fake.__name__}", None)


def test_wandb_and_mlflow_get_every_step_offline(tmp_path, library):
    train(tmp_path, [library.__name__])
    rewards = [(row["step"], round(row["reward"], 6)) for row in logged(tmp_path)]
    if library.__name__ == "wandb":
        (options,) = library.inits
        assert (options["mode"], options["dir"], options["id"]) == ("offline", str(tmp_path), None)
        assert options["config"]["steps"] == 3
        assert [(step, round(m["reward"], 6)) for step, m in library.rows] == rewards
        assert library.ends == [0]
    else:
        assert library.uris == [f"sqlite:///{tmp_path}/mlflow.db"]
        assert json.loads(library.params["batch"])["group_size"] == 4
        assert [(s, round(v, 6)) for s, n, v in library.rows if n == "reward"] == rewards
        assert library.ends == [(f"7/{tmp_path.name}", "FINISHED")]


def test_wandb_and_mlflow_go_on_in_the_same_run_after_a_resume(tmp_path, library):
    train(tmp_path, [library.__name__])
    train(tmp_path, [library.__name__], steps=4)
    if library.__name__ == "wandb":
        assert [o["id"] for o in library.inits] == [None, "run-1"]
        assert [step for step, _ in library.rows] == [1, 2, 3, 4]
    else:
        assert [run for run, _ in library.ends] == [f"7/{tmp_path.name}"] * 2


def test_a_run_that_fails_is_marked(tmp_path, library):
    with pytest.raises(PluginError):
        train(tmp_path, [library.__name__], rewards=[{"name": "exact", "answer": "nothing", "max_failures": 1}])
    assert library.ends in ([1], [(f"7/{tmp_path.name}", "FAILED")])


def test_a_server_that_goes_away_does_not_stop_the_run(tmp_path, monkeypatch):
    fake = FakeMlflow()
    fake.broken = True
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    monkeypatch.delitem(sys.modules, "jackfield_trackers.mlflow", raising=False)
    with pytest.warns(UserWarning, match="Mlflow could not log step 1: ConnectionError"):
        run = train(tmp_path, ["mlflow"])
    assert run.step == 3
    sys.modules.pop("jackfield_trackers.mlflow", None)


def test_a_missing_library_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    monkeypatch.delitem(sys.modules, "jackfield_trackers.wandb", raising=False)
    with pytest.raises(PluginError, match=r"pip install 'jackfield\[trackers\]'"):
        train(tmp_path, ["wandb"])


def test_the_console_shows_what_went_wrong_where_it_did(capfd):
    metrics = {"reward": 0.5, "skipped": 0.0, "reward/mine/failed": 3.0, "bad_gradients": 1.0}
    console = registry.build("tracker", ComponentSpec(name="console"))
    console.bar = None
    console.step_end(SimpleNamespace(step=1, config=SimpleNamespace(steps=2)), metrics)
    assert capfd.readouterr().err == "step 1/2  reward 0.5  reward/mine/failed 3  bad_gradients 1\n"

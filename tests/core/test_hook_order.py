"""The order in which hooks are called over a whole run, pinned: plugins may rely on it."""

import pytest

from jackfield import hookimpl
from jackfield.hookspecs import Hooks
from jackfield.testing.runs import fake_config, fake_run
from jackfield.trainer import Trainer


class Recorder:
    """Notes every hook before anything else runs in it."""

    def __init__(self):
        self.calls = []


def _note(name, arguments):
    code = f"def {name}(self, {', '.join(arguments)}):\n    self.calls.append({name!r})\n"
    scope = {}
    exec(code, scope)
    return hookimpl(tryfirst=True)(scope[name])


for _name, _spec in vars(Hooks).items():
    if not _name.startswith("_"):
        setattr(Recorder, _name, _note(_name, _spec.__code__.co_varnames[1 : _spec.__code__.co_argcount]))

HELD_OUT = {"name": "evaluate", "every": 1, "dataset": {"name": "jackfield.testing.fakes:FakeDataset", "rows": 2}}
STEP = ["step", "step_start", "rollout", "score", "filter", "advantage", "update", "weights_synced", "step_end"]


def recorded(folder, **fields):
    recorder = Recorder()
    trainer = Trainer(fake_config(folder, **fields))
    trainer.run.manager.register(recorder)
    trainer.train()
    return recorder.calls


def test_a_whole_run(tmp_path):
    calls = recorded(tmp_path, steps=2, checkpoint={"every": 1})
    assert calls == ["run_start", *STEP, "checkpoint_save", *STEP, "checkpoint_save", "run_end"]


def test_a_resumed_run_loads_before_it_starts(tmp_path):
    fake_run(tmp_path, steps=1)
    assert recorded(tmp_path, steps=2) == ["checkpoint_load", "run_start", *STEP, "checkpoint_save", "run_end"]


def test_a_finished_run_does_nothing_more(tmp_path):
    fake_run(tmp_path, steps=1)
    assert recorded(tmp_path, steps=1) == ["checkpoint_load"]


def test_evaluation_comes_within_step_end(tmp_path):
    calls = recorded(tmp_path, steps=1, hooks=[HELD_OUT])
    assert calls == ["run_start", *STEP, "evaluate", "rollout", "score", "checkpoint_save", "run_end"]


def test_an_error_ends_with_run_error_alone(tmp_path):
    class Fails:
        @hookimpl
        def update(self, run, batch):
            raise RuntimeError("on purpose")

    recorder = Recorder()
    trainer = Trainer(fake_config(tmp_path))
    for plugin in (recorder, Fails()):
        trainer.run.manager.register(plugin)
    with pytest.raises(Exception, match="on purpose"):
        trainer.train()
    assert recorder.calls == ["run_start", *STEP[: STEP.index("weights_synced")], "run_error"]


def test_configure_comes_first_of_all(tmp_path):
    seen = []

    class Early:
        @hookimpl
        def configure(self, run):
            seen.append((run.step, (tmp_path / "run").exists()))

    (tmp_path / "early.py").write_text("")
    import sys

    sys.modules["early_plugin"] = type(sys)("early_plugin")
    sys.modules["early_plugin"].Early = Early
    Trainer(fake_config(tmp_path / "run", hooks=["early_plugin:Early"]))
    assert seen == [(0, False)], "configure runs before anything is started or written"

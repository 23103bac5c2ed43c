"""Each run and checkpoint says which plugins made it, and a resume with others is noticed by the stated rule (docs/plugins-recorded.md)."""

import json
import warnings

import pytest

from jackfield import __version__, checkpoint, hookimpl
from jackfield.errors import CheckpointError
from jackfield.testing.fakes import FakeReward
from jackfield.testing.runs import fake_run


class Watches:
    @hookimpl
    def step_end(self, run, metrics):
        pass


class Shapes:
    @hookimpl(wrapper=True)
    def advantage(self, run, batch):
        return (yield)


class Other(FakeReward):
    pass


def here(name: str) -> str:
    return f"{__file__}:{name}"


def test_what_is_written(tmp_path):
    fake_run(tmp_path, steps=1, hooks=[here("Shapes")])
    run = json.loads((tmp_path / "plugins.json").read_text())
    for name in ("plugins.json", "config.json"):
        assert (checkpoint.complete(tmp_path)[-1] / name).read_text() == (tmp_path / name).read_text()
    algorithm = run["jackfield.testing.runs:FakeAlgorithm"]
    assert algorithm == {
        "class": "jackfield.testing.runs:FakeAlgorithm",
        "distribution": f"jackfield {__version__}",
        "stages": ["advantage", "update"],
    }
    assert run[here("Shapes")]["stages"] == ["advantage"]
    assert run[here("Shapes")]["distribution"] == "", "a single file has no version"


def test_the_same_plugins_say_nothing(tmp_path):
    fake_run(tmp_path, steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fake_run(tmp_path, steps=2)


def test_a_plugin_of_no_stage_warns(tmp_path):
    fake_run(tmp_path, steps=1)
    with pytest.warns(UserWarning, match="resuming with other plugins: .*Watches is new"):
        fake_run(tmp_path, steps=2, hooks=[here("Watches")])


@pytest.mark.parametrize(
    ("fields", "what"),
    [({"hooks": [here("Shapes")]}, "Shapes is new"), ({"rewards": [{"name": here("Other"), "label": "x"}]}, "reward x is new")],
)
def test_a_plugin_of_a_stage_is_an_error(tmp_path, fields, what):
    fake_run(tmp_path, steps=1)
    with pytest.raises(CheckpointError, match=what) as caught:
        fake_run(tmp_path, steps=2, **fields)
    assert str(caught.value).endswith("start in another dir, or say checkpoint.changed_plugins=warn")
    with pytest.warns(UserWarning, match=what):
        done = fake_run(tmp_path, steps=2, checkpoint={"changed_plugins": "warn"}, **fields)
    assert done.run.step == 2


def test_another_class_under_the_same_label(tmp_path):
    fake_run(tmp_path, steps=1, rewards=[{"name": here("Other"), "label": "same"}])
    with pytest.raises(CheckpointError, match=r"reward same was .*Other and is .*FakeReward"):
        fake_run(tmp_path, steps=2, rewards=[{"name": "jackfield.testing.fakes:FakeReward", "label": "same"}])


def test_another_version_warns(tmp_path):
    fake_run(tmp_path, steps=1)
    file = checkpoint.complete(tmp_path)[-1] / "plugins.json"
    file.write_text(file.read_text().replace(f"jackfield {__version__}", "jackfield 0.0.9"))
    with pytest.warns(UserWarning, match=f"was of jackfield 0.0.9 and is of jackfield {__version__}"):
        fake_run(tmp_path, steps=2)


def test_other_settings_are_said(tmp_path):
    fake_run(tmp_path, steps=1)
    with pytest.warns(UserWarning, match="resuming with other settings: ") as caught:
        fake_run(tmp_path, steps=2, seed=3, batch={"prompts": 2, "group_size": 4})
    (text,) = [str(w.message) for w in caught]
    assert text == "resuming with other settings: seed was 0 and is 3; batch.prompts was 4 and is 2"


def test_what_decides_nothing_of_what_is_learnt_is_not_said(tmp_path):
    fake_run(tmp_path / "a", steps=1)
    (tmp_path / "a").rename(tmp_path / "b")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fake_run(tmp_path / "b", steps=3, checkpoint={"every": 1, "keep": 1})


@pytest.mark.parametrize("name", ["plugins.json", "config.json"])
def test_a_torn_record_is_named(tmp_path, name):
    fake_run(tmp_path, steps=1)
    (checkpoint.complete(tmp_path)[-1] / name).write_text("{")
    with pytest.raises(CheckpointError, match="step-00000001 is no readable checkpoint"):
        fake_run(tmp_path, steps=2)

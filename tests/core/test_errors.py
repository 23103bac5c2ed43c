"""Every mistake that a user or plugin author can make: one line that names the culprit, the cause and the way out (design, section 4)."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jackfield import Algorithm, Component, Reward, hookimpl, registry
from jackfield.cli import app
from jackfield.config import ComponentSpec, RewardSpec, load_config
from jackfield.errors import CheckpointError, ConfigError, DataError, JackfieldError, PluginError
from jackfield.manager import PluginManager
from jackfield.testing.runs import fake_config, fake_run
from jackfield.trainer import Trainer

FAKE = Path(__file__).parent / "fake.yaml"


def message(error, call, *args, **kwargs) -> str:
    """The error's text; one line, always."""
    with pytest.raises(error) as caught:
        call(*args, **kwargs)
    text = str(caught.value)
    assert "\n" not in text, text
    assert isinstance(caught.value, JackfieldError)
    return text


def install(folder: Path, name: str, points: str, requires: str = "", extras: str = "") -> None:
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}{extras}")
    (info / "entry_points.txt").write_text(points)


# ---- finding a plugin -----------------------------------------------------------------------------------------------------


def test_unknown_name_gives_the_nearest():
    text = message(PluginError, registry.find, "algorithm", "grppo")
    assert text.startswith("no algorithm is called 'grppo'; did you mean ")
    assert "'grpo'" in text


def test_unknown_name_with_nothing_near_lists_what_there_is():
    text = message(PluginError, registry.find, "transport", "pigeon")
    assert "installed: " in text
    assert "alias" in text
    assert "path/to/file.py:Class works too" in text


def test_two_distributions_with_one_name(tmp_path, monkeypatch):
    for name in ("jackfield-one", "jackfield-two"):
        install(tmp_path, name, "[jackfield.reward]\ntwin = json:JSONDecoder\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = message(PluginError, registry.load, "reward", "twin")
    assert text == ("reward 'twin' is provided by jackfield-one 1.0 and jackfield-two 1.0: say jackfield-one/twin or jackfield-two/twin")
    assert registry.find("reward", "jackfield-two/twin").distribution == "jackfield-two"


def test_failing_import_names_the_extra_to_install(tmp_path, monkeypatch):
    extras = "Provides-Extra: fast\nRequires-Dist: no-such-engine>=1; extra == 'fast'\n"
    install(tmp_path, "jackfield-lazy", "[jackfield.reward]\nlazy = jackfield_lazy_mod:R\n", extras=extras)
    (tmp_path / "jackfield_lazy_mod.py").write_text("import no_such_engine\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    text = message(PluginError, registry.load, "reward", "lazy")
    assert text == (
        "reward 'lazy' of jackfield-lazy 1.0 cannot be imported: ModuleNotFoundError: No module named 'no_such_engine' "
        f"({tmp_path}/jackfield_lazy_mod.py:1); "
        "install it with: pip install 'jackfield-lazy[fast]'"
    )


def test_failing_import_for_another_reason_says_it(tmp_path, monkeypatch):
    install(tmp_path, "jackfield-bad", "[jackfield.reward]\nbad = jackfield_bad_mod:R\n")
    (tmp_path / "jackfield_bad_mod.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert "reward 'bad' of jackfield-bad 1.0 cannot be imported: ZeroDivisionError" in message(PluginError, registry.load, "reward", "bad")


def test_a_file_that_is_not_there(tmp_path):
    text = message(PluginError, registry.load, "reward", f"{tmp_path}/nothing.py:fn")
    assert f"there is no file {tmp_path}/nothing.py" in text


def test_a_name_that_is_not_in_the_file(tmp_path):
    (tmp_path / "some.py").write_text("x = 1\n")
    assert "has no attribute 'Clas'" in message(PluginError, registry.load, "algorithm", f"{tmp_path}/some.py:Clas")


# ---- what a component must be ---------------------------------------------------------------------------------------------


class Half(Algorithm):
    def advantage(self, batch):
        return batch


class Tomorrow(Reward):
    api = 99

    def score(self, records):
        return []


class Yesterday(Tomorrow):
    api = 0


def here(name: str) -> str:
    return f"{__file__}:{name}"


def test_missing_method():
    assert "lacks the method loss that every algorithm has" in message(PluginError, registry.load, "algorithm", here("Half"))


def test_wrong_kind():
    assert "derive it from jackfield.Algorithm" in message(PluginError, registry.load, "algorithm", here("ShortScores"))


@pytest.mark.parametrize(("name", "who"), [("Tomorrow", "upgrade jackfield"), ("Yesterday", "upgrade the plugin")])
def test_api_version(name, who):
    text = message(PluginError, registry.load, "reward", here(name))
    assert "needs plugin API" in text
    assert "this jackfield speaks 1 to 1" in text
    assert text.endswith(who)


# ---- configuration --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("bacth.prompts=2", "unknown field 'bacth'; did you mean 'batch'?"),
        ("batch.promts=2", "unknown field 'batch.promts'; did you mean 'prompts'?"),
        ("batch.prompts=two", "batch.prompts: Input should be a valid integer"),
        ("batch.prompts=0", "batch.prompts: Input should be greater than 0, but got 0"),
        ("sampling.top_p=1.5", "sampling.top_p: Input should be less than or equal to 1, but got 1.5"),
        ("steps", "override 'steps' is not of the form field.subfield=value"),
        ("rewards.3=exact", "override 'rewards.3=exact': '3' is no index below 1"),
        ("rewards.first=exact", "override 'rewards.first=exact': 'first' is no index below 1"),
        ("rewards=[{name: x, label: policy}]", "rewards.0: Value error, policy is a role of its own; give the reward another label"),
        ("rollout=5", "rollout: Input should be a valid dictionary or instance of ComponentSpec, but got 5"),
        ("seed=-1", "seed: Input should be greater than or equal to 0, but got -1"),
        ("sampling.temperature=.inf", "sampling.temperature: Input should be a finite number, but got inf"),
        ("sampling.stop_ids=[-1]", "sampling.stop_ids.0: Input should be greater than or equal to 0, but got -1"),
        ("policy.optimizer.betas=[0.9,1]", "policy.optimizer.betas.1: Input should be less than 1, but got 1"),
        # A schedule is a number or a ramp: the alternative that was meant is the one that is spoken of.
        ("policy.optimizer.lr=-1", "policy.optimizer.lr: Input should be greater than or equal to 0, but got -1"),
        ("policy.optimizer.lr={start: 1, ende: 2}", "unknown field 'policy.optimizer.lr.ende'; did you mean 'end'? (and 2 more)"),
        ("policy.optimizer.lr={start: 1, end: 2}", "field 'policy.optimizer.lr.steps' is missing"),
        ("policy.optimizer.lr={start: 1, end: 2, steps: 0}", "policy.optimizer.lr.steps: Input should be greater than 0, but got 0"),
        ("policy.optimizer.lr={start: -1, end: 2, steps: 3}", "policy.optimizer.lr: Value error, Ramp should not go below 0, but got"),
    ],
)
def test_fields(override, wanted):
    assert wanted in message(ConfigError, load_config, FAKE, [override])


def test_missing_field(tmp_path):
    (tmp_path / "no.yaml").write_text("policy: {model: x}\ndataset: d\n")
    assert "field 'algorithm' is missing" in message(ConfigError, load_config, tmp_path / "no.yaml")


def test_missing_config_file(tmp_path):
    assert message(ConfigError, load_config, tmp_path / "no.yaml") == f"there is no config file {tmp_path}/no.yaml"


def test_broken_yaml(tmp_path):
    (tmp_path / "no.yaml").write_text("policy: {model: x\n")
    assert "no.yaml: " in message(ConfigError, load_config, tmp_path / "no.yaml")


def test_a_components_own_field():
    spec = ComponentSpec(name="grpo", options={"clip_lo": 0.1})
    text = message(ConfigError, registry.build, "algorithm", spec)
    assert text == "algorithm 'grpo': unknown field 'clip_lo'; did you mean 'clip_low'?"


def test_a_components_own_type():
    spec = ComponentSpec(name="grpo", options={"epochs": "many"})
    assert "algorithm 'grpo': epochs: " in message(ConfigError, registry.build, "algorithm", spec)


@pytest.mark.parametrize("option", ["clip_low", "clip_high"])
@pytest.mark.parametrize("name", ["grpo", "dapo", "gspo", "cispo", "gmpo", "dppo", "ppo"])
def test_a_clip_ratio_below_zero(name, option):
    text = message(ConfigError, registry.build, "algorithm", ComponentSpec(name=name, options={option: -0.1}))
    assert f"algorithm '{name}': {option}: Input should be greater than or equal to 0, but got -0.1" in text


def test_a_setting_of_the_core_beside_a_plugins_own():
    spec = RewardSpec(name="share", options={"weigth": 2})
    assert message(ConfigError, registry.build, "reward", spec) == "reward 'share': unknown field 'weigth'; did you mean 'weight'?"


def test_overrides_below_what_the_file_leaves_out():
    config = load_config(FAKE, ["engine={name: vllm}", "engine.gpus=2", "launcher.processes=2"])
    assert (config.engine.name, config.engine.gpus) == ("vllm", 2)
    assert (config.launcher.name, config.launcher.options) == ("local", {"processes": 2})


def test_a_plugin_that_needs_a_setting():
    text = message(ConfigError, registry.build, "hooks", ComponentSpec(name="evaluate"))
    assert text == "hooks 'evaluate': field 'dataset' is missing; write {name: evaluate, dataset: ...} in the config"


def test_leaving_out_a_plugin_that_is_not_there(tmp_path):
    text = message(ConfigError, Trainer, fake_config(tmp_path, trackers=["console"], disabled=["consol"]))
    assert text == "no:consol leaves out a plugin that this run does not have; did you mean 'console'?"
    text = message(ConfigError, Trainer, fake_config(tmp_path, disabled=["zzz"]))
    assert "it has: metrics.jsonl, " in text
    Trainer(fake_config(tmp_path, trackers=["console"], disabled=["console"]))


def test_nothing_that_scores(tmp_path):
    text = message(ConfigError, fake_run, tmp_path, rewards=[])
    assert text == "nothing scores the samples: name a reward under `rewards` (`jackfield plugins reward` lists them)"
    assert not (tmp_path / "metrics.jsonl").exists()
    fake_run(tmp_path, rewards=[], plugins=[Scores()], steps=1)
    assert (tmp_path / "metrics.jsonl").exists()


class Scores:
    @hookimpl
    def score(self, run, batch):
        return {"mine": torch.zeros(len(batch))}


def test_group_of_one(tmp_path):
    text = message(ConfigError, Trainer, fake_config(tmp_path, algorithm="grpo", batch={"prompts": 2, "group_size": 1}))
    assert text == "algorithm 'grpo' compares samples of one prompt: batch.group_size is 1, at least 2 is needed"


def test_more_mini_batches_than_groups(tmp_path):
    spec = {"name": "jackfield.testing.runs:FakeAlgorithm", "mini_batches": 9}
    assert "algorithm.mini_batches is 9, more than the 4 groups" in message(ConfigError, Trainer, fake_config(tmp_path, algorithm=spec))


def test_empty_dataset(tmp_path):
    spec = {"name": "jackfield.testing.fakes:FakeDataset", "rows": 0}
    assert "is empty" in message(DataError, Trainer, fake_config(tmp_path, dataset=spec))


# ---- hooks ----------------------------------------------------------------------------------------------------------------


class WrongArgument:
    @hookimpl
    def score(self, run, batches):
        return {}


class Misspelt:
    @hookimpl
    def step_ended(self, run):
        return None


class Raises:
    @hookimpl
    def advantage(self, run, batch):
        raise KeyError("temperature")


class WrongShape(Algorithm):
    def advantage(self, batch):
        return batch.replace(advantages=batch.loss_mask.float())

    def loss(self, outputs, batch):
        from jackfield import LossOutput

        return LossOutput(outputs.log_probs.mean())


class ShortScores(Reward):
    def score(self, records):
        return [0.0]


def test_hook_argument_that_does_not_exist():
    text = message(PluginError, PluginManager().register, WrongArgument(), "mine")
    assert text.startswith("plugin 'mine': ")
    assert "batches" in text
    assert text.endswith("see docs/hooks for the signature")


def test_misspelt_hook():
    manager = PluginManager()
    manager.register(Misspelt(), "mine")
    assert message(PluginError, manager.check) == "plugin 'mine' implements an unknown hook 'step_ended'; did you mean 'step_end'?"


def test_registered_twice():
    manager = PluginManager()
    manager.register(Raises(), "mine")
    text = message(PluginError, manager.register, Raises(), "mine")
    assert text == "plugin 'mine' is registered already: name it once, or give one of the two another label"


def test_an_exception_inside_a_hook(tmp_path):
    text = message(PluginError, fake_run, tmp_path, plugins=[Raises()])
    line = inspect.getsourcelines(Raises)[1] + 3
    assert text == f"plugin 'Raises' raised in hook 'advantage': KeyError: 'temperature' ({__file__}:{line})"


def test_the_traceback_of_the_plugin_is_kept(tmp_path):
    with pytest.raises(PluginError) as caught:
        fake_run(tmp_path, plugins=[Raises()])
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_loss_of_the_wrong_shape(tmp_path):
    text = message(PluginError, fake_run, tmp_path, algorithm=here("WrongShape"))
    assert "WrongShape returned loss of shape []" in text
    assert text.endswith("a tensor of shape [16, 7] is wanted")


def test_a_reward_of_the_wrong_length(tmp_path):
    text = message(PluginError, fake_run, tmp_path, rewards=[here("ShortScores")])
    assert "ShortScores" in text
    assert "1" in text
    assert "16" in text


def test_options_for_a_plugin_that_takes_none(tmp_path):
    spec = ComponentSpec(name=here("Raises"), options={"speed": 3})
    assert "takes no options, but got speed: derive it from jackfield.Component" in message(PluginError, registry.build, "hooks", spec)
    assert issubclass(Reward, Component)


# ---- checkpoints ----------------------------------------------------------------------------------------------------------


def test_a_checkpoint_folder_that_is_none(tmp_path):
    text = message(CheckpointError, fake_run, tmp_path / "run", checkpoint={"resume": tmp_path})
    assert f"{tmp_path} is no readable checkpoint" in text


def test_a_run_folder_that_is_taken(tmp_path):
    fake_run(tmp_path, steps=1)
    text = message(ConfigError, fake_run, tmp_path, steps=2, checkpoint={"resume": "never"})
    assert "holds checkpoints already and checkpoint.resume is 'never': choose another dir" in text


def test_a_full_disk_leaves_the_earlier_checkpoints(tmp_path, monkeypatch):
    fake_run(tmp_path, steps=1)

    def full(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    text = message(CheckpointError, fake_run, tmp_path, steps=2)
    assert "cannot be written: [Errno 28] No space left on device; the earlier ones are untouched" in text
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]


# ---- the command line -----------------------------------------------------------------------------------------------------


def test_one_line_and_exit_code_two(tmp_path):
    run = subprocess.run(
        [sys.executable, "-c", "from jackfield.cli import main; main()", "train", str(FAKE), "algorithm=nosuch", f"dir={tmp_path}/run"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 2
    assert run.stderr.startswith("error: no algorithm is called 'nosuch'")
    assert run.stderr.count("\n") == 1
    assert run.stdout == ""
    assert not (tmp_path / "run").exists(), "nothing may be written before the config is known to be good"


def test_unknown_option_is_a_usage_error():
    from click.testing import CliRunner

    assert CliRunner().invoke(app, ["train", "--trace-hook", str(FAKE)]).exit_code == 2

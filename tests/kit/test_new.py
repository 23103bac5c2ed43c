"""`jackfield new`: for every kind a package that installs, passes its tests and trains in the quickstart, unedited."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from jackfield import registry
from jackfield.cli import app
from jackfield.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
NAMES = {kind: f"made_{kind}" for kind in registry.KINDS}


def run(*words, cwd=ROOT, path="", check=True):
    env = {**os.environ, "PYTHONPATH": str(path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0 or not check, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """One package of each kind, written by the command and installed by pip into a folder of its own."""
    out, site = tmp_path_factory.mktemp("made"), tmp_path_factory.mktemp("site")
    for kind, name in NAMES.items():
        result = CliRunner().invoke(app, ["new", kind, name, "--out", str(out)], catch_exceptions=False)
        assert result.exit_code == 0
        assert f"pip install -e '{out}/jackfield-made-{kind}[test]'" in result.output
    pip = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", site]
    run(*pip, *sorted(out.iterdir()))
    return out, site


@pytest.mark.slow
def test_their_tests_pass(made):
    out, site = made
    options = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-c", os.devnull]
    done = run("-m", "pytest", *options, *sorted(out.iterdir()), path=site, cwd=out)
    assert "failed" not in done.stdout
    assert int(done.stdout.strip().splitlines()[-1].split(" passed")[0].split()[-1]) > 50


@pytest.mark.slow
def test_all_of_them_train_in_the_quickstart(made, tmp_path):
    _, site = made
    settings = {k: n for k, n in NAMES.items() if k in ("algorithm", "engine", "rollout", "dataset", "launcher", "transport")}
    words = [f"{kind}={name}" for kind, name in settings.items()]
    words += [f"policy.backend={NAMES['backend']}", f"rewards=[share,{NAMES['reward']}]", f"trackers=[{NAMES['tracker']}]"]
    words += [f"dir={tmp_path}/run", "steps=2", "-p", NAMES["hooks"]]
    command = ["-c", "from jackfield.cli import main; main()"]
    done = run(*command, "train", "examples/quickstart.yaml", *words, path=site)
    assert f"run folder: {tmp_path}/run" in done.stdout
    plugins = (tmp_path / "run" / "plugins.json").read_text()
    assert plugins.count("jackfield-made-") >= 5
    assert (tmp_path / "run" / "made_tracker.csv").read_text().count("\n") == 3
    assert run(*command, "made_command", tmp_path / "run", path=site).stdout.startswith("step ")


def test_they_are_listed(made):
    _, site = made
    out = run("-c", "from jackfield.cli import main; main()", "plugins", path=site).stdout
    rows = [line for line in out.splitlines() if "jackfield-made-" in line]
    assert len(rows) == len(NAMES)
    assert all(row.rstrip().endswith("ok") for row in rows), rows


def test_a_single_file_trains(tmp_path):
    from jackfield.testing.runs import fake_run

    result = CliRunner().invoke(app, ["new", "algorithm", "gentle", "--single", "--out", str(tmp_path)], catch_exceptions=False)
    assert f"jackfield train config.yaml algorithm={tmp_path}/gentle.py:Gentle" in result.output
    assert [p.name for p in tmp_path.iterdir()] == ["gentle.py"]
    assert fake_run(tmp_path / "run", algorithm=f"{tmp_path}/gentle.py:Gentle").run.step == 3


@pytest.mark.parametrize("kind", registry.KINDS)
def test_every_single_file_loads(kind, tmp_path):
    CliRunner().invoke(app, ["new", kind, "one", "--single", "--out", str(tmp_path)], catch_exceptions=False)
    assert registry.load(kind, f"{tmp_path}/one.py:{'one' if kind == 'command' else 'One'}") is not None


@pytest.mark.parametrize(
    ("name", "hint"), [("My-Reward", "try 'my_reward'"), ("class", "start it with a letter"), ("2fast", "start it with a letter")]
)
def test_names_that_are_none(name, hint, tmp_path):
    with pytest.raises(ConfigError, match=f"cannot be a plugin's name .*: {hint}"):
        CliRunner().invoke(app, ["new", "reward", name, "--out", str(tmp_path)], catch_exceptions=False)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    words = ["new", "reward", "mine", "--out", str(tmp_path)]
    CliRunner().invoke(app, words, catch_exceptions=False)
    with pytest.raises(ConfigError, match="exists already"):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_a_name_that_is_taken(tmp_path):
    with pytest.raises(ConfigError, match="reward 'share' is a plugin of jackfield, and two of one name clash"):
        CliRunner().invoke(app, ["new", "reward", "share", "--out", str(tmp_path)], catch_exceptions=False)
    assert not list(tmp_path.iterdir())

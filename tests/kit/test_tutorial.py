"""The tutorial's commands, run as a new user would, in a fresh environment and with no change in this repository."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def blocks() -> list[str]:
    """The shell blocks of docs/tutorial.md; entering the environment and publishing, which needs an account, are left out."""
    text = (ROOT / "docs" / "tutorial.md").read_text()
    return [b for b in re.findall(r"```sh\n(.*?)```", text, re.DOTALL) if "python -m build" not in b and "activate" not in b]


@pytest.mark.slow
def test_commands(tmp_path):
    import importlib.util

    spec = importlib.util.spec_from_file_location("install_tests", ROOT / "tests" / "packaging" / "test_install.py")
    helpers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(helpers)
    python = helpers.environment(tmp_path / "env")
    helpers.run(python, "-m", "pip", "uninstall", "-q", "-y", "setuptools")
    helpers.run(python, "-m", "pip", "install", "-q", "--no-deps", helpers.build(helpers.tree(tmp_path / "tree"), tmp_path / "dist"))
    home = tmp_path / "home"
    shutil.copytree(ROOT / "examples", home / "examples")
    scripts = blocks()
    assert len(scripts) >= 4
    script = "set -e\n" + "\n".join(scripts)
    script = script.replace("pip install -e", "pip install -q --no-deps --no-build-isolation -e")
    path = f"{python.parent}:/usr/bin:/bin"
    env = {"PATH": path, "HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    done = subprocess.run(["bash", "-c", script], cwd=home, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout[-2500:]}\n{done.stderr[-2500:]}"
    for name in ("gentle", "tender", "concise", "watched"):
        assert f"run folder: runs/{name}" in done.stdout
        assert (home / "runs" / name / "plugins.json").is_file()
    assert "algorithm tender: " in done.stdout

"""The built wheel in fresh environments: what it holds, what it needs, and that plugins of others work beside it."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELVES = ("core", "plugins", "algorithms", "parallel")
pytestmark = pytest.mark.slow


def run(*words, check=True, **options):
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([str(w) for w in words], capture_output=True, text=True, check=False, env=env | options.pop("env", {}), **options)
    assert done.returncode == 0 or not check, f"{words}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done


def heavy_site() -> list[str]:
    """Folders of this environment that hold torch and the other dependencies."""
    found = [sysconfig.get_paths()["purelib"]]
    for pth in Path(found[0]).glob("*.pth"):
        found += [line for line in pth.read_text().splitlines() if line and not line.startswith("import") and Path(line).is_dir()]
    return [f for f in found if (Path(f) / "torch").is_dir()]


def environment(folder: Path, *, python: str = sys.executable, heavy: bool = True) -> Path:
    """A fresh virtual environment that borrows the heavy dependencies (not jackfield); its python."""
    run(python, "-m", "venv", folder)
    interpreter = folder / "bin" / "python"
    if heavy:
        site = Path(run(interpreter, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])").stdout.strip())
        # Last on the path, so that the wheel under test wins over an editable install of the tree.
        (site / "zz_heavy.pth").write_text("\n".join(heavy_site()) + "\n")
    return interpreter


def tree(folder: Path) -> Path:
    """The tree without what builds leave behind, so that building does not touch it."""
    names = run("git", "ls-files", "-z", "-co", "--exclude-standard", cwd=ROOT).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def build(source: Path, out: Path) -> Path:
    pip = (sys.executable, "-m", "pip", "wheel", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    run(*pip, "-w", out, source, cwd=out.parent)
    return next(out.glob("*.whl"))


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return tree(tmp_path_factory.mktemp("tree"))


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    return build(source, tmp_path_factory.mktemp("wheel") / "dist")


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """A fresh environment with the built wheel."""
    python = environment(tmp_path_factory.mktemp("venv") / "env")
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", wheel)
    return python


def test_only_names_of_ours(wheel):
    names = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    strange = {n for n in names if not (n == "jackfield" or n.startswith(("jackfield_", "jackfield-")))}
    assert strange == set()
    packages = {p.parent.name for shelf in SHELVES for p in (ROOT / shelf).glob("*/__init__.py")}
    assert packages <= names


def test_all_files_are_in_it(wheel, source):
    inside = set(zipfile.ZipFile(wheel).namelist())
    files = {str(p.relative_to(source / shelf)) for shelf in SHELVES for p in (source / shelf).rglob("*") if p.is_file()}
    files = {f for f in files if "__pycache__" not in f and ".egg-info" not in f}
    assert files - inside == set(), "package_data in setup.py misses these"


def test_trains_from_the_wheel(installed, tmp_path):
    """Away from the tree, from the wheel alone."""
    where = run(
        installed, "-c", "import jackfield, jackfield_grpo; print(jackfield.__file__, jackfield_grpo.__file__)", cwd=tmp_path
    ).stdout
    assert all(str(installed.parents[1]) in path for path in where.split()), where
    config = (ROOT / "tests" / "core" / "fake.yaml").read_text().replace("mini.py:Mini", "jackfield.testing.runs:FakeAlgorithm")
    (tmp_path / "fake.yaml").write_text(config)
    out = run(installed.parent / "jackfield", "train", "fake.yaml", "steps=2", f"dir={tmp_path}/run", cwd=tmp_path)
    assert out.stdout.splitlines()[-1] == f"run folder: {tmp_path}/run"


def test_editable_install(source, tmp_path):
    python = environment(tmp_path / "env")
    run(python, "-m", "pip", "uninstall", "-q", "-y", "setuptools")  # Python's bundled one is too old; the borrowed one is not
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", "--no-build-isolation")
    run(*pip, "-e", source, cwd=tmp_path)
    where = run(python, "-c", "import jackfield, jackfield_grpo; print(jackfield.__file__, jackfield_grpo.__file__)", cwd=tmp_path).stdout
    assert all(str(source) in path for path in where.split()), where
    assert "grpo" in run(python.parent / "jackfield", "plugins", "algorithm", cwd=tmp_path).stdout


def python_312() -> str | None:
    names = [shutil.which("python3.12"), *map(str, sorted(Path.home().glob(".pyenv/versions/3.12*/bin/python")))]
    for name in filter(None, names):
        if run(name, "-c", "import sys; sys.exit(sys.version_info[:2] != (3, 12))", check=False).returncode == 0:
            return name
    return None


def test_python_312(wheel, tmp_path):
    """Metadata, import and listing work on Python 3.12 without torch; training says what is missing."""
    name = python_312()
    if name is None:
        pytest.skip("there is no Python 3.12 on this machine")
    python = environment(tmp_path / "env", python=name, heavy=False)
    pip = (python, "-m", "pip", "install", "-q", "--disable-pip-version-check")
    run(*pip, "--no-deps", wheel)
    run(*pip, "click", "pluggy", "pydantic", "omegaconf")
    listed = json.loads(run(python.parent / "jackfield", "plugins", "--json", cwd=tmp_path).stdout)
    assert {"grpo", "ppo", "torch", "hf"} <= {row["name"] for row in listed}
    assert all(row["state"] == "ok" for row in listed)
    assert "Algorithm" in run(python, "-c", "import jackfield; print(jackfield.__all__)", cwd=tmp_path).stdout
    assert "training" in run(python.parent / "jackfield", "config", cwd=tmp_path).stdout.lower()


EXAMPLE = ROOT / "examples" / "jackfield-example-plugin"


@pytest.fixture(scope="module")
def with_example(wheel, tmp_path_factory):
    """A fresh environment with the built wheels of jackfield and of the example plugin."""
    folder = tmp_path_factory.mktemp("example")
    shutil.copytree(EXAMPLE, folder / "source", ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    python = environment(folder / "env")
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps", wheel, build(folder / "source", folder / "dist"))
    return python


def config(tmp_path, example: bool) -> Path:
    text = (ROOT / "tests" / "core" / "fake.yaml").read_text().replace("mini.py:Mini", "jackfield.testing.runs:FakeAlgorithm")
    if example:
        text = (EXAMPLE / "example.yaml").read_text()
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return path


def test_the_example_plugin_trains_on_several_workers(with_example, tmp_path):
    """Its algorithm, backend, reward, transport and wrapper hook, all in one run, on two forked workers."""
    words = ("train", config(tmp_path, example=True), f"dir={tmp_path}/run", "steps=3")
    run(with_example.parent / "jackfield", *words, cwd=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert rows[-1]["example/optimizer_steps"] == 3
    assert "example/advantage_seconds" in rows[-1]
    plugins = json.loads((tmp_path / "run" / "plugins.json").read_text())
    ours = {name for name, entry in plugins.items() if entry["distribution"] == "jackfield-example-plugin 0.1.0"}
    assert ours == {"centred", "reward brief", "hooks of reward brief", "stopwatch"}


def test_installed_is_not_active(with_example, installed, tmp_path):
    """A run that does not name the example plugin is bit-identical with it installed and without."""
    rows = {}
    for name, python in (("with", with_example), ("without", installed)):
        folder = tmp_path / name
        folder.mkdir()
        run(python.parent / "jackfield", "train", config(folder, example=False), f"dir={folder}/run", "steps=3", cwd=folder)
        lines = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        weights = (folder / "run" / "checkpoints" / "step-00000003" / "policy" / "table.pt").read_bytes()
        clock = ("time/", "sync/")
        rows[name] = ([{k: v for k, v in row.items() if not k.startswith(clock)} for row in lines], weights)
    assert rows["with"] == rows["without"]


def test_the_example_plugins_own_tests_pass(with_example, tmp_path):
    shutil.copytree(EXAMPLE / "tests", tmp_path / "tests")
    done = run(with_example, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests", cwd=tmp_path)
    assert " passed" in done.stdout

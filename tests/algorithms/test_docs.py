"""The pages under docs/algorithms say what the code says; each algorithm is one short file."""

import importlib.util
import inspect
import json
from pathlib import Path

import pytest

from jackfield import registry

ROOT = Path(__file__).resolve().parents[2]
ENTRIES = [e for e in registry.entries("algorithm") if e.distribution == "jackfield"]


def tool():
    spec = importlib.util.spec_from_file_location("docs_algorithms", ROOT / "docs" / "tools" / "algorithms.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pages_are_up_to_date():
    for name, text in tool().pages().items():
        path = ROOT / "docs" / "algorithms" / name
        assert path.exists() and path.read_text() == text, f"{name}: run python docs/tools/algorithms.py"


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_one_short_file_with_its_paper_and_its_departures(entry):
    module = inspect.getmodule(entry.point.load())
    assert len(inspect.getsource(module).splitlines()) <= 120
    assert "arXiv" in module.__doc__
    assert "Departures:" in module.__doc__


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_measured_on_two_seeds(entry):
    curves = json.loads((ROOT / "docs" / "algorithms" / "curves.json").read_text())["mean reward by step, by algorithm and seed"]
    assert len(curves[entry.name]) >= 2
    assert (ROOT / "docs" / "algorithms" / f"{entry.name}.svg").exists()
    for values in curves[entry.name].values():
        assert sum(values[-10:]) > sum(values[:10])

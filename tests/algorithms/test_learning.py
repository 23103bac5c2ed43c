"""On the quickstart's task every algorithm learns. Curves of longer runs: docs/algorithms/ (bench/curves.py)."""

import importlib.util
from pathlib import Path

import pytest
import torch

from jackfield import registry

ROOT = Path(__file__).resolve().parents[2]
FIRST = ("grpo", "rloo", "dapo")
OTHERS = sorted({e.name for e in registry.entries("algorithm") if e.distribution == "jackfield"} - set(FIRST))


def rewards(name, seed, steps, folder):
    spec = importlib.util.spec_from_file_location("bench_curves", ROOT / "bench" / "curves.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    torch.set_num_threads(1)
    return bench.train(name, seed, steps, folder, [])


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FIRST)
def test_reaches_the_target(name, seed, tmp_path):
    values = rewards(name, seed, 120, tmp_path / "run")
    assert max(sum(values[i : i + 10]) / 10 for i in range(len(values) - 9)) > 0.7


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_improves(name, tmp_path):
    values = rewards(name, 0, 30, tmp_path / "run")
    assert sum(values[-5:]) > 1.5 * sum(values[:5])

"""On the quickstart's task every algorithm learns. Curves of longer runs: docs/algorithms/ (bench/curves.py)."""

import importlib.util
from pathlib import Path

import pytest
import torch

from jackfield import registry

ROOT = Path(__file__).resolve().parents[2]
TARGET = 0.9
"""Mean reward of ten steps in a row, the quickstart's own (tests/examples)."""
STEPS = 200
"""The quickstart's own."""
FIRST = ("dapo", "grpo", "ppo", "reinforce_pp", "rloo")
OTHERS = sorted({e.name for e in registry.entries("algorithm") if e.distribution == "jackfield"} - set(FIRST))


def rewards(name, seed, steps, folder, *overrides):
    """Mean reward by step, with the settings of bench/curves.py, which say what an algorithm needs beside the quickstart's."""
    spec = importlib.util.spec_from_file_location("bench_curves", ROOT / "bench" / "curves.py")
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    torch.set_num_threads(1)
    return bench.train(name, seed, steps, folder, list(overrides))


def best_ten(values):
    return max(sum(values[i : i + 10]) / 10 for i in range(len(values) - 9))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", FIRST)
def test_reaches_the_target(name, seed, tmp_path):
    """In parts, each resumed from the one before (which changes nothing, law 29), so that nobody waits for what is known already."""
    for steps in range(80, STEPS + 1, 20):
        values = rewards(name, seed, steps, tmp_path / "run", "checkpoint.resume=auto")
        if best_ten(values) >= TARGET:
            break
    assert len(values) == steps
    assert best_ten(values) >= TARGET


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_improves(name, tmp_path):
    values = rewards(name, 0, 24, tmp_path / "run")
    assert sum(values[-5:]) > 1.5 * sum(values[:5])

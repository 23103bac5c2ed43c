"""The examples do what they say: the quickstart's reward climbs from chance to at least 0.9, from two seeds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jackfield import Trainer, load_config

ROOT = Path(__file__).parents[2]


def rewards(example, folder, *overrides):
    settings = [f"dir={folder}", f"policy.model.path={ROOT / 'examples' / 'tiny'}", "trackers=[]", *overrides]
    Trainer(load_config(ROOT / "examples" / example, settings)).train()
    return [json.loads(line)["reward"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1])
def test_quickstart_learns(tmp_path, seed):
    found = rewards("quickstart.yaml", tmp_path / "run", f"seed={seed}")
    assert sum(found[:5]) / 5 < 0.1
    assert sum(found[-10:]) / 10 >= 0.9


def test_first_plugin_runs(tmp_path):
    found = rewards("first_plugin.yaml", tmp_path / "run", "steps=2", "batch.prompts=2")
    assert len(found) == 2

"""Whole runs on TP 2 x PP 2 through launcher `fork`, the engine `hf` and resharding: they learn, and begin as on one process."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from jackfield import Trainer
from jackfield.config import RunConfig
from jackfield.testing.models import tiny_model

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)
pytestmark = [pytest.mark.megatron, pytest.mark.slow]


def _run(
    folder: Path, where: Path, algorithm: str, backend: dict[str, Any], launcher: dict[str, Any], steps: int
) -> list[dict[str, float]]:
    config = RunConfig(
        dir=where,
        steps=steps,
        policy={"model": {"path": str(folder), "init": "random"}, "backend": backend, "optimizer": {"lr": 1e-2}},
        algorithm=algorithm,
        dataset={"name": "copy", "words": 1, "vocabulary": 1},
        rewards=["share"],
        sampling={"max_new_tokens": 8},
        batch={"prompts": 8, "group_size": 8},
        launcher=launcher,
        trackers=[],
    )
    Trainer(config).train()
    return [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_learns_on_tensor_and_pipeline_parallel(algorithm: str, tmp_path: Path) -> None:
    """The share of one word in the response goes from 0.03 to over 0.95, as on one process, whose numbers the first step has."""
    folder = tiny_model(tmp_path / "model", "llama")
    spread = _run(folder, tmp_path / "spread", algorithm, {"name": "megatron", "tp": 2, "pp": 2}, {"name": "fork", "workers": 4}, 8)
    alone = _run(folder, tmp_path / "alone", algorithm, {"name": "torch"}, {"name": "local"}, 8)
    for name in ("reward", "loss", "grad_norm", "rollout_gap/mean"):
        assert spread[0][name] == pytest.approx(alone[0][name], rel=1e-3, abs=1e-6), name
    for rewards in ([row["reward"] for row in run] for run in (spread, alone)):
        assert rewards[0] < 0.1
        assert max(rewards) > 0.95, rewards
    assert max(row["rollout_gap/max"] for row in spread) < 1e-4

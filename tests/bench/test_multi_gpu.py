"""The benchmarks of several GPUs in a reduced form: gloo, two processes, the smallest model."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
BENCH = Path(__file__).resolve().parents[2] / "bench"


def script(name, *options, out):
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", str(BENCH / name), *options, f"--out={out}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(out.read_text()), done.stdout


def test_every_section_but_laws_and_training(tmp_path):
    """Equal weights on both ways are asserted by the ranks themselves; here: bytes at the bound, and a prediction each."""
    sections = ("links", "switch", "generation", "mapping", "model")
    options = ["--device=cpu", "--processes=2", "--model=tiny", "--repetitions=2", "--sections", *sections]
    result, said = script("multi_gpu.py", *options, out=tmp_path / "gpu.json")
    assert set(sections) <= set(result)
    assert all(f"\n{name} (" in said for name in sections)
    assert {ring for sized in result["links"]["collectives"].values() for ring in sized["rings"]} == {
        "all_gather",
        "all_reduce",
        "reduce_scatter",
    }
    assert len(result["switch"]) == 3
    for row in result["switch"]:
        assert row["at_bound"] and row["checksums"] == "equal"
    assert [round(row["ratio_bytes"], 1) for row in result["switch"]] == [1.0, 2.2, 6.6], "a whole copy each cannot cost less"
    for row in result["switch"]:
        assert row["share_of_link"] > 0
    assert [row["ranks"] for row in result["generation"]] == [1, 2]
    assert result["mapping"] == [{"mapping": "separate, colocated", "skipped": "needs 4 ranks, here are 2"}]
    said = {row["what"]: row for row in result["summary"]}
    assert said["switch tiny, megatron pp2 to vllm tp2: bytes at the bound"]["met"] is True
    assert "met" not in said["switch tiny, megatron pp2 to vllm tp2: seconds"], "targets are for 13B on 8 GPUs"
    assert len(result["model"]) == 6
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in result["model"])


def test_training_scales_and_the_model_is_checked(tmp_path):
    options = ["--only=training", "--processes=2", "--backends=torch", "--repetitions=2", "--tokens=64", "--length=32"]
    result, _ = script("scaling.py", *options, out=tmp_path / "scaling.json")
    one, two = result["training"]
    assert (one["ranks"], one["efficiency"], two["ranks"]) == (1, 1.0, 2)
    assert two["tokens_per_s"][0] * two["seconds"][0] == pytest.approx(2 * one["tokens_per_s"][0] * one["seconds"][0])
    assert two["grad_norms"][0] == two["grad_norms"][1] != one["grad_norms"][0], "both ranks step with the sum of both gradients"
    assert two["alone_seconds"][0] > 0 and 0 <= two["communication_share"] < 1
    checked, *further = result["model"]
    assert checked["measured"] == two["seconds"][0] and checked["predicted"] > checked["communication"] > 0
    assert [row["ranks"] for row in further] == [8, 32, 128, 512, 2048]

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
        assert row["sent_mb_per_rank"] < row["gather_mb_per_rank"]
        assert row["share_of_link"] > 0
    assert [row["ranks"] for row in result["generation"]] == [1, 2]
    assert result["mapping"] == [{"mapping": "separate, colocated", "skipped": "needs 4 ranks, here are 0"}]
    assert len(result["model"]) == 6
    assert all(row["predicted"] > 0 and row["measured"] > 0 for row in result["model"])


def test_training_scales_and_the_model_is_checked(tmp_path):
    options = ["--only=training", "--processes=2", "--backends", "torch-dp", "fsdp", "--repetitions=2", "--tokens=64", "--length=32"]
    result, _ = script("scaling.py", *options, out=tmp_path / "scaling.json")
    rows = {(row["backend"], row["ranks"]): row for row in result["training"]}
    assert set(rows) == {(b, n) for b in ("torch-dp", "fsdp") for n in (1, 2)}
    for backend in ("torch-dp", "fsdp"):
        one, two = rows[backend, 1], rows[backend, 2]
        assert one["efficiency"] == 1.0 and two["efficiency"] > 0
        assert two["tokens_per_s"][0] * two["seconds"][0] == pytest.approx(2 * one["tokens_per_s"][0] * one["seconds"][0])
        assert two["grad_norms"][0] == two["grad_norms"][1] != one["grad_norms"][0], "both ranks step with the sum of both gradients"
    checked = [row for row in result["model"] if "measured" in row]
    assert [(row["backend"], row["ranks"]) for row in checked] == [("torch-dp", 2), ("fsdp", 2)]
    assert max(row["ranks"] for row in result["model"]) == 2048

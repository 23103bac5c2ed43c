"""What benchmarks share: spreads and tables, processes, and the models that predict what is not measured."""

import argparse
import importlib.util
import json
import time
from pathlib import Path

import collectives
import laws
import pytest
import ranks
import report
import scaling_model
import summary
import torch
import torch.distributed as dist
from shapes import SHAPES

from jackfield_reshard.families import tensors

BENCH = Path(__file__).resolve().parents[2] / "bench"
_spec = importlib.util.spec_from_file_location("bench_all", BENCH / "all.py")  # a name that Python has already
everything = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(everything)


def test_the_cold_repetition_is_dropped():
    assert report.spread([9.0, 1.0, 3.0, 2.0]) == (2.0, 1.0, 3.0)
    assert report.spread([9.0]) == (9.0, 9.0, 9.0)
    assert report.spread([9.0, 1.0, 4.0]).per(8) == (3.2, 2.0, 8.0)
    assert report.slowest([[1.0, 5.0], [2.0, 4.0]]) == [2.0, 5.0]


def test_a_table_has_every_column_once_and_json_is_whole(tmp_path):
    rows = [{"a": 1, "b": report.Spread(0.5, 0.25, 1.0)}, {"a": 2, "c": 12345.6}]
    assert report.table(rows).splitlines() == ["| a | b | c |", "|---|---|---|", "| 1 | 0.5 (0.25, 1) |  |", "| 2 |  | 12,346 |"]
    report.write(tmp_path / "new" / "out.json", rows)
    assert json.loads((tmp_path / "new" / "out.json").read_text())[0]["b"] == [0.5, 0.25, 1.0]


def _sum(here, value):
    total = torch.tensor([value * (here.rank + 1)])
    dist.all_reduce(total)
    return int(total), dist.get_world_size(), here.device.type


def _fails(here):
    if here.rank == 1:
        raise ValueError("on purpose")
    here.gate()


def _dies(here):
    if here.rank == 1:
        import os

        os._exit(7)
    here.gate()


def test_ranks_work_together_or_alone_and_failures_are_raised():
    assert ranks.run(2, "cpu", _sum, 5) == [(15, 2, "cpu")] * 2
    assert ranks.run(2, "cpu", _sum, 5, alone=True) == [(5, 1, "cpu"), (10, 1, "cpu")]
    with pytest.raises(ranks.RanksFailed, match=r"(?s)rank 1 of 2.*on purpose"):
        ranks.run(2, "cpu", _fails, timeout=60)
    with pytest.raises(ranks.RanksFailed, match="rank 1 ended with 7"):
        ranks.run(2, "cpu", _dies, timeout=60)


@pytest.mark.parametrize("kind", collectives.PASSES)
def test_the_ring_is_found_again_from_its_own_times(kind):
    ring = collectives.Ring(latency=2e-5, rate=3e11)
    points = [(amount, ring.seconds(kind, amount, 8)) for amount in collectives.sizes("cuda")]
    found = collectives.fit(kind, points, 8)
    assert (found.latency, found.rate) == pytest.approx((2e-5, 3e11), rel=1e-6)


def test_the_model_counts_a_steps_bytes():
    """2-rank ring, no latency: an all-reduce of the float32 gradients moves 4 bytes a parameter and rank."""
    found = dict.fromkeys(collectives.PASSES, collectives.Ring(0.0, 1e9))
    work = {"parameters": 1_000_000, "tensors": 10, "layers": 4, "micro_batches": 3}
    seconds = {b: scaling_model.communication(scaling_model.collectives_of(b, work, 2), found, 2) for b in ("torch", "megatron", "fsdp")}
    assert seconds["torch"] == pytest.approx(4e6 / 1e9)
    assert seconds["megatron"] == pytest.approx((4e6 + 2e6) / 2 / 1e9)
    assert seconds["fsdp"] == pytest.approx(3 * (2e6 * 9 / 5 + 4e6) / 2 / 1e9)


def test_the_model_never_hides_more_than_there_is_time_for():
    rows = [
        {"backend": "megatron", "ranks": n, "dp": n, "seconds": report.Spread(1.0, 1.0, 1.0), "alone_seconds": report.Spread(1.0, 1.0, 1.0)}
        | {"tokens_per_s": report.Spread(n, n, n), "tokens_per_s_per_rank": report.Spread(1.0, 1.0, 1.0), "efficiency": 1.0}
        | {"workload": {"parameters": 1_000_000, "layers": 4, "micro_batches": 1}}
        for n in (1, 2)
    ]
    links = {"2": {"rings": {k: {"latency": 0.0, "rate": 1e6} for k in collectives.PASSES}}}
    args = argparse.Namespace(dtype="float32", per_node=8, network=1e-3, up_to=32)
    check, *more = scaling_model.check_and_extend(rows, links, args)
    assert (check["measured"], check["predicted"], check["communication"]) == (1.0, 5.0, 4.0)
    assert [(line["ranks"], line["predicted"]) for line in more] == [(8, 7.0), (32, 7.75)]


def test_targets_are_judged_where_they_were_set_for():
    row = {"model": "llama-2-13b", "from": "a", "to": "b", "seconds": [0.019, 0.01, 0.03], "at_bound": True, "ratio_seconds": 9.0}
    row |= {"share_of_link": 0.7, "extra_mb": 300.0, "bucket_mb": 256.0}
    scaled = {"backend": "fsdp", "ranks": 8, "efficiency": 0.91, "communication_share": 0.16}
    result = {"laws": [{"ok": True}, {"ok": False}, {"skipped": "few"}], "switch": [row | {"ranks": 8}], "training": [scaled]}
    on_gpus = {r["what"].rpartition(": ")[2]: r for r in summary.rows(result, cuda=True)}
    assert {what: r["met"] for what, r in on_gpus.items() if "met" in r} == {
        "laws that hold": False,
        "seconds": True,
        "bytes at the bound": True,
        "share of the link rate": False,
        "extra memory in buckets": True,
        "weak-scaling efficiency": True,
        "communication share": False,
    }
    assert on_gpus["laws that hold"]["measured"] == "1 of 2"
    assert sum("met" in r for r in summary.rows(result, cuda=False)) == 2


def test_what_a_machine_runs():
    """Every script exists; several GPUs have a benchmark of their own, and what needs none of them runs everywhere."""
    for gpus in (0, 1, 8):
        lines = everything.benchmarks(gpus)
        assert {"plan", "simulate_reshard", "switch", "train", "rollout"} <= set(lines)
        assert ("multi_gpu" in lines) == (gpus > 1)
        assert all((BENCH / line.split()[0]).is_file() for line, _ in lines.values())


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_have_the_published_sizes(name):
    billions = {"tiny": 0.000656512, "135m": 0.1345, "0.5b": 0.494, "1.5b": 1.544, "7b": 7.616, "llama-2-7b": 6.738, "llama-2-13b": 13.016}
    billions |= {"llama-70b": 68.98, "qwen3-30b": 30.53, "qwen3-235b": 235.09, "deepseek-v3": 671.03}
    count = sum(torch.Size(t.shape).numel() * len(t.layers) for t in tensors(SHAPES[name]))
    assert count / 1e9 == pytest.approx(billions[name], rel=2e-3)


def test_a_law_that_fails_stops_no_other(monkeypatch):
    """The tests of tests/reshard run on every rank; one that fails is named, those after it still run, and what does not fit is said."""
    tied = [(2, "25", "test_laws", "test_law_25_tied_embeddings", {"pp": pp, "vpp": vpp}) for pp, vpp in ((2, 1), (3, 1), (2, 2))]
    large = (4, "23", "test_ranks", "test_weights_arrive", {"case": "to dp4"})
    monkeypatch.setattr(laws, "tests", lambda quick: [*tied, large])
    one, wrong, two, left = laws.resharding("cpu", 2, True, 60)
    assert one["ok"] and two["ok"] and two["seconds"] > 0
    assert not wrong["ok"] and "'pp': 3" in wrong["error"]
    assert left["skipped"] == "needs 4 ranks, here are 2"


def test_a_command_out_of_time_ends_with_all_its_processes(tmp_path):
    ended, said = ranks.call(["sh", "-c", "sleep 60 & echo $! >child; echo begun; wait"], {}, tmp_path, 1.0)
    assert (ended, said) == (None, "begun\n")
    child = Path("/proc", (tmp_path / "child").read_text().strip(), "stat")
    deadline = time.monotonic() + 20
    while child.exists() and child.read_text().split()[2] != "Z":  # killed at once, gone when the kernel comes to it
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.01)
    assert ranks.call(["sh", "-c", "echo $WORD; exit 3"], {"WORD": "word"}, tmp_path, 30) == (3, "word\n")

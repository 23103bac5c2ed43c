"""Tensor parallelism through vLLM's external launcher, two processes on CPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from jackfield.testing.samples import generate, prompts, requests

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SIDE = Path(__file__).with_name("tp_side.py")
SHARED_MEMORY = Path("/dev/shm")


def start(world, tp, folder, out, **more):
    out.mkdir()
    command = [sys.executable, "-W", "ignore", str(SIDE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **more}
    return [
        subprocess.Popen(
            [*command, str(rank), str(world), str(tp), str(folder), str(out)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(world)
    ]


def results(processes):
    found = []
    try:
        for process in processes:
            out, err = process.communicate(timeout=500)
            assert process.returncode == 0, err[-3000:]
            found.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for process in processes:
            process.kill()
    return found


@pytest.fixture(scope="module")
def model(small, tmp_path_factory):
    """8 heads and 4 KV heads; a vocabulary that two ranks pad."""
    return small(tmp_path_factory.mktemp("tp"), "qwen2", hidden=256, heads=8, kv_heads=4, vocab=61)


@pytest.fixture(scope="module")
def alone(model, build, trainer, connect):
    """The same by one rank, in this process."""
    engine, backend = build(model), trainer(model)
    connect(backend, engine).sync(3)
    result = {"shards": [[s.name, list(s.shape), list(s.offset), list(s.size)] for s in engine.shards()]}
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        found = generate(engine, requests(prompts(6, length=40, shared=33), temperature=temperature, ignore_eos=True))
        result[name] = [[*key, s.tokens, s.log_probs] for key, s in sorted(found.items())]
    return result


def tokens(result, name):
    return [sample[:3] for sample in result[name]]


def test_tp_2_gives_the_tokens_of_tp_1(model, alone, tmp_path):
    before = set(SHARED_MEMORY.glob("*vllm*"))
    two = results(start(2, 2, model, tmp_path / "two"))
    assert [r["position"] for r in two] == [[0, 1, True], [0, 1, False]]
    for result in two:
        assert tokens(result, "greedy") == tokens(alone, "greedy")
        assert tokens(result, "sampled") == tokens(alone, "sampled")
    gaps = [abs(a - b) for x, y in zip(two[0]["sampled"], alone["sampled"], strict=True) for a, b in zip(x[3], y[3], strict=True)]
    assert max(gaps) < 1e-4
    pieces = {name: [] for name, *_ in alone["shards"]}
    for result in two:
        for name, shape, offset, size in result["shards"]:
            pieces[name].append((shape, offset, size))
    q = pieces["model.layers.0.self_attn.q_proj.weight"]
    assert q == [([256, 256], [0, 0], [128, 256]), ([256, 256], [128, 0], [128, 256])]
    assert pieces["model.layers.0.mlp.down_proj.weight"][1] == ([256, 512], [0, 256], [256, 256])
    rows = [size[0] for _, _, size in pieces["lm_head.weight"]]
    assert sum(rows) == 61, "padded rows belong to no shard"
    assert set(SHARED_MEMORY.glob("*vllm*")) == before


def test_memory_of_a_killed_run_is_removed_by_the_next(model, tmp_path):
    """The trap: ranks on CPU talk through files in /dev/shm, which outlive a kill -9."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    if not hasattr(torch.ops._C, "init_shm_manager"):
        pytest.skip("vLLM's kernels without AVX-512 make no such files")
    out = tmp_path / "killed"
    ranks = start(2, 2, model, out, HOLD="1")
    try:
        deadline = time.monotonic() + 300
        while not all((out / f"up-{rank}").exists() for rank in range(2)):
            assert all(rank.poll() is None for rank in ranks), ranks[0].communicate()[1][-2000:]
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    left = [path for rank in ranks for path in SHARED_MEMORY.glob(f"vllm_jackfield_{rank.pid}_*")]
    assert left
    results(start(2, 2, model, tmp_path / "next"))
    assert not any(path.exists() for path in left)


def test_two_replicas_share_the_prompts(model, alone, tmp_path):
    two = results(start(2, 1, model, tmp_path / "replicas"))
    assert [r["position"] for r in two] == [[0, 2, True], [1, 2, True]]
    whole = {(request, index): tokens for request, index, tokens, _ in alone["greedy"]}
    mine = {(2 * request + rank, index): tokens for rank, r in enumerate(two) for request, index, tokens, _ in r["greedy"]}
    assert mine == whole


def test_what_killed_runs_left_in_shared_memory_is_removed_and_living_runs_keep_theirs():
    from jackfield_vllm.adapter import remove_stale_shared_memory

    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    dead, living = (SHARED_MEMORY / f"vllm_jackfield_{pid}_0123456789ab-tp:0-cpushm" for pid in (process.pid, os.getpid()))
    try:
        dead.touch()
        living.touch()
        assert dead.name in remove_stale_shared_memory()
        assert (dead.exists(), living.exists()) == (False, True)
    finally:
        dead.unlink(missing_ok=True)
        living.unlink(missing_ok=True)

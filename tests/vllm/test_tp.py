"""Tensor parallelism through vLLM's external launcher, two processes on CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from jackfield.testing.samples import generate, prompts, requests

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
SIDE = Path(__file__).with_name("tp_side.py")
SHARED_MEMORY = Path("/dev/shm")


def start(world, tp, folder, out):
    out.mkdir()
    command = [sys.executable, "-W", "ignore", str(SIDE)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
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


def test_what_killed_runs_left_in_shared_memory_is_removed_and_living_runs_keep_theirs():
    """The trap: ranks on CPU talk through files in /dev/shm; a file whose owner is gone goes."""
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

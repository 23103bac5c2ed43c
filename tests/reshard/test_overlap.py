"""Transport `overlap`: the same weights arrive as without it, and part of the work is done before the sync."""

import functools
import operator

import pytest
import reshard_fakes as fakes
import torch

from jackfield import registry
from jackfield.components import WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, OptimizerConfig
from jackfield.errors import WorkerError
from jackfield.testing.models import random_batch, tiny_model
from jackfield.testing.processes import SimpleLoss
from jackfield_reshard.families import read_config, tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import materialise
from jackfield_reshard.overlap import Overlap

CPU = torch.device("cpu")


def run(folder, name, serve, rank, world, dtype):
    """Train a few steps with syncs between, some after two optimizer steps; returns the engine's shards and the reports."""
    context = WorkerContext("policy", CPU, 0, rank, world)
    backend = registry.build("backend", ComponentSpec(name=name))
    backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(lr=1e-2), context)
    engine = fakes.FakeEngine(materialise(tensors(read_config(folder)), serve, rank, None, dtype))
    link = Overlap(Overlap.Config(groups=3, verify=True, bucket_bytes=1 << 14))
    link.connect(backend, engine, context)
    reports = [link.sync(0)]
    for version, steps in ((1, 1), (2, 2), (3, 1), (4, 0)):
        for _ in range(steps):
            backend.forward_backward([random_batch(4, seed=10 * version + rank)], SimpleLoss())
            assert backend.optimizer_step()["grad_norm"] > 0
        if version != 3 and steps:  # with nothing else to do the thread ends by itself; version 3 is synced at once
            link._flight.thread.join(60)
            assert all(event.is_set() for event in link._flight.ready)
        reports.append(link.sync(version))
    held = {s.name: s.tensor.clone() for s in backend.shards() if s.full}
    return held, [(s.name, s.shape, s.tensor.clone()) for s in engine.needs], reports, link._parts


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_one_process(tmp_path, family):
    folder = tiny_model(tmp_path / "model", family, layers=4)
    held, served, reports, parts = run(folder, "torch", Layout("vllm"), 0, 1, "bfloat16")
    for name, _, tensor in served:
        if name in held:
            assert torch.equal(tensor.view(-1), held[name].bfloat16().view(-1)), name
    assert len(parts) == 3
    for version in (1, 2):
        assert reports[version].seconds["hidden"] > 0, "everything went before the sync"
    assert reports[0].seconds["hidden"] == reports[4].seconds["hidden"] == 0, "no optimizer step came before"
    assert len({r.bytes_copied for r in reports}) == 1


def test_fsdp_to_tensor_parallel(ranks, tmp_path):
    """Four bytes wherever they are: every sync is verified by checksums, also after two optimizer steps."""
    folder = tiny_model(tmp_path / "model", "qwen2", layers=4, tied=True)

    def body(rank, world):
        _, served, reports, _ = run(folder, "fsdp", Layout("vllm", tp=2), rank, world, "float32")
        assert all(r.seconds["hidden"] > 0 for r in reports[1:3])
        return len(served), [r.bytes_sent for r in reports]

    results = ranks(2, body)
    assert all(len(set(sent)) == 1 and sent[0] > 0 for _, sent in results)


def test_what_fails_in_the_thread_stops_the_run(tmp_path):
    folder = tiny_model(tmp_path / "model", layers=2)
    context = WorkerContext("policy", CPU, 0)
    backend = registry.build("backend", ComponentSpec(name="torch"))
    backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(), context)
    engine = fakes.FakeEngine(materialise(tensors(read_config(folder)), Layout("vllm"), 0, None, "bfloat16"))
    link = Overlap()
    link.connect(backend, engine, context)

    def broken(group, event):
        raise RuntimeError("no route to host")

    link._group = broken
    with pytest.raises(WorkerError, match="beside the optimizer failed: no route to host"):
        link.sync(0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_step_by_layers_is_the_same_step(tmp_path, dtype):
    """The optimizer that tells of each layer gives the same bits, and tells of every weight once."""
    folder = tiny_model(tmp_path / "model", layers=3)
    told, weights = [], []
    for listener in (None, lambda names: told.append(list(names))):
        backend = registry.build("backend", ComponentSpec(name="torch", options={"dtype": dtype}))
        backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(lr=1e-2, weight_decay=0.1), WorkerContext("policy", CPU, 0))
        backend.updated = listener
        for seed in range(2):
            backend.forward_backward([random_batch(4, seed=seed)], SimpleLoss())
            backend.optimizer_step()
        weights.append({s.name: s.tensor.clone() for s in backend.shards()})
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert len(told) == 2 * 4, "embedding and head, then three layers, in each of two steps"
    assert sorted(functools.reduce(operator.iadd, told[:4], [])) == sorted(weights[0])

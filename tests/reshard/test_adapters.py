"""Adapters travel alone: the base is sent once, and after fifty syncs the engine holds what a fresh merge gives."""

import pytest
import reshard_fakes as fakes
import torch
from safetensors.torch import load_file

from jackfield import registry
from jackfield.components import Request, WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, OptimizerConfig, SamplingConfig
from jackfield.testing.models import random_batch, tiny_model
from jackfield.testing.processes import SimpleLoss
from jackfield_hf.engine import HFEngine
from jackfield_reshard.families import read_config, tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import materialise
from jackfield_reshard.transports import P2P, Auto

CPU = torch.device("cpu")
LORA = {"r": 4, "alpha": 8}
ADAPTED = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 128), (64, 128), (128, 64)]
"""Inputs and outputs of q, k, v, o, gate, up and down of the tiny model."""
FACTORS = 2 * sum(4 * (rows + columns) for rows, columns in ADAPTED)
"""Elements of the adapters of its two layers."""


def trainer(folder, component="torch", rank=0, world=1, **options):
    backend = registry.build("backend", ComponentSpec(name=component, options={"lora": LORA, **options}))
    backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(lr=1e-2), WorkerContext("policy", CPU, 0, rank, world))
    return backend


def train(backend, seed):
    backend.forward_backward([random_batch(3, seed=seed)], SimpleLoss())
    assert backend.optimizer_step()["grad_norm"] > 0


def server(folder, dtype):
    engine = HFEngine()
    engine.setup(ModelConfig(path=str(folder)), WorkerContext("policy", CPU, 0, dtype=dtype))
    return engine


def weights(side):
    return {s.name: s.tensor.clone() for s in side.shards()}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "transport"), [("float32", Auto), ("bfloat16", P2P)])
def test_fifty_syncs_to_an_engine_elsewhere(ranks, tmp_path, dtype, transport):
    """Bit for bit a fresh merge, from a trainer process to an engine process; what is sent is the adapters, every time but the first."""
    folder = tiny_model(tmp_path / "model", "qwen2")

    def body(rank, world):
        backend = trainer(folder, dtype=dtype) if rank == 0 else None
        engine = server(folder, dtype) if rank == 1 else None
        link = transport(transport.Config(verify=True, bucket_bytes=1 << 16))
        link.connect(backend, engine, WorkerContext("policy", CPU, 0, rank, world))
        reports, held = [link.sync(0)], []
        for step in range(50):
            if backend is not None:
                train(backend, step)
            reports.append(link.sync(step + 1))
            if step in (0, 49):
                held.append(weights(backend or engine))
        assert engine is None or engine.version == 50
        return reports, held

    (sent, merged), (_, served) = ranks(2, body)
    size = 4 if dtype == "float32" else 2
    base = sum(t.numel() for t in load_file(folder / "model.safetensors").values())
    assert [r.bytes_sent for r in sent] == [size * (base + FACTORS)] + [size * FACTORS] * 50
    assert [r.bytes_saved for r in sent] == [0] + [size * base] * 50
    print(f"{dtype}: {sent[0].bytes_sent} bytes at first, then {sent[1].bytes_sent}")
    for mine, theirs in zip(merged, served, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert all(torch.equal(merged[0][n], merged[1][n]) == ("_proj.weight" not in n) for n in merged[0])


def test_from_shards_to_tensor_parallel(ranks, tmp_path):
    """FSDP's rows to a fused layout of tp 2 whose query weights have their groups unflattened, each process both."""
    folder = tiny_model(tmp_path / "model", "qwen2", tied=True)
    table = tensors(read_config(folder))

    def body(rank, world):
        backend = trainer(folder, "fsdp", rank, world)
        engine = fakes.FakeEngine(materialise(table, Layout("vllm", tp=2), rank, None))
        link = Auto(Auto.Config(verify=True))
        link.connect(backend, engine, WorkerContext("policy", CPU, 0, rank, world))
        reports = [link.sync(0)]
        for step in range(3):
            train(backend, 10 * step + rank)
            reports.append(link.sync(step + 1))
        backend.export(tmp_path / "out")
        return reports, [(s.name, s.shape, s.offset, s.size, s.tensor.clone()) for s in engine.shards()]

    results = ranks(2, body)
    merged, files = load_file(tmp_path / "out" / "model.safetensors"), load_file(folder / "model.safetensors")
    changed = 0
    for reports, shards in results:
        half = 4 * FACTORS // 2  # each rank holds half of each factor's rows, and both need all
        base = reports[0].bytes_sent - half
        assert base > half
        assert [(r.bytes_sent, r.bytes_saved) for r in reports[1:]] == [(half, base)] * 3
        for name, shape, offset, size, tensor in shards:
            box = tuple(slice(o, o + n) for o, n in zip(offset, size, strict=True))
            torch.testing.assert_close(tensor, merged[name].view(shape)[box], rtol=1e-6, atol=1e-6)
            changed += int(not torch.equal(tensor, files[name].view(shape)[box]))
    assert changed == 2 * 2 * 7


def test_in_one_process_nothing_moves(tmp_path):
    """The engine serves from the storage that is merged into; or, where it has its own, the trainer merges into that."""
    folder = tiny_model(tmp_path / "model")
    backend, engine = trainer(folder), server(folder, "float32")
    link = Auto()
    link.connect(backend, engine, WorkerContext("policy", CPU, 0))
    first = link.sync(0)
    fused = fakes.FakeEngine(materialise(tensors(read_config(folder)), Layout("vllm"), 0, None, "float32"))
    other, second = trainer(folder), Auto()
    second.connect(other, fused, WorkerContext("policy", CPU, 0))
    for seed in range(2):
        train(backend, seed)
        train(other, seed)
    reports = [first, link.sync(2), second.sync(2)]
    total = sum(t.nbytes for t in weights(backend).values())
    assert [(r.bytes_aliased, r.bytes_copied, r.bytes_sent) for r in reports] == [(total, 0, 0)] * 3
    want = load_file(_export(backend, tmp_path / "out") / "model.safetensors")
    for side in (engine, fused):
        assert all(torch.equal(s.tensor.flatten(), want[s.name].flatten()) for s in side.shards() if s.full)
    (sample,) = engine.generate([Request(0, (5, 6), (0,), SamplingConfig(temperature=0, max_new_tokens=1))])
    assert sample.versions == [2]


def _export(backend, folder):
    backend.export(folder)
    return folder

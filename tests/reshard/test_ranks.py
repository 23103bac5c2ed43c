"""Real transfers between processes (gloo): every layout's weights arrive bit for bit, and no byte too many is sent."""

from dataclasses import replace

import pytest
import reshard_fakes as fakes
import torch

from jackfield.components import WorkerContext
from jackfield.shard import BYTES
from jackfield_reshard.families import tensors
from jackfield_reshard.ipc import Ipc
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import drawn, materialise
from jackfield_reshard.transports import P2P, Auto

LLAMA = {
    "model_type": "llama",
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
QWEN2_TIED = LLAMA | {"model_type": "qwen2", "tie_word_embeddings": True, "num_key_value_heads": 4}
MOE = LLAMA | {
    "model_type": "deepseek_v3",
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 4,
    "qk_rope_head_dim": 4,
    "v_head_dim": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 8,
}
CASES = {
    "megatron tp2 pp2 to vllm tp2": (LLAMA, Layout("megatron", tp=2, pp=2), Layout("vllm", tp=2, dp=2)),
    "to tp4, more than its key-value heads": (LLAMA, Layout("megatron", tp=2, pp=2), Layout("vllm", tp=4)),
    "to dp4": (QWEN2_TIED, Layout("megatron", tp=2, pp=2), Layout("vllm", dp=4, vocabulary_multiple=64)),
    "virtual stages to tp2": (QWEN2_TIED, Layout("megatron", tp=2, pp=2, vpp=2), Layout("vllm", tp=2, dp=2)),
    "fsdp to tp2": (QWEN2_TIED, Layout("fsdp", dp=4), Layout("vllm", tp=2, dp=2)),
    "fsdp tp2 to tp4": (LLAMA, Layout("fsdp", tp=2, dp=2), Layout("vllm", tp=4)),
    "experts": (MOE, Layout("megatron", tp=2, pp=2, ep=2), Layout("vllm", tp=2, dp=2, ep=4)),
}


def expect(table, layout, rank, destination, seed, dtype):
    """The engine's shards of a rank hold what a layout of these values holds."""
    wanted = materialise(table, layout, rank, drawn(seed), dtype, str(destination[0].tensor.device))
    for got, want in zip(destination, wanted, strict=True):
        assert (got.name, got.offset) == (want.name, want.offset)
        assert torch.equal(got.tensor, want.tensor), f"rank {rank} {got.name} {got.offset}"


def update(backend, table, layout, rank, seed, dtype):
    new = materialise(table, layout, rank, drawn(seed), dtype)
    for old, value in zip(backend.shards(), new, strict=True):
        old.tensor.copy_(value.tensor)


@pytest.mark.parametrize("transport", [Auto, P2P])
@pytest.mark.parametrize("case", CASES)
def test_weights_arrive(ranks, case, transport):
    config, train, serve = CASES[case]
    table = tensors(config)

    def body(rank, world):
        device = fakes.place(rank)
        backend = fakes.FakeBackend(materialise(table, train, rank, drawn(0), device=str(device)))
        engine = fakes.FakeEngine(materialise(table, serve, rank, None, device=str(device)))
        link = transport(transport.Config(verify=True, bucket_bytes=1 << 12))
        link.connect(backend, engine, WorkerContext("policy", device, 0, rank, world))
        proof = link.agreement.plan.prove()
        assert proof.errors == ()
        for version in (0, 1):
            update(backend, table, train, rank, version, "float32")
            report = link.sync(version)
            expect(table, serve, rank, engine.shards(), version, "float32")
            assert engine.version == version
        assert set(report.seconds) == {"pause", "plan", "copy", "wire", "load", "resume"}
        assert link._wire.pool_bytes <= 1 << 12
        return report, int(proof.bound.sum())

    results = ranks(4, body)
    assert sum(report.bytes_sent for report, _ in results) == results[0][1]
    aliased = sum(report.bytes_aliased for report, _ in results)
    assert aliased == 0 if transport is P2P else aliased > 0


def separate(ranks, transport, train, serve, config=LLAMA, settings=None, source_dtype="float32", versions=2):
    """The trainer's ranks first, then the engine's, each in a process of its own; returns the reports by rank."""
    table = tensors(config)
    trainers = train.world

    def body(rank, world):
        trains = rank < trainers
        layout, own = (train, rank) if trains else (serve, rank - trainers)
        device = fakes.place(rank)
        side = materialise(table, layout, own, drawn(0) if trains else None, source_dtype if trains else "float32", str(device))
        backend, engine = (fakes.FakeBackend(side), None) if trains else (None, fakes.FakeEngine(side))
        link = transport(transport.Config(**(settings or {"verify": True, "bucket_bytes": 1 << 14})))
        link.connect(backend, engine, WorkerContext("policy", device, 0, rank, world))
        reports = []
        for version in range(versions):
            if trains:
                update(backend, table, train, rank, version, source_dtype)
            reports.append(link.sync(version))
            if engine:
                expect(table, serve, own, engine.shards(), version, "float32")
                assert engine.version == version
        assert link.agreement.plan.prove().errors == ()
        return reports

    return ranks(trainers + serve.world, body)


@pytest.mark.parametrize("transport", [P2P, Ipc])
def test_separate_trainers_and_engines(ranks, transport):
    """2 + 2 processes: nothing is local, and every engine rank receives exactly what it serves."""
    table = tensors(LLAMA)
    serve = Layout("vllm", tp=2)
    reports = separate(ranks, transport, Layout("megatron", pp=2), serve)
    needed = sum(s.tensor.numel() * 4 for rank in range(2) for s in materialise(table, serve, rank, None))
    for version in (0, 1):
        both = [own[version] for own in reports]
        assert [sum(getattr(r, name) for r in both) for name in BYTES] == [0, 0, needed, 0]


def test_ipc_reads_within_the_host(ranks):
    config, train, serve = CASES["experts"]
    table = tensors(config)

    def body(rank, world):
        device = fakes.place(rank)
        backend = fakes.FakeBackend(materialise(table, train, rank, drawn(0), device=str(device)))
        engine = fakes.FakeEngine(materialise(table, serve, rank, None, device=str(device)))
        link = Ipc(Ipc.Config(verify=True))
        link.connect(backend, engine, WorkerContext("policy", device, 0, rank, world))
        for version in (0, 1, 2):
            if version == 2 and rank == 1:  # one trainer's storage moves, as offloading would
                backend.held = [replace(s, tensor=s.tensor.clone()) for s in backend.held]
            update(backend, table, train, rank, version, "float32")
            report = link.sync(version)
            expect(table, serve, rank, engine.shards(), version, "float32")
        assert link._wire.rounds == []
        return report.bytes_sent, link.agreement.plan.prove().bound.sum()

    results = ranks(4, body)
    assert sum(sent for sent, _ in results) == results[0][1]

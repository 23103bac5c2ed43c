"""Real transfers between processes (gloo): every layout's weights arrive bit for bit, and no byte too many is sent."""

import importlib.util
from pathlib import Path

import pytest
import torch

from jackfield.components import WorkerContext
from jackfield_reshard.families import tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import drawn, materialise
from jackfield_reshard.transports import P2P, Auto

_spec = importlib.util.spec_from_file_location("reshard_fakes", Path(__file__).with_name("fakes.py"))
fakes = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fakes)

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
    "experts": (MOE, Layout("megatron", tp=2, pp=2, ep=2), Layout("vllm", tp=2, dp=2, ep=4)),
}


def expect(table, layout, rank, destination, seed, dtype):
    """The engine's shards of a rank hold what a layout of these values holds."""
    wanted = materialise(table, layout, rank, drawn(seed), dtype)
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
        backend = fakes.FakeBackend(materialise(table, train, rank, drawn(0)))
        engine = fakes.FakeEngine(materialise(table, serve, rank, None))
        link = transport(transport.Config(verify=True, bucket_bytes=1 << 12))
        link.connect(backend, engine, WorkerContext("policy", torch.device("cpu"), 0, rank, world))
        proof = link.agreement.plan.prove()
        assert proof.errors == ()
        for version in (0, 1):
            update(backend, table, train, rank, version, "float32")
            report = link.sync(version)
            expect(table, serve, rank, engine.shards(), version, "float32")
            assert engine.version == version
        assert report.bytes_sent == proof.bound.sum()
        assert set(report.seconds) == {"pause", "plan", "copy", "wire", "load", "resume"}
        return report.bytes_aliased, report.bytes_copied, link._wire.pool_bytes

    results = ranks(4, body)
    assert len({r[:2] for r in results}) == 1, "the report is the whole group's"
    aliased = results[0][0]
    assert aliased == 0 if transport is P2P else aliased > 0
    assert all(pool <= 1 << 12 for _, _, pool in results)

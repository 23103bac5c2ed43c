"""Laws 23 to 26 of docs/laws.md as far as they are the transports': completeness, odd tensors, ties and padding, versions; and memory."""

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest
import reshard_fakes as fakes
import torch

from jackfield.components import WorkerContext
from jackfield.errors import WorkerError
from jackfield_reshard.delta import Delta
from jackfield_reshard.families import tensors
from jackfield_reshard.ipc import Ipc
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import drawn, materialise
from jackfield_reshard.sides import shards
from jackfield_reshard.transports import P2P, Auto, Local

shard = fakes.shard

MODEL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}


def connected(transport, backend, engine, rank=0, world=1, **settings):
    link = transport(transport.Config(**settings))
    link.connect(backend, engine, WorkerContext("policy", fakes.place(rank), 0, rank, world))
    return link


@pytest.mark.parametrize("bucket", [16, 1 << 12, 256 << 20], ids=["less than a row", "a few tensors", "everything"])
def test_law_23_any_bucket_and_one_weight_in_each_layer(ranks, bucket):
    """One changed weight in every layer arrives, whatever the buckets' size; checksums agree on both sides."""
    table = tensors(MODEL)
    train, serve = Layout("megatron", tp=2, pp=2), Layout("vllm", tp=2, dp=2)

    def body(rank, world):
        backend = fakes.FakeBackend(materialise(table, train, rank, drawn(0), device=str(fakes.place(rank))))
        engine = fakes.FakeEngine(materialise(table, serve, rank, None, device=str(fakes.place(rank))))
        link = connected(P2P, backend, engine, rank, world, verify=True, bucket_bytes=bucket)
        link.sync(0)
        for s in backend.held:
            if s.name.endswith("input_layernorm.weight"):
                s.tensor[3] = -7.0
        link.sync(1)
        norms = [s for s in engine.needs if s.name.endswith("input_layernorm.weight")]
        assert len(norms) == 4 and all(s.tensor[3] == -7.0 for s in norms)
        for got, want in zip(engine.needs, materialise(table, serve, rank, drawn(0), device=str(fakes.place(rank))), strict=True):
            if not got.name.endswith("input_layernorm.weight"):
                assert torch.equal(got.tensor, want.tensor), got.name
        return engine.version, link._wire.pool_bytes

    results = ranks(4, body)
    assert [version for version, _ in results] == [1] * 4
    assert all(pool <= max(bucket, 4 * 3 * 16) for _, pool in results)


def odd_tensors(fill):
    """A bias, an fp32 buffer among bf16 weights, a transposed parameter, a persistent router bias, a buffer that is part of a weight."""
    weight = fill(6, 4)
    return [
        shard("model.layers.0.self_attn.q_proj.bias", fill(8).bfloat16()),
        replace(shard("model.rotary_emb.inv_freq", fill(4)), buffer=True),
        shard("model.layers.0.self_attn.o_proj.weight", fill(4, 8).t()),
        replace(shard("model.layers.0.mlp.gate.e_score_correction_bias", fill(3)), buffer=True),
        shard("model.layers.0.mlp.down_proj.weight", weight),
        replace(shard("model.layers.0.first_row", weight[0]), buffer=True),
        shard("model.scalar", fill(1)),
    ]


@pytest.mark.parametrize("transport", [Local, Auto, P2P])
def test_law_24_odd_tensors_through_sleep_and_wake(transport):
    backend, engine = fakes.FakeBackend(odd_tensors(torch.randn)), fakes.FakeEngine(odd_tensors(torch.zeros))
    link = connected(transport, backend, engine, verify=True)
    for version in range(3):
        if version == 1:  # the engine slept: its weights have new storage
            engine.needs = [replace(s, tensor=torch.empty_like(s.tensor)) for s in engine.needs]
        fakes.randomise(backend)
        link.sync(version)
        for have, need in zip(backend.held, engine.needs, strict=True):
            assert torch.equal(have.tensor, need.tensor), have.name
            assert have.tensor.dtype == need.tensor.dtype


def test_law_25_padded_rows_belong_to_nobody():
    """V = 10 over TP 4 is padded to 12: three rows each, the last rank has one."""
    table = tensors(MODEL | {"vocab_size": 10})
    rows = [next(s.size[0] for s in shards(table, Layout("megatron", tp=4), rank) if "embed" in s.name) for rank in range(4)]
    assert rows == [3, 3, 3, 1]
    assert len([s for s in shards(table, Layout("vllm", tp=4, vocabulary_multiple=64), 1) if "embed" in s.name]) == 0


@pytest.mark.parametrize("pp,vpp", [(1, 1), (2, 1), (2, 2)])
def test_law_25_tied_embeddings(ranks, pp, vpp):
    """engine embedding == engine head == trainer's embedding, where both pipeline ends hold it and the engine stores it twice."""
    table = tensors(MODEL | {"tie_word_embeddings": True})
    train = Layout("megatron", pp=pp, vpp=vpp)

    def body(rank, world):
        backend = fakes.FakeBackend(materialise(table, train, rank, drawn(0), device=str(fakes.place(rank))))
        empty = [torch.zeros(50, 16, device=fakes.place(rank)) for _ in range(2)]
        engine = fakes.FakeEngine([shard("model.embed_tokens.weight", empty[0]), shard("lm_head.weight", empty[1])])
        connected(P2P, backend, engine, rank, world, verify=True).sync(0)
        want = drawn(0)("model.embed_tokens.weight", (50, 16))
        assert all(torch.equal(s.tensor.cpu(), want) for s in engine.needs)

    ranks(pp, body)


def test_law_26_every_sync_tells_the_engine():
    backend, engine = fakes.FakeBackend(odd_tensors(torch.randn)), fakes.FakeEngine(odd_tensors(torch.zeros))
    link = connected(Auto, backend, engine)
    for version in (3, 4, 4):
        assert link.sync(version).version == engine.version == version
    assert engine.updates == 3, "also where nothing moved: the weights may have changed in place"


def test_a_transfer_that_goes_wrong_is_noticed():
    """Checksums see one wrong element."""
    backend, engine = fakes.FakeBackend([shard("a", torch.randn(4, 4))]), fakes.FakeEngine([shard("a", torch.zeros(4, 4))])
    link = connected(Local, backend, engine, verify=True)
    link._copies.run = lambda: engine.needs[0].tensor.copy_(backend.held[0].tensor).view(-1)[5].add_(1)
    with pytest.raises(WorkerError, match=r"weights differ after the sync: a offset \[0, 0\] size \[4, 4\] from rank 0 to rank 0"):
        link.sync(0)


def resident():
    """Bytes of this process in memory, after the allocator has given back what nobody holds (it keeps freed pages as it likes)."""
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("transport", [Auto, P2P, Ipc, Delta])
def test_50_syncs_with_flat_memory(ranks, transport):
    table = tensors(MODEL | {"hidden_size": 256, "intermediate_size": 1024, "vocab_size": 4000})
    train, serve = Layout("megatron", tp=2), Layout("vllm", dp=2)

    def body(rank, world):
        backend = fakes.FakeBackend(materialise(table, train, rank, drawn(0), device=str(fakes.place(rank))))
        engine = fakes.FakeEngine(materialise(table, serve, rank, None, device=str(fakes.place(rank))))
        link = connected(transport, backend, engine, rank, world, bucket_bytes=1 << 23)
        used = []
        for version in range(70):
            for s in backend.held[:: 8 if transport is Delta else 1]:
                s.tensor.add_(1)
            link.sync(version)
            used.append(resident())
        model = sum(s.tensor.numel() * 4 for s in engine.needs)
        return max(used[20:]) - max(used[:20]), model

    for growth, model in ranks(2, body):
        assert growth < 0.05 * model, "50 syncs after the first 20 take no memory worth a twentieth of the model"

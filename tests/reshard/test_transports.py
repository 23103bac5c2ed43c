"""Transports within one process: what is shared, what is copied, and what the errors say."""

from dataclasses import replace

import pytest
import torch
from reshard_fakes import FakeBackend, FakeEngine, randomise, shard

from jackfield.components import WorkerContext
from jackfield.errors import ConfigError
from jackfield_reshard.modules import Unmoved, held, module_shards
from jackfield_reshard.transports import Alias, Auto, Local

CONTEXT = WorkerContext("policy", torch.device("cpu"), 0)
Q, KV, HIDDEN = 8, 4, 6


def trainer(dtype=torch.float32):
    """Plain matrices, as the torch backend holds them."""
    return FakeBackend(
        [
            shard("model.embed_tokens.weight", torch.randn(10, HIDDEN, dtype=dtype)),
            shard("model.layers.0.self_attn.q_proj.weight", torch.randn(Q, HIDDEN, dtype=dtype)),
            shard("model.layers.0.self_attn.k_proj.weight", torch.randn(KV, HIDDEN, dtype=dtype)),
            shard("model.layers.0.mlp.experts.gate_up_proj", torch.randn(3, 8, HIDDEN, dtype=dtype)),
            shard("model.layers.0.mlp.gate.e_score_correction_bias", torch.randn(3)),
        ]
    )


def fused_engine(dtype=torch.float32):
    """vLLM's way for query and key, rows of one fused tensor; experts each for themselves, which is nobody's way."""
    qkv = torch.zeros(Q + KV, HIDDEN, dtype=dtype)
    return FakeEngine(
        [
            shard("model.embed_tokens.weight", torch.zeros(12, HIDDEN, dtype=dtype)[:10]),
            shard("model.layers.0.self_attn.q_proj.weight", qkv[:Q].view(2, Q // 2, HIDDEN)),
            shard("model.layers.0.self_attn.k_proj.weight", qkv[Q:].view(2, KV // 2, HIDDEN)),
            *(shard(f"model.layers.0.mlp.experts.{e}.gate_proj.weight", torch.zeros(4, HIDDEN, dtype=dtype)) for e in range(3)),
            *(shard(f"model.layers.0.mlp.experts.{e}.up_proj.weight", torch.zeros(4, HIDDEN, dtype=dtype)) for e in range(3)),
            shard("model.layers.0.mlp.gate.e_score_correction_bias", torch.zeros(3)),
        ]
    )


def check(backend, engine):
    """Every weight of the engine equals the backend's, whichever way each writes it."""
    have, need = {s.name: s.tensor for s in backend.shards()}, {s.name: s.tensor for s in engine.shards()}
    for name in ("embed_tokens", "layers.0.self_attn.q_proj", "layers.0.self_attn.k_proj"):
        want = have[f"model.{name}.weight"]
        assert torch.equal(need[f"model.{name}.weight"].reshape(want.shape), want.to(need[f"model.{name}.weight"].dtype)), name
    for e in range(3):
        gate_up = have["model.layers.0.mlp.experts.gate_up_proj"][e]
        for part, rows in (("gate_proj", gate_up[:4]), ("up_proj", gate_up[4:])):
            got = need[f"model.layers.0.mlp.experts.{e}.{part}.weight"]
            assert torch.equal(got, rows.to(got.dtype)), (e, part)


def connect(transport, backend, engine):
    transport.connect(backend, engine, CONTEXT)
    return transport


def test_engine_serves_from_the_backends_storage():
    backend = trainer()
    engine = FakeEngine([replace(s, tensor=None) for s in backend.shards()], takes=True)
    transport = connect(Auto(), backend, engine)
    report = transport.sync(1)
    assert (report.bytes_copied, report.bytes_sent, report.bytes_aliased) == (0, 0, 4 * sum(s.tensor.numel() for s in backend.shards()))
    randomise(backend)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(backend.shards(), engine.shards(), strict=True))
    assert transport.sync(2).version == engine.version == 2
    assert engine.updates == 2


def test_backend_moves_into_the_engines_storage():
    """Query, key and embedding are shared; the experts, which the two write differently, are copied."""
    backend, engine = trainer(), fused_engine()
    values = [s.tensor.clone() for s in backend.shards()]
    transport = connect(Auto(), backend, engine)
    assert all(torch.equal(s.tensor, v) for s, v in zip(backend.shards(), values, strict=True))
    report = transport.sync(0)
    experts = 4 * 3 * 8 * HIDDEN
    assert report.bytes_copied == experts
    assert report.bytes_aliased == 4 * ((10 + Q + KV) * HIDDEN + 3)
    check(backend, engine)
    randomise(backend)
    transport.sync(1)
    check(backend, engine)


def test_stacked_experts_are_shared_with_an_engine_that_names_each():
    """vLLM keeps experts as [experts, gate rows then up rows, hidden], as transformers does, but names every expert's parts."""
    w13, w2 = torch.zeros(3, 8, HIDDEN), torch.zeros(3, HIDDEN, 4)
    name = "model.layers.0.mlp.experts."
    backend = FakeBackend([shard(name + "gate_up_proj", torch.randn(3, 8, HIDDEN)), shard(name + "down_proj", torch.randn(3, HIDDEN, 4))])
    values = [s.tensor.clone() for s in backend.shards()]
    parts = [("gate_proj", w13[:, :4]), ("up_proj", w13[:, 4:]), ("down_proj", w2)]
    engine = FakeEngine([shard(f"{name}{e}.{part}.weight", t[e]) for e in range(3) for part, t in parts])
    report = connect(Alias(), backend, engine).sync(0)
    assert report.bytes_aliased == 4 * (w13.numel() + w2.numel())
    assert torch.equal(w13, values[0]) and torch.equal(w2, values[1])
    assert backend.shards()[0].tensor.data_ptr() == w13.data_ptr()


def test_a_side_is_asked_once_and_again_where_it_has_taken_other_storage(monkeypatch):
    """An engine may have to look through thousands of weights to answer."""
    asked = []
    for kind in (FakeBackend, FakeEngine):
        monkeypatch.setattr(kind, "shards", lambda self, ask=kind.shards: asked.append(type(self)) or ask(self))
    served = FakeEngine([replace(s, tensor=None) for s in trainer().held], takes=True)
    cases = [(Local(), fused_engine(), [1, 1]), (Auto(), fused_engine(), [2, 1]), (Auto(), served, [1, 2])]
    for transport, engine, times in cases:
        asked.clear()
        connect(transport, trainer(), engine)
        assert [asked.count(kind) for kind in (FakeBackend, FakeEngine)] == times
        asked.clear()
        transport.sync(1)
        assert [asked.count(kind) for kind in (FakeBackend, FakeEngine)] == [1, 1]


def test_interleaved_parts_cannot_be_shared():
    """Query rows of two groups with keys between them are no matrix: they are copied."""
    fused = torch.randn(2, 4 + 2, HIDDEN)
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.self_attn.k_proj.weight"]
    backend = FakeBackend([shard(names[0], fused[:, :4]), shard(names[1], fused[:, 4:])], adopts=False)
    engine = FakeEngine([shard(names[0], torch.zeros(8, HIDDEN)), shard(names[1], torch.zeros(4, HIDDEN))])
    report = connect(Auto(), backend, engine).sync(0)
    assert (report.bytes_aliased, report.bytes_copied) == (0, 4 * fused.numel())
    assert torch.equal(engine.needs[0].tensor.view(2, 4, HIDDEN), fused[:, :4])


def test_local_copies_everything_and_casts():
    backend, engine = trainer(), fused_engine(torch.bfloat16)
    report = connect(Local(), backend, engine).sync(3)
    assert report.bytes_aliased == 0
    assert report.bytes_copied == 2 * ((10 + Q + KV) * HIDDEN + 3 * 8 * HIDDEN) + 4 * 3
    check(backend, engine)
    assert set(report.seconds) == {"pause", "plan", "copy", "wire", "resume"}


def test_moved_storage_is_noticed():
    backend, engine = trainer(), fused_engine()
    transport = connect(Local(), backend, engine)
    transport.sync(0)
    backend.held = [replace(s, tensor=torch.randn(s.tensor.shape)) for s in backend.held]
    transport.sync(1)
    check(backend, engine)


def test_a_side_that_gives_the_same_list_is_not_looked_at_again():
    module = torch.nn.Linear(4, 3)
    module.register_buffer("scale", torch.ones(2))
    unmoved = Unmoved(lambda: module_shards(module))
    first = unmoved(held(module.modules()))
    assert [s.name for s in first] == ["weight", "bias", "scale"]
    with torch.no_grad():
        module.weight.mul_(2)
    assert unmoved(held(module.modules())) is first
    module.weight.data = torch.randn(3, 4)
    second = unmoved(held(module.modules()))
    assert second is not first
    assert second[0].tensor.data_ptr() == module.weight.data_ptr()
    module.scale = torch.zeros(2)
    assert unmoved(held(module.modules()))[2].tensor.sum() == 0


def test_tied_head_gets_the_embedding():
    backend = FakeBackend([shard("model.embed_tokens.weight", torch.randn(5, 2))])
    engine = FakeEngine([shard("model.embed_tokens.weight", torch.zeros(5, 2)), shard("lm_head.weight", torch.zeros(5, 2))])
    connect(Local(), backend, engine).sync(0)
    assert torch.equal(engine.needs[1].tensor, backend.held[0].tensor)


def test_alias_says_what_stands_in_the_way():
    with pytest.raises(ConfigError, match=r"288|use transport auto") as error:
        connect(Alias(), trainer(), fused_engine())
    assert "experts" in str(error.value) and "use transport auto" in str(error.value)


def test_a_weight_that_nobody_holds_is_an_error():
    backend = FakeBackend([shard("a.weight", torch.randn(4, 2), shape=(8, 2))])
    with pytest.raises(ConfigError, match=r"a.weight: no source shard covers all of offset \[0, 0\] size \[8, 2\] of \[8, 2\] \(8 of 16 "):
        connect(Local(), backend, FakeEngine([shard("a.weight", torch.zeros(8, 2))]))
    with pytest.raises(ConfigError, match=r"b.weight: the engine needs it and the training backend has no such tensor"):
        connect(Auto(), backend, FakeEngine([shard("b.weight", torch.zeros(8, 2))]))
    with pytest.raises(
        ConfigError,
        match=r"a.weight: FakeEngine can only adopt .* bfloat16 \[4, 2\], .* float32 \[4, 2\] of \[4, 2\]; give both the same dtype",
    ):
        backend = FakeBackend([shard("a.weight", torch.randn(4, 2))])
        engine = FakeEngine([replace(shard("a.weight", torch.zeros(4, 2, dtype=torch.bfloat16)), tensor=None)])
        connect(Auto(), backend, engine)


def test_a_group_meets_before_the_first_sync_where_transfers_would_wait_for_all_of_it(monkeypatch):
    """On GPUs every rank takes part in a first collective; gloo needs none."""
    from jackfield_reshard import wire

    met = []
    monkeypatch.setattr(wire.dist, "all_reduce", lambda tensor, group: met.append((tensor.device.type, group)))
    for device, world in (("cpu", 4), ("meta", 1), ("meta", 4)):  # meta stands for a GPU
        wire.meet(torch.device(device), world, "group")
    assert met == [("meta", "group")]

"""What goes wrong silently with vLLM on CPU (docs/engines/vllm.md), each shown first without our remedy and then with it."""

import pytest
import torch

from jackfield.errors import ConfigError, DataError, PluginError
from jackfield.testing.models import tiny_model
from jackfield.testing.samples import gap, generate, prompts, requests

pytestmark = pytest.mark.vllm


@pytest.fixture(scope="module")
def packed(small, build, trainer, connect, tmp_path_factory):
    """(engine, backend) with oneDNN's packed copies and a tied head."""
    folder = small(tmp_path_factory.mktemp("tied"), "llama", tied=True)
    engine, backend = build(folder, cpu_linear="packed"), trainer(folder)
    connect(backend, engine).sync(0)
    return engine, backend


def test_a_tied_head_keeps_a_stale_packed_copy(packed):
    engine, backend = packed
    asked = requests(prompts(4), ignore_eos=True)
    assert gap(backend, asked, generate(engine, asked)).max() < 1e-4
    with torch.no_grad():
        backend.model.get_input_embeddings().weight.mul_(1.3)
    engine.core.reset_prefix_cache()
    assert gap(backend, asked, generate(engine, asked)).max() > 1e-2, "the embedding is new, the head is old"
    engine.weights_updated(1)
    assert gap(backend, asked, generate(engine, asked)).max() < 1e-4


def test_packed_linears_have_no_weight_but_the_shards_do(packed):
    engine, _ = packed
    assert engine.core.model.model.layers[0].self_attn.qkv_proj.weight.numel() == 0
    assert all(s.tensor.numel() > 0 for s in engine.shards())


def blocks(engine):
    return engine.core._scheduler.kv_cache_manager.block_pool.blocks


def test_the_prefix_cache_serves_keys_of_old_weights(served):
    engine, backend = served
    asked = requests(prompts(4, length=140, shared=130), ignore_eos=True)
    generate(engine, asked)
    weight = backend.model.get_input_embeddings().weight
    old = weight.detach().clone()
    with torch.no_grad():
        weight.copy_(weight.roll(1, 0))
    try:
        assert gap(backend, asked, generate(engine, asked)).max() > 1e-2, "read under the old weights"
        hashed = sum(block.block_hash is not None for block in blocks(engine))
        engine.weights_updated(engine.version)
        assert sum(block.block_hash is not None for block in blocks(engine)) == hashed > 0, "nothing is walked through"
        assert gap(backend, asked, generate(engine, asked)).max() < 1e-4
    finally:
        with torch.no_grad():
            weight.copy_(old)
        engine.weights_updated(engine.version)


def test_vllms_own_log_probs_ignore_the_temperature(served):
    """Ours are the processed ones, whatever vLLM's mode; the raw ones differ by far."""
    engine, backend = served
    asked = requests(prompts(4), temperature=0.5, ignore_eos=True)
    found = generate(engine, asked)
    assert gap(backend, asked, found).max() < 1e-4
    raw = [type(r)(r.id, r.tokens, r.seeds, r.sampling.model_copy(update={"temperature": 1.0})) for r in asked]
    assert gap(backend, raw, found).mean() > 0.1


def test_errors_say_what_to_do(llama, build, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"engine.memory 1e-06 x .* is less than weights .*; set engine.memory to at least"):
        build(llama, memory=1e-6)
    with pytest.raises(ConfigError, match=r"engine.max_model_len 9999 is more than the model's max_position_embeddings 512"):
        build(llama, max_model_len=9999)
    with pytest.raises(ConfigError, match=r"engine.tp 2 must divide the policy's 1 workers"):
        build(llama, tp=2)
    with pytest.raises(ConfigError, match="EngineArgs has no warp_speed"):
        build(llama, args={"warp_speed": 9})
    with pytest.raises(
        ConfigError, match=r"vLLM refuses [^\n]*; here that is engine.memory or engine.args.kv_cache_memory_bytes, and [^\n]*$"
    ):
        build(llama, args={"kv_cache_memory_bytes": 1000})
    with pytest.raises(ConfigError, match=r"vLLM refuses [^\n]*max_num_seqs[^\n]*$"):
        build(llama, args={"max_num_seqs": "many"})
    narrow = tiny_model(tmp_path / "narrow", hidden=64, heads=4)
    with pytest.raises(ConfigError, match=r"heads of size 16 \(hidden_size 64 / 4 heads\): .* for 32, 64, .*; use engine hf"):
        build(narrow)
    with pytest.raises(DataError, match=r"no usable config.json"):
        build(tmp_path / "nowhere")

    from jackfield_vllm import adapter

    monkeypatch.setattr(adapter.metadata, "version", lambda name: "0.19.1")
    with pytest.raises(PluginError, match=r"vLLM 0.19.1 is installed, 0.20 to 0.33 are supported"):
        build(llama)

"""Backend `torch`: what the conformance kit cannot know. Packing, loading, bfloat16 masters, checkpoints, errors."""

import json
import math

import pytest
import torch
from safetensors.torch import load_file

from jackfield.components import OutputRequest, WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig
from jackfield.errors import CheckpointError, ConfigError, DataError
from jackfield.schedule import Ramp
from jackfield.shard import Shard
from jackfield.testing.models import random_batch, tiny_model
from jackfield.testing.processes import SimpleLoss
from jackfield_reshard.modules import whole_shard
from jackfield_torch import packing
from jackfield_torch.backend import TorchBackend, TorchConfig
from jackfield_torch.optimizer import learning_rate
from jackfield_torch.rounding import dither
from jackfield_torch.short_attention import ShortAttention


def build(folder, optimizer=None, head="lm", init="pretrained", **options):
    backend = TorchBackend(TorchConfig(**options))
    model = ModelConfig(path=str(folder), head=head, init=init)
    backend.setup(model, optimizer, WorkerContext("policy", torch.device("cpu"), 0))
    return backend


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_model(tmp_path_factory.mktemp("model"))


def test_packing_runs_shared_prompts_once_and_neither_padding_nor_last_tokens():
    batch = random_batch(8, group_size=4, adversarial=False)
    plan = packing.layout(batch, pack=True, share=True)
    prompts = {tuple(t[:n].tolist()) for t, n in zip(batch.tokens, batch.prompt_lengths, strict=True)}
    wanted = sum(map(len, prompts)) + int((batch.lengths - batch.prompt_lengths - 1).sum())
    assert plan.tokens.numel() == wanted < int(batch.lengths.sum())
    for b, length in enumerate((batch.lengths - 1).tolist()):
        rows = plan.rows[b, :length]
        assert torch.equal(plan.tokens[0, rows], batch.tokens[b, :length])
        assert torch.equal(plan.positions[0, rows], torch.arange(length))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"])
def test_every_family_packs(tmp_path, family):
    backend = build(tiny_model(tmp_path, family), OptimizerConfig(), packing="on")
    assert backend.scorer.can_pack
    assert backend.scorer.plain_head
    padded = build(tmp_path, OptimizerConfig(), packing="off")
    for b in (backend, padded):
        b.forward_backward([random_batch()], SimpleLoss(OutputRequest(entropy=True, top_p=0.9, temperature=1.3), 0.1))
    for (name, one), (_, two) in zip(backend.model.named_parameters(), padded.model.named_parameters(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_an_attention_of_its_own_is_noticed(tmp_path):
    """Gemma 2 caps attention scores and logits: neither packing nor the plain head would be right, and both are left."""
    import transformers

    config = transformers.Gemma2Config(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    backend = build(tmp_path, OptimizerConfig())
    assert not backend.scorer.can_pack
    assert not backend.scorer.plain_head
    with pytest.raises(ConfigError, match="packing"):
        build(tmp_path, packing="on")
    batch = random_batch()
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    got = backend.forward([batch], OutputRequest())[0].log_probs
    for b, n in enumerate(batch.lengths.tolist()):
        with torch.no_grad():
            want = plain(input_ids=batch.tokens[b : b + 1, :n]).logits.log_softmax(-1)[0, :-1].gather(-1, batch.tokens[b, 1:n, None])[:, 0]
        error = torch.where(batch.response_mask[b, 1:n], got[b, 1:n] - want, 0)
        assert float(error.abs().max()) < 1e-4


def test_rounding_is_not_taken_for_an_attention_of_its_own(tmp_path):
    """A deep model's bfloat16 rounding is larger than what a wrong mask does to a shallow one; the trial runs in float32."""
    tiny_model(tmp_path, num_hidden_layers=24, initializer_range=0.5)
    backend = build(tmp_path, dtype="bfloat16", packing="on")
    assert backend.scorer.can_pack
    assert all(p.dtype == torch.bfloat16 for p in backend.model.parameters())
    batch = random_batch()
    shared, padded = (build(tmp_path, packing=p).forward([batch], OutputRequest())[0].log_probs for p in ("on", "off"))
    torch.testing.assert_close(shared, padded, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("packing", ["on", "off"])
def test_short_samples_in_bfloat16_have_the_gradients_of_float32(tmp_path, monkeypatch, packing):
    """On a CPU their attention is ours, forward and backward; the same weights in float32 take PyTorch's kernel."""
    tiny_model(tmp_path, layers=1)
    batch, used = random_batch(8, group_size=4), []
    original = ShortAttention.apply
    monkeypatch.setattr(ShortAttention, "apply", lambda *given: used.append(1) or original(*given))
    narrow, wide = (build(tmp_path, OptimizerConfig(), packing=packing, dtype=dtype) for dtype in ("bfloat16", "float32"))
    for name, parameter in wide.model.named_parameters():
        parameter.data.copy_(narrow.model.get_parameter(name))
    for backend in (narrow, wide):
        backend.forward_backward([batch], SimpleLoss())
    assert used
    for name, parameter in wide.model.named_parameters():
        got = narrow.optimizer.masters[name].grad
        assert float((got - parameter.grad).norm()) < 0.02 * float(parameter.grad.norm()), name


def test_sliding_windows_are_kept_when_packing(tmp_path):
    tiny_model(tmp_path, "mixtral", sliding_window=4)
    packed, padded = build(tmp_path, packing="on"), build(tmp_path, packing="off")
    wide = tiny_model(tmp_path / "wide", "mixtral")
    batch, request = random_batch(), OutputRequest()
    one, two, other = (b.forward([batch], request)[0].log_probs for b in (packed, padded, build(wide)))
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert float((one - other).abs().max()) > 1e-3


def test_the_mode_is_restored(folder):
    backend = build(folder, OptimizerConfig())
    backend.model.base_model.layers[0].eval()
    before = [m.training for m in backend.model.modules()]
    backend.forward([random_batch()], OutputRequest())
    assert [m.training for m in backend.model.modules()] == before
    assert any(before)


def test_masters_keep_what_bfloat16_cannot(folder, tmp_path):
    """Small steps add up in float32 masters where bfloat16 weights alone would stand still; checkpoints hold the masters."""
    backend = build(folder, OptimizerConfig(lr=1e-6), dtype="bfloat16")
    files = load_file(folder / "model.safetensors")
    start = {n: m.clone() for n, m in backend.optimizer.masters.items()}
    assert all(torch.equal(start[n], files[n]) for n in files)
    for _ in range(3):
        backend.forward_backward([random_batch()], SimpleLoss())
        assert all(p.grad is None for p in backend.model.parameters())
        backend.optimizer_step()
    moved = backend.optimizer.masters["model.layers.0.mlp.up_proj.weight"] - start["model.layers.0.mlp.up_proj.weight"]
    assert 0 < float(moved.abs().max()) < 1e-5
    assert all(torch.equal(p, backend.optimizer.masters[n].bfloat16()) for n, p in backend.model.named_parameters())
    backend.save(tmp_path)
    assert torch.equal(load_file(tmp_path / "model.safetensors")["lm_head.weight"], backend.optimizer.masters["lm_head.weight"])


def test_weights_from_a_bfloat16_checkpoint_move_with_their_masters(tmp_path):
    """Rounded to the nearest, not one of them would: the step is a fiftieth of the distance to the next number."""
    folder = tiny_model(tmp_path / "model", dtype="bfloat16")
    backend = build(folder, OptimizerConfig(lr=1e-5), dtype="bfloat16")
    start = {n: p.detach().clone() for n, p in backend.model.named_parameters()}
    backend.forward_backward([random_batch()], SimpleLoss())
    backend.optimizer_step()
    expected = sum(float((m - start[n].float()).abs().sum()) for n, m in backend.optimizer.masters.items())
    moved = sum(float((p - start[n]).float().abs().sum()) for n, p in backend.model.named_parameters())
    assert moved == pytest.approx(expected, rel=0.1)
    backend.save(tmp_path)
    again = build(folder, OptimizerConfig(lr=1e-5), dtype="bfloat16")
    again.load(tmp_path)
    assert all(torch.equal(p, again.model.get_parameter(n)) for n, p in backend.model.named_parameters())
    still = build(folder, OptimizerConfig(lr=0.0), dtype="bfloat16")
    still.forward_backward([random_batch()], SimpleLoss())
    still.optimizer_step()
    assert all(torch.equal(p, start[n]) for n, p in still.model.named_parameters())


def test_dithering_is_exact_in_the_mean_and_keeps_what_is_on_the_grid():
    x = torch.randn(300, 1001, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(x, dtype=torch.bfloat16)
    dither(x, out)
    assert float(((out.float() - x) / x.abs()).mean().abs()) < 2e-5
    assert float(((out.float() - x) / x.abs()).abs().max()) < 2.0**-7
    same = torch.empty_like(out)
    dither(out.float(), same)
    assert torch.equal(same, out)


def test_rate_rises_and_decays():
    config = OptimizerConfig(lr=Ramp(start=1.0, end=0.0, steps=10), warmup=4)
    assert [learning_rate(config, n) for n in (0, 1, 3, 5, 10, 20)] == pytest.approx([0.25, 0.45, 0.7, 0.5, 0.0, 0.0])


def test_clipping_and_decay(folder):
    """The clipped step is that of a gradient scaled to the norm; vectors do not decay."""
    backend = build(folder, OptimizerConfig(lr=1e3, eps=1e3, max_grad_norm=0.5))
    free = build(folder, OptimizerConfig(lr=1e3, eps=1e3, max_grad_norm=math.inf))
    start = {n: p.detach().clone() for n, p in free.model.named_parameters()}
    norms = []
    for b in (backend, free):
        b.forward_backward([random_batch()], SimpleLoss())
        norms.append(b.optimizer_step()["grad_norm"])
    assert norms[0] == norms[1] > 0.5
    name = "model.layers.1.mlp.down_proj.weight"
    ratio = (backend.model.get_parameter(name) - start[name]) / (free.model.get_parameter(name) - start[name])
    assert float(ratio.nanmedian()) == pytest.approx(0.5 / norms[0], rel=1e-2)
    decayed = build(folder, OptimizerConfig(lr=0.1, weight_decay=0.5))
    batch = random_batch()
    decayed.forward_backward([batch.replace(loss_scale=torch.zeros_like(batch.loss_scale))], SimpleLoss())
    decayed.optimizer_step()
    assert torch.equal(decayed.model.model.norm.weight, start["model.norm.weight"])
    torch.testing.assert_close(decayed.model.get_parameter(name), start[name] * 0.95)


def test_a_gradient_that_is_not_finite_is_dropped(folder):
    backend = build(folder, OptimizerConfig(lr=1.0))
    start = {n: p.detach().clone() for n, p in backend.model.named_parameters()}
    batch = random_batch()
    backend.forward_backward([batch.replace(advantages=torch.where(batch.loss_mask, torch.nan, 0))], SimpleLoss())
    assert backend.optimizer_step()["bad_gradients"] == 1
    assert all(torch.equal(p, start[n]) for n, p in backend.model.named_parameters())
    backend.forward_backward([batch], SimpleLoss())
    assert backend.optimizer_step()["bad_gradients"] == 0


def test_adoption_moves_the_weights_and_training_goes_on_there(folder):
    """Laws 24 and 25: a transposed parameter, a persistent buffer and tied names are moved by storage, and steps are seen through it."""
    backend = build(folder, OptimizerConfig(lr=1e-2))
    up = backend.model.model.layers[0].mlp.up_proj
    up.weight.data = up.weight.data.t().contiguous().t()
    backend.model.model.layers[0].register_buffer("router_bias", torch.arange(3.0))
    shards = backend.shards()
    assert next(s for s in shards if s.name.endswith("router_bias")).buffer
    storage = {s.name: torch.empty_strided(s.tensor.shape, s.tensor.stride()).copy_(s.tensor) for s in shards}
    assert backend.adopt([whole_shard(n, t) for n, t in storage.items()])
    backend.forward_backward([random_batch()], SimpleLoss())
    before = {n: t.clone() for n, t in storage.items()}
    backend.optimizer_step()
    assert not torch.equal(storage["model.layers.0.mlp.up_proj.weight"], before["model.layers.0.mlp.up_proj.weight"])
    assert all(s.tensor.data_ptr() == storage[s.name].data_ptr() for s in backend.shards())
    wrong = [Shard(s.name, s.shape, s.offset, s.size, "float64", s.tensor.double()) for s in shards]
    assert not backend.adopt(wrong)
    assert not backend.adopt(shards[1:])


def test_tied_weights_are_one_name(tmp_path):
    backend = build(tiny_model(tmp_path, tied=True), OptimizerConfig())
    names = [s.name for s in backend.shards()]
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names


def test_a_critic_is_exported_and_read_again(folder, tmp_path):
    backend = build(folder, OptimizerConfig(lr=1e-2), head="value")
    batch = random_batch()
    for _ in range(2):
        backend.forward_backward([batch], SimpleLoss())
        backend.optimizer_step()
    backend.export(tmp_path)
    want = backend.forward([batch], OutputRequest())[0].values
    again = build(tmp_path, head="value")
    torch.testing.assert_close(dict(again.model.named_parameters()), dict(backend.model.named_parameters()), rtol=0, atol=0)
    # products of the same numbers may differ in their last bit with where in memory those lie
    torch.testing.assert_close(again.forward([batch], OutputRequest())[0].values, want, rtol=0, atol=1e-6)


def broken(tmp_path, what):
    folder = tiny_model(tmp_path / what)
    weights = folder / "model.safetensors"
    if what == "truncated":
        weights.write_bytes(weights.read_bytes()[:5000])
    elif what == "corrupt":
        weights.write_bytes(b"\xff" * 4000)
    elif what == "no weights":
        weights.unlink()
    elif what == "no config":
        (folder / "config.json").unlink()
    elif what == "bad config":
        (folder / "config.json").write_text("{")
    elif what == "unknown type":
        (folder / "config.json").write_text(json.dumps({"model_type": "nothing-like-it"}))
    elif what == "missing tensor":
        from safetensors.torch import save_file

        tensors = load_file(weights)
        tensors.pop("model.layers.1.mlp.up_proj.weight")
        save_file(tensors, weights, metadata={"format": "pt"})
    elif what == "missing folder":
        return tmp_path / "nowhere"
    return folder


@pytest.mark.parametrize(
    "what", ["missing folder", "truncated", "corrupt", "no weights", "no config", "bad config", "unknown type", "missing tensor"]
)
def test_a_bad_folder_is_one_line(tmp_path, what):
    folder = broken(tmp_path, what)
    with pytest.raises(DataError) as caught:
        build(folder)
    assert str(folder) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_checkpoint_is_one_line(folder, tmp_path):
    backend = build(folder, OptimizerConfig())
    with pytest.raises(CheckpointError, match="cannot be read"):
        backend.load(tmp_path)
    build(tiny_model(tmp_path / "other", layers=1), OptimizerConfig()).save(tmp_path)
    with pytest.raises(CheckpointError, match="differ"):
        backend.load(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be written"):
        backend.save(tmp_path / "not" / "there")


def test_a_reference_cannot_be_trained(folder):
    with pytest.raises(ConfigError, match="without an optimizer"):
        build(folder).forward_backward([random_batch()], SimpleLoss())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_running_out_of_memory_says_what_to_change(folder, monkeypatch, checkpointing):
    backend = build(folder, OptimizerConfig(), activation_checkpointing=checkpointing)

    def score(*_):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nMore.")

    monkeypatch.setattr(backend, "_score", score)
    batch = random_batch()
    for run in (lambda: backend.forward([batch], SimpleLoss().request), lambda: backend.forward_backward([batch], SimpleLoss())):
        with pytest.raises(
            ConfigError, match=rf"role policy: out of memory on cpu .* {int(batch.lengths.sum())} tokens .*micro_batch_tokens"
        ) as caught:
            run()
        assert ("activation_checkpointing" in str(caught.value)) is not checkpointing
        assert "\n" not in str(caught.value)

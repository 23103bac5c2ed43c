"""LoRA on backend `torch`: merged shards and export equal PEFT's own model, checkpoints hold adapters alone, an engine sees each step."""

import pytest
import torch
from safetensors.torch import load_file

from jackfield.components import OutputRequest, Request, WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig, SamplingConfig
from jackfield.errors import ConfigError
from jackfield.testing.backend import BackendConformance
from jackfield.testing.models import plain_model, random_batch, reference_log_probs, tiny_model
from jackfield.testing.processes import SimpleLoss
from jackfield_hf.engine import HFEngine
from jackfield_torch.backend import TorchBackend, TorchConfig

CONTEXT = WorkerContext("policy", torch.device("cpu"), 0)


def build(folder, lora, **options):
    backend = TorchBackend(TorchConfig(lora=lora, **options))
    backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(lr=1e-2), CONTEXT)
    return backend


def train(backend, steps=2):
    for seed in range(steps):
        backend.forward_backward([random_batch(seed=seed)], SimpleLoss())
        backend.optimizer_step()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merged_weights_are_what_is_trained(tmp_path, dtype):
    folder = tiny_model(tmp_path / "model", "qwen2")
    backend = build(folder, {"r": 4, "alpha": 8}, dtype=dtype)
    engine = HFEngine()
    engine.setup(ModelConfig(path=str(folder)), WorkerContext("policy", torch.device("cpu"), 0, dtype=dtype))
    assert engine.adopt(backend.shards())
    before = {s.name: s.tensor.clone() for s in backend.shards()}
    files = load_file(folder / "model.safetensors")
    assert set(before) == set(files)
    assert all(torch.equal(before[n], files[n].to(before[n].dtype)) for n in files)
    train(backend)
    backend.shards()  # a sync asks for them
    engine.weights_updated(1)
    moved = {n for n, t in before.items() if not torch.equal(t, next(s.tensor for s in engine.shards() if s.name == n))}
    assert moved == {n for n in files if "_proj.weight" in n}
    plain = plain_model(_export(backend, tmp_path / "out"))
    batch = random_batch(seed=9)
    with torch.no_grad():
        want = reference_log_probs(plain, batch)
    got = backend.forward([batch], OutputRequest())[0].log_probs
    assert float((got - want).abs().max()) < (1e-4 if dtype == "float32" else 0.3)
    (sample,) = engine.generate([Request(0, (5, 6), (0,), SamplingConfig(temperature=0, max_new_tokens=1))])
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([[5, 6]])).logits[0, -1]
    assert float(logits.max() - logits[sample.tokens[0]]) < (1e-4 if dtype == "float32" else 0.1)


def _export(backend, folder):
    backend.export(folder)
    return folder


def test_a_checkpoint_holds_the_adapters_alone(tmp_path):
    folder = tiny_model(tmp_path / "model")
    backend = build(folder, {"r": 2, "targets": ("q_proj", "v_proj")})
    train(backend)
    saved = tmp_path / "saved"
    saved.mkdir()
    backend.save(saved)
    assert all(".lora_" in n for n in load_file(saved / "model.safetensors"))
    other = build(folder, {"r": 2, "targets": ("q_proj", "v_proj")})
    other.load(saved)
    for b in (backend, other):
        train(b)
    assert all(torch.equal(a.tensor, b.tensor) for a, b in zip(backend.shards(), other.shards(), strict=True))


def test_targets_that_do_not_fit(tmp_path):
    folder = tiny_model(tmp_path)
    with pytest.raises(ConfigError, match="nothing_proj"):
        build(folder, {"targets": ("nothing_proj",)})
    with pytest.raises(ConfigError, match="head"):
        build(folder, {"targets": ("lm_head",)})


class TestLaws(BackendConformance):
    """The laws hold for adapters too; the gradient is not the whole model's."""

    component = "torch"
    options = {"lora": {"r": 4}}

    test_gradient_is_that_of_transformers = None

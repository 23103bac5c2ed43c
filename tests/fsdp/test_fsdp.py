"""Backend `fsdp` against backend `torch`, and what only sharding has: checkpoints on other numbers of ranks, narrow reductions."""

import math

import pytest
import torch
from safetensors.torch import load_file

from jackfield.components import WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig
from jackfield.errors import CheckpointError, ConfigError
from jackfield.testing.models import random_batch, tiny_model
from jackfield.testing.processes import Model, Ranks
from jackfield_torch.fsdp import FSDPBackend, FSDPConfig

TRAIN = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.01, max_grad_norm=0.5)


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def one():
    return Ranks(1)


def train(ranks, component, folder, options=None, optimizer=TRAIN, steps=2):
    it = Model(ranks, component, options or {}, ModelConfig(path=str(folder)), optimizer)
    metrics = []
    for seed in range(steps):
        it.accumulate(random_batch(7, seed=seed), micro=2)
        metrics.append(it.step())
    return it, metrics


@pytest.mark.parametrize("options", [{}, {"lora": {"r": 4}}], ids=["whole", "lora"])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_two_processes_equal_one(one, two, tmp_path, family, options):
    """Weights, gradient norm, rate and export after two clipped steps on an odd number of samples."""
    folder = tiny_model(tmp_path / "model", family, vocab=65)
    (here, metrics), (there, others) = train(one, "torch", folder, options), train(two, "fsdp", folder, options)
    for mine, other in zip(metrics, others, strict=True):
        assert other == pytest.approx(mine, rel=1e-5)
    mine, other = here.weights(), there.weights()
    assert set(mine) == set(other)
    for name in mine:
        torch.testing.assert_close(other[name], mine[name], rtol=1e-5, atol=1e-5)
    files = [load_file(it.export(tmp_path / name) / "model.safetensors") for name, it in (("one", here), ("two", there))]
    assert set(files[0]) == set(files[1])
    for name in files[0]:
        torch.testing.assert_close(files[1][name], files[0][name], rtol=1e-5, atol=1e-5)


def test_a_checkpoint_of_two_ranks_is_read_by_one(one, two, tmp_path):
    folder = tiny_model(tmp_path / "model")
    there, _ = train(two, "fsdp", folder)
    saved = there.save(tmp_path / "saved")
    here = Model(one, "fsdp", {}, ModelConfig(path=str(folder)), TRAIN)
    here.load(saved)
    for it in (there, here):
        it.accumulate(random_batch(6, seed=5))
        it.step()
    mine, other = here.weights(), there.weights()
    for name in mine:
        torch.testing.assert_close(other[name], mine[name], rtol=1e-5, atol=1e-6)
    with pytest.raises(CheckpointError, match="cannot be read"):
        here.load(tmp_path)


def test_bfloat16_keeps_float32_shards_and_a_narrow_reduction_has_its_error(two, tmp_path):
    """The norm of a gradient reduced in bfloat16 is off by less than 2^-8; layers compute in bfloat16, shards stay float32."""
    folder = tiny_model(tmp_path / "model")
    free = OptimizerConfig(lr=0.0, max_grad_norm=math.inf)
    _, wide = train(two, "fsdp", folder, optimizer=free, steps=1)
    _, narrow = train(two, "fsdp", folder, {"reduce_dtype": "bfloat16"}, optimizer=free, steps=1)
    it, half = train(two, "fsdp", folder, {"dtype": "bfloat16"}, optimizer=free, steps=1)
    assert 0 < abs(narrow[0]["grad_norm"] / wide[0]["grad_norm"] - 1) < 2**-8
    assert 0 < abs(half[0]["grad_norm"] / wide[0]["grad_norm"] - 1) < 0.02
    assert all(t.dtype == torch.float32 for t in it.weights().values())


def test_options_that_do_nothing_are_errors(tmp_path):
    backend = FSDPBackend(FSDPConfig(cpu_offload=True))
    with pytest.raises(ConfigError, match="cpu_offload"):
        backend.setup(ModelConfig(path=str(tiny_model(tmp_path))), TRAIN, WorkerContext("policy", torch.device("cpu"), 0))

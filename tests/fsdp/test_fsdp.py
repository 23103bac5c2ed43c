"""Backend `fsdp` against backend `torch`, and what only sharding has: checkpoints on other numbers of ranks, narrow reductions."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.utils._python_dispatch import TorchDispatchMode

from jackfield import registry
from jackfield.components import WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, OptimizerConfig
from jackfield.errors import CheckpointError, ConfigError
from jackfield.testing.models import plain_model, random_batch, tiny_model
from jackfield.testing.processes import Model, Ranks, SimpleLoss
from jackfield.testing.ranks import run_ranks
from jackfield_torch.fsdp import FSDPBackend, FSDPConfig
from jackfield_torch.tensor_parallel import split

TRAIN = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.01, max_grad_norm=0.5)


SGD = OptimizerConfig(lr=1e3, eps=1e3, betas=(0.0, 0.0), max_grad_norm=math.inf)
"""AdamW that moves weights by g / (1 + |g| / eps): three steps that differ where gradients do, and nowhere else."""


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


@pytest.fixture(scope="module")
def four():
    ranks = Ranks(4)
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


def test_bfloat16_keeps_float32_shards(two, tmp_path):
    """Layers compute in bfloat16, shards stay float32."""
    folder = tiny_model(tmp_path / "model")
    free = OptimizerConfig(lr=0.0, max_grad_norm=math.inf)
    _, wide = train(two, "fsdp", folder, optimizer=free, steps=1)
    it, half = train(two, "fsdp", folder, {"dtype": "bfloat16"}, optimizer=free, steps=1)
    assert 0 < abs(half[0]["grad_norm"] / wide[0]["grad_norm"] - 1) < 0.02
    assert all(t.dtype == torch.float32 for t in it.weights().values())


class Sent(TorchDispatchMode):
    """Bytes handed to collectives that add floats up."""

    total = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name = function.name()
        if "reduce_scatter" in name or "allreduce" in name:
            given = args[1] if "reduce_scatter" in name else args[0][0]
            self.total += given.nbytes if given.is_floating_point() else 0
        return function(*args, **(kwargs or {}))


def reduced(rank, folder, component, dtype):
    """Bytes that this rank sends off for one gradient, and its part of what comes back, as the step that it makes."""
    backend = registry.build("backend", ComponentSpec(name=component, options={"reduce_dtype": dtype}))
    backend.setup(ModelConfig(path=str(folder)), SGD, WorkerContext("policy", torch.device("cpu"), 0, rank, 2))
    before = {s.name: s.tensor.clone() for s in backend.shards()}
    with Sent() as sent:
        backend.forward_backward([random_batch(4, seed=rank)], SimpleLoss())
        backend.optimizer_step()
    return sent.total, torch.cat([(s.tensor - before[s.name]).flatten() for s in backend.shards()])


@pytest.mark.parametrize("component", ["torch", "fsdp"])
def test_a_narrow_reduction_sends_half_and_has_its_error(tmp_path, component):
    """bfloat16 keeps 8 bits: each rank's part and the sum are rounded once, by at most 2^-9 of themselves."""
    folder = tiny_model(tmp_path / "model")
    wide, narrow = (run_ranks(2, reduced, folder, component, dtype) for dtype in ("float32", "bfloat16"))
    parameters = sum(p.numel() for p in plain_model(folder).parameters())
    norm = 4 if component == "fsdp" else 0  # the sum of squares is not gradient, and stays float32
    assert [sent for sent, _ in wide] == [4 * parameters + norm] * 2
    assert [sent for sent, _ in narrow] == [2 * parameters + norm] * 2
    exact, rounded = (torch.cat([part for _, part in parts]) for parts in (wide, narrow))
    error = float((rounded - exact).norm() / exact.norm())
    print(f"{component}: {wide[0][0] - norm} and {narrow[0][0] - norm} bytes, relative error of the gradient {error:.5f}")
    assert 2**-11 < error < 2**-8


@pytest.mark.slow
@pytest.mark.parametrize(
    "family,model,ranks",
    [("qwen3", {}, 2), ("qwen2", {"tied": True, "vocab": 65, "hidden": 48}, 4)],
    ids=["tp2", "dp2-tp2"],
)
def test_tensor_parallel_equals_one_process(one, two, four, tmp_path, family, model, ranks):
    """Log-probs, loss, gradient norm, weights, export and checkpoint; with norms of heads, biases, an odd vocabulary."""
    folder = tiny_model(tmp_path / "model", family, **model)
    many = {2: two, 4: four}[ranks]
    here = Model(one, "torch", {}, ModelConfig(path=str(folder)), SGD)
    there = Model(many, "fsdp", {"tp": 2}, ModelConfig(path=str(folder)), SGD)
    assert [(p.dp_rank, p.dp_size, p.output) for p in there.positions] == [(r // 2, ranks // 2, r % 2 == 0) for r in range(ranks)]
    start = here.weights()
    for step in range(3):
        batch = random_batch(7, seed=step)
        mine, other = here.forward(batch)["log_probs"], there.forward(batch, micro=2)["log_probs"]
        torch.testing.assert_close(other, mine, rtol=0, atol=1e-4)
        assert there.accumulate(batch, micro=2) == pytest.approx(here.accumulate(batch), rel=1e-4)
        assert there.step() == pytest.approx(here.step(), rel=1e-4)
    mine, other = here.weights(), there.weights()
    assert set(mine) == set(other)
    for name in mine:
        assert not torch.equal(mine[name], start[name])
        torch.testing.assert_close(other[name], mine[name], rtol=1e-4, atol=1e-4)
    files = load_file(there.export(tmp_path / "out") / "model.safetensors")
    for name, tensor in files.items():
        torch.testing.assert_close(tensor.flatten(), other[name], rtol=0, atol=0)
    saved = there.save(tmp_path / "saved")
    for ranks, options in ((one, {}), (two, {}), (two, {"tp": 2})):
        again = Model(ranks, "fsdp", options, ModelConfig(path=str(folder)), SGD)
        again.load(saved)
        assert all(torch.equal(tensor, other[name]) for name, tensor in again.weights().items())


def test_tensor_parallel_that_does_not_fit(tmp_path):
    four = SimpleNamespace(size=lambda: 4)
    with pytest.raises(ConfigError, match=r"tp is 4, which does not divide the num_key_value_heads of LlamaForCausalLM: 2 % 4 = 2"):
        split(plain_model(tiny_model(tmp_path / "heads")), four)
    with pytest.raises(ConfigError, match=r"does not divide model.layers.0.mlp.gate_proj.weight \[130, 64\]: 130 % 4 = 2"):
        split(plain_model(tiny_model(tmp_path / "rows", kv_heads=4, intermediate_size=130)), four)
    with pytest.raises(ConfigError, match="style 'packed_colwise', which tp has not"):
        split(plain_model(tiny_model(tmp_path / "experts", "qwen3_moe", kv_heads=4)), four)
    with pytest.raises(ConfigError, match=r"brings no plan"):
        split(SimpleNamespace(tp_plan={}), four)
    context = WorkerContext("policy", torch.device("cpu"), 0)
    with pytest.raises(ConfigError, match=r"tp is 2, which does not divide policy's 1 workers: 1 % 2 = 1"):
        FSDPBackend(FSDPConfig(tp=2)).setup(ModelConfig(path=str(tmp_path / "heads")), TRAIN, context)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_one_rank_makes_no_process_group_and_is_backend_torch(one, tmp_path, dtype):
    """Bit for bit, its checkpoint included; and an engine may share its storage."""
    folder = tiny_model(tmp_path / "model")
    found = []
    for component in ("torch", "fsdp"):
        it, metrics = train(one, component, folder, {"dtype": dtype})
        saved = it.save(tmp_path / component)
        it.accumulate(random_batch(4, seed=9))
        it.step()
        after = it.weights()
        again = Model(one, component, {"dtype": dtype}, ModelConfig(path=str(folder)), TRAIN)
        again.load(saved)
        again.accumulate(random_batch(4, seed=9))
        again.step()
        assert all(torch.equal(tensor, after[name]) for name, tensor in again.weights().items())
        found.append((metrics, after))
    assert not dist.is_initialized()
    assert found[0][0] == found[1][0]
    assert all(torch.equal(tensor, found[1][1][name]) for name, tensor in found[0][1].items())


def test_options_that_do_nothing_are_errors(tmp_path):
    backend = FSDPBackend(FSDPConfig(cpu_offload=True))
    with pytest.raises(ConfigError, match="cpu_offload"):
        backend.setup(ModelConfig(path=str(tiny_model(tmp_path))), TRAIN, WorkerContext("policy", torch.device("cpu"), 0))

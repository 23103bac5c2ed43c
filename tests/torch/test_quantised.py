"""Backend `torch` with `reduce_dtype: int8`: sums of gradients over ranks that travel in 8 bits."""

import math

import pytest
import torch
import torch.distributed as dist

from jackfield import registry
from jackfield.config import ComponentSpec, ModelConfig, OptimizerConfig
from jackfield.errors import ConfigError
from jackfield.testing.models import random_batch, tiny_model
from jackfield.testing.processes import Model, Ranks
from jackfield.testing.ranks import run_ranks
from jackfield_torch import quantised
from jackfield_torch.quantised import BLOCK, decode, encode

TRAIN = OptimizerConfig(lr=1e-3, eps=1e-3, weight_decay=0.01, max_grad_norm=0.5)
INT8 = {"reduce_dtype": "int8"}


def noise(seed=0):
    return torch.Generator().manual_seed(seed)


def uneven(rows, seed=0):
    """Blocks of very different size, as gradients have; one of zeros, one of numbers that have no reciprocal."""
    values = torch.randn(rows, BLOCK, generator=noise(seed)) * torch.randn(rows, 1, generator=noise(seed + 1)).mul(3).exp()
    values[1], values[2] = 0, 1e-42
    return values


def steps(values):
    """The distance of neighbours in each block, with room for the rounding of float32."""
    return values.abs().amax(dim=1, keepdim=True) / 127 * (1 + 1e-5) + torch.finfo(torch.float32).tiny


def test_a_value_is_off_by_less_than_a_step_and_by_nothing_in_the_mean():
    values, source = uneven(64), noise()
    coded = encode(values, source)
    assert coded.dtype == torch.int8
    assert coded.shape == (64, BLOCK + 4)
    error = decode(coded) - values
    assert bool((error.abs() <= steps(values)).all())
    assert error[1].count_nonzero() == 0
    draws = 400
    mean = torch.stack([decode(encode(values, source)) for _ in range(draws)]).mean(dim=0) - values
    # Rounding up with probability p has a variance of p (1 - p) <= 1/4 steps squared: 8,192 means lie within six deviations.
    assert bool((mean.abs() <= 6 * 0.5 / math.sqrt(draws) * steps(values)).all())


def test_a_blocks_largest_value_does_not_overflow(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda shape, **_: torch.full(shape, 1 - 2**-24))  # the most that it gives
    values = uneven(64)
    assert bool(((decode(encode(values, noise())) - values).abs() <= steps(values)).all())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_block_that_is_not_finite_stays_so_and_alone(bad):
    values = uneven(4)
    values[3, 7] = bad
    found = decode(encode(values, noise()))
    assert not found[3].isfinite().any()
    assert found[:3].isfinite().all()


def summed(rank, given, seed):
    """The sums here of both ranks' tensors, and of the same tensors once more with another seed."""
    results = []
    for s in (seed, seed + 1):
        tensors = [ranks[rank].clone(memory_format=torch.preserve_format) for ranks in given]
        quantised.all_reduce(tensors, s)
        results.append(tensors)
    return results


def test_all_ranks_have_the_same_sum_within_three_steps(monkeypatch):
    """Whatever the shape: less than a block, not a multiple of one, transposed, three dimensions, in several pieces."""
    monkeypatch.setattr(quantised, "PIECE", 1000)
    shapes = [(3, 5), (40, 2 * BLOCK), (129, 7), (4, 6, 300)]
    given = [tuple(torch.randn(shape, generator=noise(10 * i + rank)) for rank in range(2)) for i, shape in enumerate(shapes)]
    given[2] = tuple(t.t().contiguous().t() for t in given[2])
    given.append((torch.zeros(8, BLOCK), torch.full((8, BLOCK), torch.nan)))
    mine, other = run_ranks(2, summed, given, 3)
    for here, there in zip(mine[0] + mine[1], other[0] + other[1], strict=True):
        assert torch.equal(here.view(torch.int32), there.view(torch.int32))  # bits, so that NaN equals NaN
    for (a, b), got, again in zip(given[:-1], *mine, strict=False):
        bound = (a.abs().max() + b.abs().max() + (a + b).abs().max() * 1.02) / 127
        assert 0 < float((got - (a + b)).abs().max()) <= bound
        assert not torch.equal(got, again)
    assert not mine[0][-1].isfinite().any()


@pytest.fixture(scope="module")
def two():
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def train(it, seeds):
    metrics = []
    for seed in seeds:
        it.accumulate(random_batch(7, seed=seed), micro=2)
        metrics.append(it.step())
    return metrics


def build(ranks, folder, options, optimizer=TRAIN):
    return Model(ranks, "torch", options, ModelConfig(path=str(folder)), optimizer)


@pytest.mark.parametrize("options", [{}, {"dtype": "bfloat16", "lora": {"r": 4}}], ids=["float32", "bfloat16-lora"])
def test_replicas_stay_equal_and_a_resumed_run_is_the_same_bit_for_bit(two, tmp_path, options):
    folder = tiny_model(tmp_path / "model")
    it = build(two, folder, INT8 | options)
    train(it, (0, 1))
    saved = it.save(tmp_path / "saved")
    metrics = train(it, (2, 3))
    mine, other = two.call("weights")
    assert all(torch.equal(a[3], b[3]) for a, b in zip(mine, other, strict=True))
    again = build(two, folder, INT8 | options)
    again.load(saved)
    assert train(again, (2, 3)) == metrics
    assert all(torch.equal(a[3], b[3]) for a, b in zip(two.call("weights")[1], mine, strict=True))


def test_the_norm_that_is_clipped_is_of_the_sum_and_vectors_are_exact(two, tmp_path):
    """One step on the exact sum and on the one in 8 bits: matrices' steps differ a little, vectors' not at all."""
    folder = tiny_model(tmp_path / "model")
    free = OptimizerConfig(lr=1e3, eps=1e3, betas=(0.0, 0.0), max_grad_norm=math.inf)
    found = []
    for options in ({}, INT8):
        it = build(two, folder, options, free)
        before = it.weights()
        (metrics,) = train(it, (0,))
        shapes = {name: shape for name, shape, _, _ in two.call("weights")[0]}
        found.append((metrics["grad_norm"], {name: tensor - before[name] for name, tensor in it.weights().items()}))
    (norm, exact), (narrow, coarse) = found
    assert 0 < abs(narrow / norm - 1) < 2**-8
    for name, step in exact.items():
        if len(shapes[name]) == 1:
            assert torch.equal(step, coarse[name])
        else:
            assert 2**-9 < float((coarse[name] - step).norm() / step.norm()) < 2**-4


def test_a_gradient_that_is_not_finite_on_one_rank_is_dropped_by_all(two, tmp_path):
    it = build(two, tiny_model(tmp_path / "model"), INT8)
    before = it.weights()
    batch = random_batch(4)
    batch.advantages[3] = torch.nan  # the second rank's only sample with a token to train on
    it.accumulate(batch)
    assert [metrics["bad_gradients"] for metrics in two.call("call", "optimizer_step")] == [1, 1]
    assert all(torch.equal(tensor, before[name]) for name, tensor in it.weights().items())


def test_one_rank_sends_nothing_and_is_exact(tmp_path):
    folder = tiny_model(tmp_path / "model")
    plain, narrow = (build(Ranks(1), folder, options) for options in ({}, INT8))
    assert train(plain, (0, 1)) == train(narrow, (0, 1))
    assert not dist.is_initialized()


def test_other_backends_say_that_they_have_it_not():
    with pytest.raises(ConfigError, match=r"reduce_dtype.*'float32' or 'bfloat16', but got 'int8'") as caught:
        registry.build("backend", ComponentSpec(name="fsdp", options=INT8))
    assert "\n" not in str(caught.value)

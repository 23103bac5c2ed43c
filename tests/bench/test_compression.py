"""What bench/compression.py counts and compares."""

import compression
import pytest
import torch

from jackfield.components import WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig
from jackfield.testing.models import plain_model, random_batch, tiny_model
from jackfield.testing.processes import SimpleLoss
from jackfield.testing.ranks import run_ranks


def step(rank, folder):
    backend = compression.Comparing(compression.TorchConfig())
    backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(), WorkerContext("policy", torch.device("cpu"), 0, rank, 2))
    backend.forward_backward([random_batch(4, seed=rank)], SimpleLoss())
    return backend.optimizer_step()


def test_bytes_and_errors_of_one_step(tmp_path):
    folder = tiny_model(tmp_path / "model")
    found, other = run_ranks(2, step, folder)
    assert found == other
    sizes = [(p.dim() > 1, p.numel()) for p in plain_model(folder).parameters()]
    values, vectors = sum(n for _, n in sizes), sum(n for matrix, n in sizes if not matrix)
    blocks = sum(-(-n // 256) * 2 for matrix, n in sizes if matrix)
    sent = {way: found[f"sent/{way}"] for way in compression.WAYS}
    assert sent["float32"] == 2 * sent["bfloat16"] == 4 * values
    assert sent["int8"] == 132 * blocks + 4 * vectors
    assert sent["powersgd-1"] < sent["powersgd-4"] < sent["powersgd-16"]
    errors = {way: found[f"error/{way}"] for way in compression.WAYS}
    assert errors["float32"] == 0
    # two roundings of blocks whose largest value is about three times their root mean square: sqrt(2 / 6) x 3 / 127
    assert errors["int8"] == pytest.approx(0.0136, rel=0.5)
    assert 2**-11 < errors["bfloat16"] < 2**-8
    assert errors["powersgd-1"] > errors["powersgd-4"] > errors["int8"]

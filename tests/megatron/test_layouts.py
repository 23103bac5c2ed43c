"""Every parallel layout gives the numbers of one process: log-probs, loss, gradients, and the weights after three optimizer steps."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

import megatron_reference as R
import pytest
import torch

from jackfield.testing.models import random_batch, tiny_model
from jackfield.testing.ranks import run_ranks

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)
pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import once, before the ranks are forked."""
    R.import_everything()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder and reference result by model settings; made once."""
    home = tmp_path_factory.mktemp("models")

    @cache
    def make(family: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Path, Any, Any]:
        folder = tiny_model(home / f"{family}-{abs(hash(settings))}", family, **dict(settings))
        batch = random_batch(8, vocab=dict(settings).get("vocab", 64))
        # a sampled padding token is a token like any other, but transformers does not train its embedding as an input
        batch.tokens[batch.response_mask & (torch.arange(batch.tokens.shape[1]) % 5 == 0)] = 0
        return folder, batch, R.reference(folder, batch)

    return lambda family, **settings: make(family, tuple(sorted(settings.items())))


def close(got: torch.Tensor, want: torch.Tensor, what: str, tolerance: float = 1e-4) -> None:
    """Relative to the largest element of the tensor."""
    error = (got.float() - want).abs().max() / want.abs().max().clamp(min=1e-8)
    assert error < tolerance, f"{what}: relative error {error:.2e}"


LAYOUTS = {
    "tp1": (1, "llama", {}, {}),
    "tp2": (2, "llama", {}, {"tp": 2, "sequence_parallel": False}),
    "tp2-sp": (2, "qwen2", {"tied": True}, {"tp": 2}),
    "pp2": (2, "llama", {}, {"pp": 2}),
    "tp2-pp2": (4, "qwen3", {}, {"tp": 2, "pp": 2}),
    "tp2-dp2": (4, "llama", {}, {"tp": 2}),
    "pp2-vpp2": (2, "llama", {"layers": 4}, {"pp": 2, "vpp": 2}),
    "ep2": (2, "mixtral", {}, {"ep": 2}),
    "ep2-qwen": (2, "qwen3_moe", {}, {"ep": 2}),
    "experts-on-tp2": (2, "mixtral", {}, {"tp": 2}),
    "experts-on-dp2": (2, "mixtral", {}, {}),
    "tp2-ep2-pp2": (4, "qwen3_moe", {}, {"tp": 2, "ep": 2, "pp": 2}),
    "cp2": (2, "llama", {}, {"cp": 2}),
    "cp2-tp2": (4, "qwen2", {}, {"cp": 2, "tp": 2}),
    "uneven-pp2": (2, "llama", {"layers": 7}, {"pp": 2}),
    "tp4-over-2-kv-heads": (4, "qwen3", {}, {"tp": 4}),
    "tied-pp2": (2, "qwen2", {"tied": True}, {"pp": 2}),
    "tied-pp2-vpp2": (2, "llama", {"tied": True, "layers": 4}, {"pp": 2, "vpp": 2}),
    "odd-vocabulary-tp2": (2, "llama", {"vocab": 61}, {"tp": 2}),
    "packed-tp2-sp": (2, "llama", {}, {"tp": 2, "packing": True}),
    "recompute-tp2-pp2": (4, "llama", {}, {"tp": 2, "pp": 2, "activation_checkpointing": True}),
    "selective-tp2": (2, "llama", {}, {"tp": 2, "recompute_modules": ("mlp",)}),
    "overlap-dp2": (2, "llama", {}, {"overlap_grad_reduce": True, "overlap_param_gather": True}),
    "overlap-dp2-pp2": (4, "llama", {}, {"pp": 2, "overlap_grad_reduce": True, "distributed_optimizer": False}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout_equals_one_process(name: str, models: Any) -> None:
    """Log-probs, entropy, loss, gradient norms, and weights after three steps."""
    world, family, settings, options = LAYOUTS[name]
    folder, batch, want = models(family, **settings)
    ranks = run_ranks(world, R.train, world, folder, batch, options, 2, 3)
    mask = batch.response_mask
    outs = [r for r in ranks if r["position"].output]
    assert sorted(r["position"].dp_rank for r in outs) == list(range(outs[0]["position"].dp_size))
    for field in ("log_probs", "entropy"):
        got = torch.zeros_like(want.log_probs)
        for r in outs:
            got[r["indices"]] = r[field]
        close(torch.where(mask, got, 0), torch.where(mask, getattr(want, field), 0), field)
    assert sum(r["loss"] for r in outs) == pytest.approx(want.loss, rel=1e-4, abs=1e-6)
    for r in ranks:
        assert r["norms"] == pytest.approx(want.norms, rel=1e-4)
    params = R.assemble([r["params"] for r in ranks])
    assert params.keys() == want.params.keys()
    for key, value in want.params.items():
        close(params[key], value, key)


GRADIENTS = [
    "tp2",
    "tp2-sp",
    "pp2",
    "tp2-pp2",
    "tp2-dp2",
    "pp2-vpp2",
    "ep2",
    "cp2",
    "tp4-over-2-kv-heads",
    "tied-pp2",
    "odd-vocabulary-tp2",
]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_equal_one_process(name: str, models: Any) -> None:
    """Every gradient, element by element, through the canonical names."""
    world, family, settings, options = LAYOUTS[name]
    folder, batch, want = models(family, **settings)
    grads = R.assemble(run_ranks(world, R.gradients, world, folder, batch, options, 3))
    assert grads.keys() == want.grads.keys()
    for key, value in want.grads.items():
        close(grads[key], value, key)

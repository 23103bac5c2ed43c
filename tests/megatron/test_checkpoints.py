"""Resume in the same and in another layout, asynchronous saving, broken files, and the Hugging Face export."""

from __future__ import annotations

import importlib.util
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


def _steps(backend: Any, batch: Any, first: int, count: int) -> list[float]:
    """Optimizer steps on data that depends on the step's number."""
    norms = []
    for step in range(first, first + count):
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(step))
        moved = batch[order]
        scale = moved.loss_scale * (1 + step)
        mine = R.share(moved.replace(loss_scale=scale), backend.position.dp_rank, backend.position.dp_size, 2)
        backend.forward_backward(mine, R.PolicyLoss())
        norms.append(backend.optimizer_step()["grad_norm"])
    return norms


def _straight(rank: int, world: int, folder: Path, batch: Any, options: dict[str, Any], where: Path | None) -> Any:
    backend = R.build(folder, rank, world, options)
    norms = _steps(backend, batch, 0, 3)
    if where is not None:
        if rank == 0:
            where.mkdir()
        torch.distributed.barrier()
        if where.name == "background":
            backend.save_async(where)
            norms += _steps(backend, batch, 3, 3)
            backend.finish_save()
            return norms, R.boxes(backend)
        backend.save(where)
    return norms + _steps(backend, batch, 3, 3), R.boxes(backend)


def _resumed(rank: int, world: int, folder: Path, batch: Any, options: dict[str, Any], where: Path) -> Any:
    backend = R.build(folder, rank, world, options)
    _steps(backend, batch, 7, 1)  # whatever happened before must not show
    backend.load(where)
    return _steps(backend, batch, 3, 3), R.boxes(backend)


CHANGES = {
    "same-tp2-pp2": ("qwen3", {"layers": 3}, (4, {"tp": 2, "pp": 2}), (4, {"tp": 2, "pp": 2})),
    "tp2-pp2-to-one": ("llama", {"tied": True, "vocab": 61}, (4, {"tp": 2, "pp": 2}), (1, {})),
    "dp2-to-tp2": ("qwen2", {"vocab": 61}, (2, {}), (2, {"tp": 2})),
    "tp4-to-dp2-pp2": ("llama", {}, (4, {"tp": 4}), (4, {"pp": 2, "distributed_optimizer": False})),
    "ep2-pp2-to-dp2": ("mixtral", {}, (4, {"ep": 2, "pp": 2}), (2, {})),
    "bf16-dp2-to-tp2": ("llama", {}, (2, {"dtype": "bfloat16"}), (2, {"tp": 2, "dtype": "bfloat16"})),
    "async-tp2-to-pp2-vpp2": ("llama", {"layers": 4}, (2, {"tp": 2}), (2, {"pp": 2, "vpp": 2})),
}


@pytest.mark.parametrize("name", CHANGES)
def test_six_steps_are_three_and_three(name: str, tmp_path: Path) -> None:
    """Law 29: 6 steps equal 3, a save, a load into a used backend (of another layout), and 3; bit for bit in the same layout."""
    family, settings, (world, options), (world2, options2) = CHANGES[name]
    folder = tiny_model(tmp_path / "model", family, **settings)
    batch = random_batch(8, vocab=settings.get("vocab", 64))
    where = tmp_path / ("background" if name.startswith("async") else "checkpoint")
    straight = run_ranks(world, _straight, world, folder, batch, options, where)
    resumed = run_ranks(world2, _resumed, world2, folder, batch, options2, where)
    same = (world, options) == (world2, options2)
    bf16 = options.get("dtype") == "bfloat16"
    assert resumed[0][0] == (straight[0][0][3:] if same else pytest.approx(straight[0][0][3:], rel=2e-2 if bf16 else 1e-4))
    want, got = (R.assemble([r[1] for r in ranks]) for ranks in (straight, resumed))
    assert got.keys() == want.keys()
    for key, value in want.items():
        if same:
            assert torch.equal(got[key], value), key
        else:
            error = (got[key].float() - value.float()).abs().max() / value.float().abs().max()
            assert error < (2e-2 if bf16 else 1e-4), f"{key}: {error:.2e}"


def _loads(rank: int, folder: Path, where: Path) -> str:
    from jackfield.errors import CheckpointError

    try:
        R.build(folder, rank, 1, {}).load(where)
    except CheckpointError as error:
        return str(error)
    return ""


def test_unreadable_checkpoints_are_one_line(tmp_path: Path) -> None:
    """An empty folder, a torn file and another model's checkpoint."""
    folder = tiny_model(tmp_path / "model", "llama")
    (tmp_path / "empty").mkdir()
    assert "cannot be read" in run_ranks(1, _loads, folder, tmp_path / "empty")[0]
    run_ranks(1, _straight, 1, folder, random_batch(4), {}, tmp_path / "good")
    for file in (tmp_path / "good").glob("*.distcp"):
        file.write_bytes(file.read_bytes()[:100])
    assert "cannot be read" in run_ranks(1, _loads, folder, tmp_path / "good")[0]
    run_ranks(1, _straight, 1, folder, random_batch(4), {}, tmp_path / "small")
    other = tiny_model(tmp_path / "other", "llama", layers=3)
    message = run_ranks(1, _loads, other, tmp_path / "small")[0]
    assert "cannot be read" in message
    assert "\n" not in message


def _export(rank: int, world: int, folder: Path, options: dict[str, Any], where: Path) -> Any:
    backend = R.build(folder, rank, world, options)
    where.mkdir(exist_ok=True)
    backend.export(where)
    return R.boxes(backend)


@pytest.mark.parametrize(
    ("family", "settings", "world", "options"),
    [
        ("llama", {"tied": True}, 1, {}),
        ("qwen2", {"vocab": 61}, 4, {"tp": 2, "pp": 2}),
        ("qwen3", {"layers": 3}, 4, {"tp": 4}),
        ("mixtral", {}, 4, {"ep": 2, "pp": 2}),
        ("qwen3_moe", {}, 2, {"tp": 2, "ep": 2, "dtype": "bfloat16"}),
    ],
)
def test_round_trip_is_bit_exact(family: str, settings: Any, world: int, options: Any, tmp_path: Path) -> None:
    """Safetensors into local shards and back: every byte, under names that transformers loads without a complaint."""
    import transformers
    from safetensors.torch import load_file

    dtype = options.get("dtype", "float32")
    folder = tiny_model(tmp_path / "model", family, dtype=dtype, **settings)
    run_ranks(world, _export, world, folder, options, tmp_path / "out")
    want, got = (load_file(f / "model.safetensors") for f in (folder, tmp_path / "out"))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[k], want[k]) and got[k].dtype == want[k].dtype for k in want)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert (tmp_path / "out" / "tokenizer.json").is_file()

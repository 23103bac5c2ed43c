"""Families and RoPE scaling at TP 1, log-probs over a split vocabulary, critics, storage sharing, errors with their arithmetic."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import megatron_reference as R
import pytest
import torch

from jackfield.components import OutputRequest, WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig
from jackfield.errors import ConfigError, DataError
from jackfield.testing.models import plain_model, random_batch, reference_log_probs, tiny_model
from jackfield.testing.ranks import run_ranks

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)
pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """Import once, before the ranks are forked."""
    R.import_everything()


# ---- families ---------------------------------------------------------------------------------------------------------
LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
FAMILIES = {
    "llama": ("llama", {}),
    "llama-tied-gqa-3": ("llama", {"tied": True, "hidden": 48, "heads": 6, "kv_heads": 2}),
    "llama-rope-llama3": ("llama", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}}),
    "llama-rope-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}}),
    "qwen2": ("qwen2", {}),
    "qwen2-rope-yarn": (
        "qwen2",
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}},
    ),
    "qwen3": ("qwen3", {"head_dim": 32}),
    "mixtral": ("mixtral", {}),
    "qwen3-moe": ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 3}),
    "qwen3-moe-not-normalised": ("qwen3_moe", {"norm_topk_prob": False}),
    "qwen3-moe-mixed-layers": ("qwen3_moe", {"layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}),
}


def _log_probs(rank: int, folders: list[Path], batch: Any) -> list[torch.Tensor]:
    results = []
    for folder in folders:
        for packing in (False, True):
            backend = R.build(folder, rank, 1, {"packing": packing}, optimizer=None)
            results.append(backend.forward([batch], OutputRequest())[0].log_probs)
    return results


def test_every_family_equals_transformers(tmp_path: Path) -> None:
    """Log-probs within 1e-4 in float32 (measured: 1e-6), padded and packed; every kind of RoPE scaling that does not depend on length."""
    batch = random_batch(6)
    folders = [tiny_model(tmp_path / name, family, **settings) for name, (family, settings) in FAMILIES.items()]
    got = run_ranks(1, _log_probs, folders, batch)[0]
    for index, (name, folder) in enumerate(zip(FAMILIES, folders, strict=True)):
        with torch.no_grad():
            want = reference_log_probs(plain_model(folder), batch, 1.0)
        for log_probs in got[2 * index : 2 * index + 2]:
            error = (log_probs - want)[batch.response_mask].abs().max()
            assert error < 1e-4, f"{name}: {error:.2e}"


# ---- log-probs over a split vocabulary ------------------------------------------------------------------------------------
def _vocabulary(rank: int, size: int, real: int, chunk: int) -> Any:
    from torch.distributed import group

    from jackfield_megatron.logprobs import Vocabulary

    rows = -(-real // size)
    return Vocabulary(group.WORLD, rank * rows, max(0, min(rows, real - rank * rows)), chunk), rows


def _split(rank: int, size: int, hidden: Any, weight: Any, labels: Any, request: OutputRequest, chunk: int) -> Any:
    from jackfield_megatron.logprobs import statistics

    vocabulary, rows = _vocabulary(rank, size, len(weight), chunk)
    mine = torch.full((rows, weight.shape[1]), 3.0)
    mine[: vocabulary.real] = weight[vocabulary.first : vocabulary.first + vocabulary.real]
    mine.requires_grad_()
    hidden = hidden.clone().requires_grad_()
    results = statistics(hidden, mine, labels, request, vocabulary)
    sum((r * torch.arange(1.0, 1 + len(r)) * (k + 1)).sum() for k, r in enumerate(results)).backward()
    torch.distributed.all_reduce(hidden.grad)
    assert not mine.grad[vocabulary.real :].any()
    return [r.detach() for r in results], hidden.grad, mine.grad[: vocabulary.real]


@pytest.mark.parametrize(
    "request_",
    [
        OutputRequest(entropy=True, sum_pi_squared=True, temperature=0.7),
        OutputRequest(entropy=True, sum_pi_squared=True, top_p=0.8),
        OutputRequest(entropy=True, sum_pi_squared=True, top_k=5, top_p=0.9, temperature=1.3),
    ],
)
def test_split_vocabulary_equals_whole(request_: OutputRequest) -> None:
    """Law 11 with temperature, top-k and top-p, values and gradients, chunked by 5, over 1 and 3 ranks and 31 tokens."""
    from jackfield_logits import log_probs_from_hidden

    torch.manual_seed(0)
    hidden, weight, labels = torch.randn(13, 8), torch.randn(31, 8), torch.randint(0, 31, (13,))
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = log_probs_from_hidden(h, w, labels, request_)
    want = [out.log_probs, out.entropy, out.sum_pi_squared]
    sum((r * torch.arange(1.0, 1 + len(r)) * (k + 1)).sum() for k, r in enumerate(want)).backward()
    for size in (1, 3):
        ranks = run_ranks(size, _split, size, hidden, weight, labels, request_, 5)
        for results, grad, _ in ranks:
            for got, value in zip(results, want, strict=True):
                torch.testing.assert_close(got, value, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(grad, h.grad, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(torch.cat([r[2] for r in ranks]), w.grad, rtol=1e-4, atol=1e-5)


def test_padded_rows_take_no_part() -> None:
    """Law 25: 10 tokens on 4 ranks are padded to 12; uniform logits give -log 10, not -log 12."""
    labels = torch.arange(10)
    for results, _, _ in run_ranks(4, _split, 4, torch.ones(10, 2), torch.zeros(10, 2), labels, OutputRequest(), 4):
        torch.testing.assert_close(results[0], torch.full((10,), -2.302585))


def _memory(rank: int, tokens: int, vocab: int, chunk: int) -> tuple[int, int]:
    from jackfield_megatron.logprobs import statistics

    vocabulary, rows = _vocabulary(rank, 1, vocab, chunk)
    hidden, weight = torch.randn(tokens, 8, requires_grad=True), torch.randn(rows, 8, requires_grad=True)
    status = Path("/proc/self/status")

    def peak(name: str) -> int:
        return int(next(line for line in status.read_text().splitlines() if line.startswith(name)).split()[1]) * 1024

    # what torch allocates once for all is not the logits'
    statistics(hidden[:2], weight, torch.zeros(2, dtype=torch.int64), OutputRequest(entropy=True), vocabulary)[0].sum().backward()
    Path("/proc/self/clear_refs").write_text("5")
    before = peak("VmRSS")
    statistics(hidden, weight, torch.randint(0, vocab, (tokens,)), OutputRequest(entropy=True), vocabulary)[0].sum().backward()
    return peak("VmHWM") - before, 4 * tokens * vocab


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
def test_logits_are_never_whole() -> None:
    """Law 28: peak extra memory stays under one float32 copy of the logits, whole and not in one chunk."""
    # malloc may keep what was freed, which only adds: the smallest of three is what is needed
    extra, copy = min(run_ranks(1, _memory, 2048, 50_000, 128)[0] for _ in range(3))
    assert extra < 0.5 * copy, f"{extra / 1e6:.0f} MB extra, one copy is {copy / 1e6:.0f} MB"
    extra, _ = run_ranks(1, _memory, 2048, 50_000, 2048)[0]
    assert extra > copy, "the measurement sees nothing"


# ---- critics -------------------------------------------------------------------------------------------------------------
def _critic(rank: int, world: int, folder: Path, batch: Any, options: dict[str, Any]) -> Any:
    backend = R.build(folder, rank, world, options, head="value", optimizer=OptimizerConfig(lr=1e-2, eps=1e-4))
    mine = R.share(batch, backend.position.dp_rank, backend.position.dp_size, 2)
    for _ in range(3):
        backend.forward_backward(mine, R.ValueLoss())
        backend.optimizer_step()
    return R.boxes(backend)


@pytest.mark.parametrize("options", [{"tp": 2}, {"tp": 2, "sequence_parallel": False}, {"pp": 2}, {"cp": 2}], ids=str)
def test_critic_equals_one_process(options: dict[str, Any], tmp_path: Path) -> None:
    """A value head on a tied model: all weights after three steps."""
    from jackfield_torch.backend import TorchBackend

    folder = tiny_model(tmp_path / "model", "qwen2", tied=True)
    batch = random_batch(6)
    torch_backend = TorchBackend()
    context = WorkerContext("critic", torch.device("cpu"), 0)
    torch_backend.setup(ModelConfig(path=str(folder), head="value"), OptimizerConfig(lr=1e-2, eps=1e-4), context)
    for _ in range(3):
        torch_backend.forward_backward([batch], R.ValueLoss())
        torch_backend.optimizer_step()
    want = {s.name: s.tensor for s in torch_backend.shards()}
    got = R.assemble(run_ranks(2, _critic, 2, folder, batch, options))
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert (got[name] - value).abs().max() <= 1e-4 * value.abs().max(), name


# ---- storage -------------------------------------------------------------------------------------------------------------
def _adopted(rank: int, folder: Path, batch: Any) -> None:
    backend = R.build(folder, rank, 1, {})
    before = {s.name: s.tensor.clone() for s in backend.shards()}
    shards = backend.shards()
    fused: dict[str, torch.Tensor] = {}

    def storage(names: list[str]) -> None:
        whole = torch.zeros(sum(before[n].shape[0] for n in names), *before[names[0]].shape[1:])
        start = 0
        for n in names:
            fused[n] = whole[start : start + before[n].shape[0]]
            start += before[n].shape[0]

    for layer in range(2):
        p = f"model.layers.{layer}."
        storage([f"{p}self_attn.{x}_proj.weight" for x in "qkv"])
        storage([f"{p}self_attn.{x}_proj.bias" for x in "qkv"])
        storage([f"{p}mlp.{x}_proj.weight" for x in ("gate", "up")])
    from dataclasses import replace

    theirs = [replace(s, tensor=fused.get(s.name, torch.zeros_like(s.tensor))) for s in shards]
    lonely = [replace(s, tensor=torch.zeros_like(s.tensor)) for s in shards]
    assert not backend.adopt(lonely), "Q, K and V that do not lie together cannot be one parameter"
    assert backend.adopt(theirs)
    assert all(torch.equal(s.tensor, before[s.name]) for s in theirs), "values come along"
    backend.forward_backward([batch], R.PolicyLoss())
    backend.optimizer_step()
    for mine, engine in zip(backend.shards(), theirs, strict=True):
        assert mine.tensor.data_ptr() == engine.tensor.data_ptr(), mine.name
        assert not torch.equal(engine.tensor, before[mine.name]), f"{mine.name}: the step does not show in the engine's storage"


def test_weights_live_in_an_engines_storage(tmp_path: Path) -> None:
    """With vLLM's fused layout (q, k, v and gate, up as row blocks) everything is shared, and a step is served without a copy."""
    run_ranks(1, _adopted, tiny_model(tmp_path / "model", "qwen2"), random_batch(4))


# ---- gradients in bfloat16 -------------------------------------------------------------------------------------------------
def _norm(rank: int, world: int, folder: Path, batch: Any, dtype: str) -> tuple[float, int]:
    backend = R.build(folder, rank, world, {"dtype": "bfloat16", "grad_reduce_dtype": dtype})
    mine = R.share(batch, backend.position.dp_rank, backend.position.dp_size, 2)
    backend.forward_backward(mine, R.PolicyLoss())
    size = sum(b.grad_data.nbytes for chunk in backend.updater.chunks for b in chunk.buffers)
    return backend.optimizer_step()["grad_norm"], size


def test_bfloat16_reduction_halves_the_buffer(tmp_path: Path) -> None:
    """Gradient compression: half the bytes in memory and on the wire, an error of the size of bfloat16's rounding (2^-8)."""
    folder, batch = tiny_model(tmp_path / "model", "llama"), random_batch(8)
    (full, size), (half, small) = (run_ranks(2, _norm, 2, folder, batch, d)[0] for d in ("float32", "bfloat16"))
    assert small * 2 == size
    assert full != half
    assert half == pytest.approx(full, rel=2**-8)


# ---- memory handed to an engine ----------------------------------------------------------------------------------------------
def _handed(rank: int, folder: Path, batch: Any, dtype: str) -> tuple[list[float], list[float], int]:
    runs = []
    freed = 0
    for handing in (False, True):
        backend = R.build(folder, rank, 1, {"dtype": dtype})
        norms = []
        for _ in range(3):
            if handing:
                freed = backend.offload()
                backend.forward([batch], R.REQUEST)
                backend.onload()
            backend.forward_backward([batch], R.PolicyLoss())
            norms.append(backend.optimizer_step()["grad_norm"])
        runs.append(norms)
    return runs[0], runs[1], freed


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_handing_memory_over_does_not_show(dtype: str, tmp_path: Path) -> None:
    """Gradient buffers are freed while an engine generates (on CUDA, moments and masters move too); training goes on unchanged."""
    folder = tiny_model(tmp_path / "model", "llama")
    plain, handed, freed = run_ranks(1, _handed, folder, random_batch(4), dtype)[0]
    assert handed == plain
    weights = sum(p.numel() for p in plain_model(folder).parameters())
    assert freed >= 4 * weights


# ---- masters ---------------------------------------------------------------------------------------------------------------------
def _masters(rank: int, world: int, folder: Path, batch: Any, options: dict[str, Any]) -> Any:
    options = {"dtype": "bfloat16"} | options
    backend = R.build(folder, rank, world, options, optimizer=OptimizerConfig(lr=0.0, weight_decay=0.1))
    mine = R.share(batch, backend.position.dp_rank, backend.position.dp_size, 1)
    backend.forward_backward(mine, R.PolicyLoss())
    assert backend.optimizer_step()["grad_norm"] > 0
    with backend.groups.installed():
        return R.boxes(backend, {p.parameter: backend.updater.states.gather(p.parameter, 0)["weight"] for p in backend.places})


@pytest.mark.parametrize("options", [{}, {"tp": 2}, {"pp": 2}], ids=str)
def test_masters_keep_what_bfloat16_loses(options: dict[str, Any], tmp_path: Path) -> None:
    """Law 27: after a step with rate 0 the float32 masters are the float32 checkpoint, bit for bit; split over DP as well as whole."""
    from safetensors.torch import load_file

    folder = tiny_model(tmp_path / "model", "qwen2", vocab=61)
    want = load_file(folder / "model.safetensors")
    got = R.assemble(run_ranks(2, _masters, 2, folder, random_batch(4, vocab=61), options))
    assert got.keys() == want.keys()
    assert all(torch.equal(got[n], want[n]) for n in want)


# ---- errors ----------------------------------------------------------------------------------------------------------------
ERRORS = [
    ({"tp": 2, "pp": 2}, 6, {}, r"6 workers are not divisible by tp 2 x pp 2 x cp 1 = 4"),
    ({"tp": 3}, 3, {}, r"attention heads \(4\) is not divisible by tp \(3\): 4 % 3 = 1"),
    ({"tp": 6}, 6, {"hidden": 96, "heads": 12, "kv_heads": 4}, r"key/value heads \(4\) and tp \(6\) must divide one another: 4 % 6 = 4"),
    ({"pp": 4}, 4, {"layers": 2}, r"2 layers cannot fill pp 4 x vpp 1 = 4 stages"),
    ({"vpp": 2}, 1, {}, r"vpp 2 needs pp > 1"),
    ({"ep": 2}, 2, {}, r"ep 2 and etp 1 need a mixture-of-experts model"),
    ({"ep": 3}, 3, {"family": "mixtral"}, r"experts \(4\) is not divisible by ep \(3\): 4 % 3 = 1"),
    ({"ep": 4}, 2, {"family": "mixtral"}, r"ep 4 x etp 1 = 4 does not divide the 2 workers of a pipeline stage \(world 2 / pp 1\)"),
    ({"tp": 2, "sequence_parallel": False}, 2, {"family": "mixtral"}, r"experts with tp 2 need sequence_parallel"),
    ({"cp": 2, "packing": True}, 2, {}, r"packing and cp 2 exclude one another"),
    ({"overlap_param_gather": True}, 2, {}, r"overlap_param_gather needs overlap_grad_reduce"),
    ({"grad_reduce_dtype": "bfloat16"}, 1, {}, r"grad_reduce_dtype bfloat16 needs dtype bfloat16"),
    ({"fused": "transformer_engine"}, 1, {}, r"transformer_engine.pytorch is not installed"),
]


@pytest.mark.parametrize(("options", "world", "settings", "message"), ERRORS, ids=lambda v: str(v)[:30])
def test_errors_show_the_arithmetic(options: Any, world: int, settings: Any, message: str, tmp_path: Path) -> None:
    """One line that says what does not divide what."""
    settings = dict(settings)
    folder = tiny_model(tmp_path / "model", settings.pop("family", "llama"), **settings)
    with pytest.raises(ConfigError, match=message) as caught:
        R.build(folder, 0, world, options)
    assert "\n" not in str(caught.value)


def test_folders_and_models_that_do_not_fit(tmp_path: Path) -> None:
    """A missing folder, one without weights, an unknown architecture, a sliding window."""
    with pytest.raises(DataError, match="no model folder"):
        R.build(tmp_path / "nowhere", 0, 1, {})
    windowed = tiny_model(tmp_path / "window", "mixtral", sliding_window=4)
    with pytest.raises(ConfigError, match="no sliding-window attention; this model's window is 4"):
        R.build(windowed, 0, 1, {})
    import transformers

    transformers.GPT2Config(n_embd=8, n_head=2, n_layer=1).save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="does not know model type 'gpt2'; it knows llama, qwen2, qwen3, mixtral, qwen3_moe"):
        R.build(tmp_path / "gpt2", 0, 1, {})
    empty = tiny_model(tmp_path / "empty", "llama")
    (empty / "model.safetensors").unlink()
    with pytest.raises(RuntimeError, match=r"holds no \*\.safetensors"):
        run_ranks(1, _log_probs, [empty], random_batch(2))


def test_the_wrong_apex_is_rejected_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PyPI's `apex` is a web toolkit; NVIDIA's is known by its fused optimizer."""
    from jackfield_megatron import fused

    assert fused.apex() == "missing"
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with pytest.raises(ConfigError, match=r"PyPI's web toolkit, not NVIDIA's apex .*; uninstall it"):
            fused.report("auto")
        (tmp_path / "apex" / "optimizers.py").write_text("class FusedAdam: ...")
        importlib.invalidate_caches()
        assert "optimizer: apex" in fused.report("auto")
    finally:
        for name in [n for n in sys.modules if n == "apex" or n.startswith("apex.")]:
            del sys.modules[name]

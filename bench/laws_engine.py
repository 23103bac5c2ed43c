"""Megatron's weights in vLLM's layout and back, with both running: what an engine samples has the trainer's log-probs, before and after."""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import ranks
from ranks import Here, RanksFailed

GAPS = {"float32": (1e-4, 1e-4), "bfloat16": (0.02, 0.5)}
"""Law 11: mean and largest |difference| of log-probs, by type."""


def rows(device: str, most: int, quick: bool, timeout: float, engine: str | None) -> list[dict[str, Any]]:
    """One row for each pair of layouts that fits."""
    from jackfield.testing.models import tiny_model

    engine = engine or ("vllm" if importlib.util.find_spec("vllm") else "hf")
    cases = [
        # ranks, Megatron, tensor parallel size of vLLM
        (8, {"tp": 2, "pp": 2}, 4),
        (4, {"tp": 2, "pp": 2}, 4),
        (4, {"tp": 2, "pp": 2}, 2),
        (2, {"tp": 2}, 1),
        (1, {}, 1),
    ]
    fitting = [case for case in cases if case[0] <= most]
    out: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        model = tiny_model(Path(folder) / "model", "llama", layers=4, hidden=256, heads=8, kv_heads=4, vocab=128, max_positions=512)
        for world, options, tp in fitting[:1] if quick else fitting:
            tp = tp if engine == "vllm" else 1  # engine hf has replicas only
            sizes = " ".join(f"{k}{v}" for k, v in options.items())
            dp = world // (options.get("tp", 1) * options.get("pp", 1))
            what = f"megatron {sizes} dp{dp} to {engine} tp{tp} dp{world // tp} and back"
            row: dict[str, Any] = {"what": what, "law": "2, 11, 23, 26"}
            try:
                found = ranks.run(world, device, there_and_back, str(model), options, engine, tp, timeout=timeout)
                out.append(row | {"ok": True} | {k: v for k, v in found[0].items() if v is not None})
            except RanksFailed as error:
                out.append(row | {"ok": False, "error": str(error).strip().splitlines()[-1][:300]})
    return out


def there_and_back(here: Here, folder: str, options: dict[str, Any], engine_name: str, tp: int) -> dict[str, Any]:
    """Sync, sample, train a step, sync, sample the same prompts from a warm cache; then bring the weights back."""
    import torch
    import torch.distributed as dist

    from jackfield.components import WorkerContext
    from jackfield.config import ModelConfig, OptimizerConfig
    from jackfield.testing.samples import batch_of, prompts, requests
    from jackfield_megatron.backend import MegatronBackend
    from jackfield_reshard.materialise import Weights
    from jackfield_reshard.transports import P2P

    dtype = "bfloat16" if here.device.type == "cuda" else "float32"
    context = WorkerContext("policy", here.device, 0, here.rank, here.world, dtype=dtype)
    backend = MegatronBackend(MegatronBackend.Config(dtype=dtype, packing=False, **options))
    backend.setup(ModelConfig(path=folder), OptimizerConfig(lr=1e-2, max_grad_norm=1e9), context)
    engine = _engine(engine_name, tp, here.device.type)
    engine.setup(ModelConfig(path=folder), context)
    link = P2P(P2P.Config(verify=True, bucket_bytes=1 << 20))
    link.connect(backend, engine, context)
    asked = requests(prompts(4, length=40, shared=33, vocab=120), ignore_eos=True)
    gaps = []
    for version in (0, 1):
        report = link.sync(version)
        assert engine.version == version
        found = {(s.request_id, s.index): s for s in engine.generate(asked)}
        every: list[Any] = [None] * here.world
        dist.all_gather_object(every, found)
        assert all(s.tokens == every[0][key].tokens for key, s in found.items()) or dtype == "bfloat16", "replicas disagree"
        batch = batch_of(asked, every[0]).to(here.device)
        scored = backend.forward([batch], _request())[0].log_probs
        if backend.position.output:
            assert scored is not None
            gap = (scored - batch.rollout_log_probs)[batch.response_mask].abs()
            assert gap.mean() <= GAPS[dtype][0], f"mean gap {float(gap.mean()):.3g} at version {version}"
            assert gap.max() <= GAPS[dtype][1], f"largest gap {float(gap.max()):.3g} at version {version}"
            gaps.append((float(gap.mean()), float(gap.max())))
        if version == 0:
            _step(backend, batch, here)
    own = backend.shards()  # asked for once: a distributed optimizer gathers the weights again with every call
    before = [shard.tensor.detach().clone() for shard in own if shard.tensor is not None]
    with torch.no_grad():
        for shard in own:
            assert shard.tensor is not None
            shard.tensor.zero_()
    home = Weights(own, adopts=False)
    back = P2P(P2P.Config(verify=True, bucket_bytes=1 << 20))
    back.connect(Weights(engine.shards(), adopts=False), home, context)  # type: ignore[arg-type]
    back.sync(0)
    for shard, value in zip(home.shards(), before, strict=True):
        assert shard.tensor is not None
        assert torch.equal(shard.tensor, value), f"{shard.name} came back different"
    means = [None] * here.world
    dist.all_gather_object(means, gaps)
    known = next(g for g in means if g)
    return {"gap_before": known[0][0], "gap_after_update": known[1][0], "largest_gap": max(g[1] for g in known), "sent": report.bytes_sent}


def _request() -> Any:
    from jackfield.components import OutputRequest

    return OutputRequest()


def _engine(name: str, tp: int, device: str) -> Any:
    from jackfield_hf.engine import HFEngine

    if name == "hf":
        return HFEngine()
    from jackfield_vllm.engine import VLLM

    if device == "cuda":
        return VLLM(VLLM.Config(tp=tp, memory=0.3, max_num_seqs=16, max_model_len=512))
    return VLLM(VLLM.Config(tp=tp, memory=0.06, max_num_seqs=16, args={"kv_cache_memory_bytes": 2**25}))


def _step(backend: Any, batch: Any, here: Here) -> None:
    """A step that changes every weight by much more than rounding; all data-parallel ranks train on the same samples."""
    import torch
    from train import PolicyGradient

    mask = batch.response_mask
    torch.manual_seed(3)
    advantages = torch.randn(mask.shape).to(here.device)
    batch = batch.replace(loss_mask=mask.clone(), advantages=advantages, loss_scale=mask.float() / mask.sum() / backend.position.dp_size)
    backend.forward_backward([batch], PolicyGradient())
    metrics = backend.optimizer_step()
    assert metrics["grad_norm"] > 0

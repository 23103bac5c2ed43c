"""Zero copy between backend `torch` and engine `vllm` in one process: what is shared, what a sync costs, whether log-probs agree.

    python bench/zero_copy.py [--shape 0.5b] [--steps 3] [--frozen] [--out result.json]

Random weights. Each step changes every weight through the trainer alone; the engine (with CUDA graphs, where there is CUDA) must then
sample from the new ones: its log-probs are compared with the trainer's own.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from shapes import RUNNABLE, write_config

from jackfield.batch import Batch, Prompt, Trajectory
from jackfield.components import OutputRequest, Request, WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig, SamplingConfig
from jackfield_reshard.transports import Auto
from jackfield_torch.backend import TorchBackend
from jackfield_vllm.engine import VLLM


def gap(backend: TorchBackend, engine: VLLM, version: int, device: torch.device) -> dict[str, float]:
    """|difference| of the engine's log-probs and the trainer's, on samples of 16 prompts."""
    draw = random.Random(version)
    sampling = SamplingConfig(max_new_tokens=64, ignore_eos=True)
    prompts = [tuple(draw.randrange(4, 300) for _ in range(48)) for _ in range(16)]
    found = list(engine.generate([Request(i, p, (7 * i, 7 * i + 1), sampling) for i, p in enumerate(prompts)]))
    assert {v for s in found for v in s.versions} == {version}
    items = []
    for s in found:
        prompt, n = prompts[s.request_id], len(s.tokens)
        items.append(
            Trajectory(
                Prompt(s.request_id, {}),
                [*prompt, *s.tokens],
                len(prompt),
                [False] * len(prompt) + [True] * n,
                [0.0] * len(prompt) + s.log_probs,
                [-1] * len(prompt) + s.versions,
                s.finish_reason,
            )
        )
    batch = Batch.from_trajectories(items, group_size=2)
    log_probs = backend.forward([batch.to(device)], OutputRequest())[0].log_probs
    assert log_probs is not None
    difference = (log_probs.cpu() - batch.rollout_log_probs)[batch.response_mask].abs()
    first = float(batch.rollout_log_probs[batch.response_mask].mean())
    assert first > -0.999 * math.log(backend.model.config.vocab_size), "uniform samples: the weights are empty"
    return {"mean": float(difference.mean()), "max": float(difference.max()), "engine_log_prob": first}


def main() -> None:
    """Set up, connect, step, compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=RUNNABLE, default="0.5b" if torch.cuda.is_available() else "tiny")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--frozen", action="store_true", help="without an optimizer, whose states need eight times the weights' memory")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", 0) if cuda else torch.device("cpu")
    dtype = args.dtype or ("bfloat16" if cuda else "float32")
    context = WorkerContext("policy", device, 0, dtype=dtype)
    report: dict[str, Any] = {"shape": args.shape, "dtype": dtype, "machine": torch.cuda.get_device_name() if cuda else "cpu", "steps": []}
    with tempfile.TemporaryDirectory() as folder:
        write_config(args.shape, Path(folder))
        model = ModelConfig(path=folder, init="random")
        backend = TorchBackend(TorchBackend.Config(dtype=dtype))
        with device:
            backend.setup(model, None if args.frozen else OptimizerConfig(lr=1e-4), context)
        engine = VLLM(VLLM.Config(max_model_len=512, max_num_seqs=64))
        begin = time.perf_counter()
        engine.setup(model, context)
        report["engine_up"] = time.perf_counter() - begin
        transport = Auto(Auto.Config(verify=True))
        begin = time.perf_counter()
        transport.connect(backend, engine, context)
        report["connect"] = time.perf_counter() - begin
        for step in range(args.steps + 1):
            if step:
                generator = torch.Generator(device).manual_seed(step)
                for shard in backend.shards():
                    assert shard.tensor is not None
                    noise = torch.randn(shard.tensor.shape, device=device, generator=generator)
                    shard.tensor.add_((0.02 * noise).to(shard.tensor.dtype))
            sync = transport.sync(step)
            total = sync.bytes_aliased + sync.bytes_copied
            row = {"aliased_bytes": sync.bytes_aliased, "aliased_share": sync.bytes_aliased / total, "seconds": sync.seconds}
            row["gap"] = gap(backend, engine, step, device)
            report["steps"].append(row)
            print(json.dumps(row))
        transport.config = Auto.Config()
        syncs = [transport.sync(args.steps + 1 + i).seconds for i in range(10)]
        report["sync_ms"] = {name: round(1e3 * statistics.median(s[name] for s in syncs), 3) for name in syncs[0]}
        report["sync_ms"]["all"] = round(1e3 * statistics.median(sum(s.values()) for s in syncs), 3)
        report["slept_bytes"] = engine.sleep()
        report["woken_bytes"] = engine.wake()
        report["after_wake"] = gap(backend, engine, args.steps + 10, device)
    print(json.dumps({k: v for k, v in report.items() if k != "steps"}))
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()

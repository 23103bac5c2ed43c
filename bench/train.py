"""Training speed of a backend on one device: tokens/s, model TFLOP/s, and the share of the measured bf16 matrix rate.

    python bench/train.py --out train.json                       # every case of CASES that fits the device
    python bench/train.py --only 1.5b --backends megatron        # some of them
    python bench/train.py --case tiny:megatron:packed:none       # one case in this process; JSON on the last line

Shapes are those of Qwen2.5 with random weights drawn on the device; every step is forward and backward over micro-batches and an
AdamW step, timed together. Model FLOPs count each matrix product once forward and twice backward (6 per parameter and token), causal
attention by its lower half (6 x layers x width x length per token), and no recomputation: so `share` is comparable between settings.
Each case runs in a process of its own, so that one that does not fit takes nothing from the others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from report import wait
from shapes import SHAPES, write_config

ROOT = Path(__file__).resolve().parent.parent
SHELVES = [str(ROOT / shelf) for shelf in ("core", "parallel", "plugins", "algorithms")]

CASES = [
    # shape, backend, batch form, recomputation, tokens in a micro-batch
    ("1.5b", "megatron", "packed", "none", 16384),
    ("1.5b", "megatron", "padded", "none", 16384),
    ("1.5b", "megatron", "packed", "full", 16384),
    ("1.5b", "megatron", "packed-ragged", "none", 16384),
    ("1.5b", "megatron", "padded-ragged", "none", 16384),
    ("1.5b", "torch", "packed", "none", 16384),
    ("1.5b", "torch", "packed-ragged", "none", 16384),
    ("1.5b", "torch", "padded-ragged", "none", 16384),
    ("1.5b", "torch", "packed", "full", 16384),
    ("7b", "megatron", "packed", "full", 8192),
    ("7b", "megatron", "packed", "mlp", 4096),
    ("7b", "torch", "packed", "full", 4096),
]
"""`packed` and `padded` have only sequences of full length; `-ragged` has lengths from an eighth of it up to it."""


def parameters(shape: dict[str, Any]) -> tuple[int, int]:
    """Parameters in matrix products of all layers, and in the head."""
    h, f, n = shape["hidden_size"], shape["intermediate_size"], shape["num_hidden_layers"]
    kv = h // shape["num_attention_heads"] * shape["num_key_value_heads"]
    return n * (2 * h * h + 2 * h * kv + 3 * h * f), h * shape["vocab_size"]


def flops(shape: dict[str, Any], lengths: list[int]) -> float:
    """Model FLOPs of one forward and backward pass over sequences of these lengths, every position scored."""
    body, head = parameters(shape)
    h, n = shape["hidden_size"], shape["num_hidden_layers"]
    return sum(6 * (body + head) * t + 6 * n * h * t * t for t in lengths)


def matrix_rate(device: Any, size: int) -> float:
    """FLOP/s of a large bf16 matrix product."""
    import torch

    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    times = []
    for _ in range(12):
        wait()
        start = time.perf_counter()
        a @ b
        wait()
        times.append(time.perf_counter() - start)
    return 2 * size**3 / min(times)


class PolicyGradient:
    """A minimal loss over log-probs."""

    def __init__(self) -> None:
        from jackfield.components import OutputRequest

        self.request = OutputRequest()

    def __call__(self, outputs: Any, batch: Any) -> Any:
        from jackfield.components import LossSums

        loss = -(outputs.log_probs * batch.advantages * batch.loss_scale).sum()
        return loss, LossSums({"loss": loss.detach()})


def batch_of(lengths: list[int], vocab: int, device: Any, total: int) -> Any:
    """A micro-batch in which all tokens but the first of each sample are trained."""
    import torch
    from tensordict import TensorDict

    from jackfield.batch import Batch

    b, width = len(lengths), max(lengths)
    size = torch.tensor(lengths, device=device)
    mask = torch.arange(width, device=device) < size[:, None]
    mask[:, 0] = False
    floats = torch.zeros(b, width, device=device)
    return Batch(
        tokens=torch.randint(0, vocab, (b, width), device=device),
        lengths=size,
        prompt_lengths=torch.ones_like(size),
        response_mask=mask,
        loss_mask=mask.clone(),
        rollout_log_probs=floats,
        versions=torch.zeros(b, width, dtype=torch.int32, device=device),
        group_ids=torch.arange(b, device=device),
        sample_ids=torch.arange(b, device=device),
        finish_reasons=torch.zeros(b, dtype=torch.int8, device=device),
        records=[{} for _ in range(b)],
        extras=TensorDict({}, [b]),
        advantages=torch.randn(b, width, device=device),
        loss_scale=mask.float() / total,
        batch_size=[b],
    )


def micro_batches(form: str, tokens: int, length: int, count: int) -> list[list[int]]:
    """Lengths of the samples of each micro-batch; packed and padded forms of one name get the same samples."""
    if not form.endswith("ragged"):
        return [[length] * max(1, tokens // length)] * count
    step = max(1, length // 8)
    ladder = [step * (1 + i % 8) for i in range(8 * count * max(1, tokens // length))]
    out: list[list[int]] = []
    for n in ladder:
        full = not out or (sum(out[-1]) + n > tokens if form.startswith("packed") else (len(out[-1]) + 1) * max(*out[-1], n) > tokens)
        if full:
            out.append([])
        out[-1].append(n)
    return out


def build(backend: str, form: str, recompute: str, folder: Path, device: Any) -> Any:
    """The backend with random weights made on the device."""
    from jackfield.components import WorkerContext
    from jackfield.config import ModelConfig, OptimizerConfig

    model, context = ModelConfig(path=str(folder), init="random"), WorkerContext("policy", device, 0)
    packed = form.startswith("packed")
    common = {"dtype": "bfloat16", "activation_checkpointing": recompute == "full"}
    if backend == "megatron":
        from jackfield_megatron.backend import MegatronBackend

        modules = (recompute,) if recompute in ("mlp", "moe") else ()
        grads = os.environ.get("BENCH_GRAD_DTYPE", "float32")
        built: Any = MegatronBackend(
            MegatronBackend.Config(packing=packed, draw_on_device=True, recompute_modules=modules, grad_reduce_dtype=grads, **common)
        )
        built.setup(model, OptimizerConfig(lr=1e-6), context)
        return built
    from jackfield_torch.backend import TorchBackend

    built = TorchBackend(TorchBackend.Config(packing="on" if packed else "off", **common))
    with device:
        built.setup(model, OptimizerConfig(lr=1e-6), context)
    return built


def run_case(
    shape: str, backend: str, form: str, recompute: str, tokens: int, *, length: int, steps: int, count: int, profiled: bool = False
) -> dict[str, Any]:
    """One case in this process."""
    import torch

    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    rate = matrix_rate(device, 8192 if device.type == "cuda" else 256)
    settings = SHAPES[shape]
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        trainer = build(backend, form, recompute, Path(folder), device)
    lengths = micro_batches(form, tokens, length, count)
    every = [n for part in lengths for n in part]
    total = sum(every)
    batches = [batch_of(part, settings["vocab_size"], device, total) for part in lengths]
    loss = PolicyGradient()
    seconds, passes = [], []
    for step in range(steps + 2):
        wait()
        start = time.perf_counter()
        trainer.forward_backward(batches, loss)
        wait()
        middle = time.perf_counter()
        info = trainer.optimizer_step()
        wait()
        if step >= 2:
            seconds.append(time.perf_counter() - start)
            passes.append(middle - start)
    kernels = profile(lambda: (trainer.forward_backward(batches, loss), trainer.optimizer_step()), device) if profiled else None
    scored = time.perf_counter()
    trainer.forward(batches, loss.request)
    wait()
    scored = time.perf_counter() - scored
    second = statistics.median(seconds)
    done = flops(settings, every)
    return {
        "shape": shape,
        "backend": backend,
        "form": form,
        "recompute": recompute,
        "length": length,
        "micro_batch_tokens": tokens,
        "tokens": total,
        "step_s": round(second, 4),
        "passes_s": round(statistics.median(passes), 4),
        "spread_s": round(max(seconds) - min(seconds), 4),
        "tokens_per_s": round(total / second),
        "tflops": round(done / second / 1e12, 2),
        "tflops_passes": round(done / statistics.median(passes) / 1e12, 2),
        "matrix_tflops": round(rate / 1e12, 2),
        "share": round(done / second / rate, 4),
        "scoring_tokens_per_s": round(total / scored),
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
        "grad_norm": info["grad_norm"],
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "megatron": _version("megatron-core"),
        **({"profile": kernels} if kernels else {}),
    }


def profile(step: Callable[[], Any], device: Any, most: int = 24) -> dict[str, Any]:
    """Where a step's device time goes: milliseconds and calls by kernel, device synchronisations, and the share of time with work on it."""
    import torch
    from torch.profiler import ProfilerActivity

    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=kinds) as seen:
        wait()
        begin = time.perf_counter()
        step()
        wait()
        wall = time.perf_counter() - begin
    on_device = [e for e in seen.key_averages() if getattr(e, "self_device_time_total", 0) > 0 and str(e.device_type).endswith("CUDA")]
    rows = sorted(on_device or seen.key_averages(), key=lambda e: -(e.self_device_time_total if on_device else e.self_cpu_time_total))
    busy = sum(e.self_device_time_total for e in on_device) / 1e6
    waits = {e.key: e.count for e in seen.key_averages() if "Synchronize" in e.key or e.key in ("aten::item", "aten::_local_scalar_dense")}
    times = [[e.key[:90], round((e.self_device_time_total if on_device else e.self_cpu_time_total) / 1e3, 2), e.count] for e in rows[:most]]
    return {"wall_s": round(wall, 4), "device_busy": round(busy / wall, 4), "waits": waits, "kernels_ms": times}


def _version(name: str) -> str | None:
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def main() -> None:
    """Run the chosen cases, each in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", help="shape:backend:form:recompute[:tokens]; run it here and print JSON")
    parser.add_argument("--only", default="", help="shapes, comma-separated")
    parser.add_argument("--backends", default="", help="backends, comma-separated")
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after two to warm up")
    parser.add_argument("--count", type=int, default=4, help="micro-batches a step")
    parser.add_argument("--timeout", type=int, default=300, help="seconds for one case")
    parser.add_argument("--profile", action="store_true", help="one more step under the profiler: device time by kernel")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    sizes = {"length": args.length, "steps": args.steps, "count": args.count}
    if args.case:
        sys.path[:0] = SHELVES
        shape, backend, form, recompute, *rest = args.case.split(":")
        print(
            json.dumps(run_case(shape, backend, form, recompute, int(rest[0]) if rest else 8 * args.length, **sizes, profiled=args.profile))
        )
        return
    wanted = [
        c for c in CASES if (not args.only or c[0] in args.only.split(",")) and (not args.backends or c[1] in args.backends.split(","))
    ]
    results = []
    for case in wanted:
        name = ":".join(map(str, case))
        command = [sys.executable, __file__, "--case", name, *(f"--{k}={v}" for k, v in sizes.items()), *(["--profile"] * args.profile)]
        try:
            # without it, weights, states and activations that just fit are lost to fragmentation
            environment = os.environ | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, check=False, env=environment)
            lines = done.stdout.strip().splitlines()
            result = json.loads(lines[-1]) if done.returncode == 0 and lines else {"case": name, "error": done.stderr[-1500:]}
        except subprocess.TimeoutExpired:
            result = {"case": name, "error": f"no result within {args.timeout} s"}
        results.append(result)
        print(json.dumps(result), flush=True)
        if args.out:
            args.out.write_text(json.dumps(results, indent=1))
    print(
        "| shape | backend | batch | recompute | tokens/s | TFLOP/s | share of matrix rate | peak GiB |\n|---|---|---|---|---|---|---|---|"
    )
    for r in results:
        if "error" in r:
            print(f"| {r['case']} | failed: {r['error'].strip().splitlines()[-1][:100] if r['error'].strip() else 'no output'} |")
            continue
        cells = [
            r["shape"],
            r["backend"],
            r["form"],
            r["recompute"],
            f"{r['tokens_per_s']:,}",
            r["tflops"],
            f"{r['share']:.1%}",
            r["peak_gib"],
        ]
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()

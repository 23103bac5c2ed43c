"""Weak scaling of generation and training from 1 to N processes or GPUs, the share of communication, and a model of the missing sizes.

    python bench/scaling.py                                               # CPU: 1 and 2 processes of one thread, gloo, a tiny model
    python bench/scaling.py --device cuda --shape 1.5b                    # 1, 2, 4, ... GPUs, NCCL
    python bench/scaling.py --device cuda --shape 7b --backends megatron --tp 2 --pp 2

Weak: every rank gets the same work at every size, so perfect scaling keeps the seconds of a step. Generation: one engine a rank, each
with its own requests. Training: backends `torch` (replicas), `fsdp`, `megatron`. Each size also runs *alone*: as many processes at once,
each with a process group of its own. What that takes longer than one process is contention for the machine; what the joined run takes
longer is communication that was not hidden, with waiting for the slowest rank in it. Five repetitions, the cold one dropped, slowest
rank; median (min, max).

The model: seconds alone (the optimizer's divided by the ranks that share it) plus the ring model of bench/collectives.py on the measured
latency and rate of each collective, times the share of communication that was not hidden at the largest size measured before. It is
checked on every size that was measured, and used from there up to --up-to ranks; between nodes a GPU sends --network GB/s.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import collectives
import ranks
import report
import scaling_model
from ranks import Here, RanksFailed
from shapes import RUNNABLE, SHAPES, write_config

BACKENDS = ("torch", "fsdp", "megatron")


def build(here: Here, backend: str, folder: str, options: dict[str, Any]) -> Any:
    """A backend with random weights, ready to train, on every rank of the default group."""
    from jackfield.components import WorkerContext
    from jackfield.config import ModelConfig, OptimizerConfig

    context = WorkerContext("policy", here.device, 0, here.group_rank, here.group_size)
    model, optimizer = ModelConfig(path=folder, init="random"), OptimizerConfig(lr=1e-6)
    common = {"dtype": options["dtype"], "activation_checkpointing": options["checkpointing"]}
    if backend == "megatron":
        from jackfield_megatron.backend import MegatronBackend

        layout = {"tp": options["tp"], "pp": options["pp"]} if not here.alone else {}
        built: Any = MegatronBackend(MegatronBackend.Config(draw_on_device=here.device.type == "cuda", **layout, **common))
        built.setup(model, optimizer, context)
        return built
    if backend == "fsdp":
        from jackfield_torch.fsdp import FSDPBackend

        built = FSDPBackend(FSDPBackend.Config(**common))
    else:
        from jackfield_torch.backend import TorchBackend

        built = TorchBackend(TorchBackend.Config(**common))
    with here.device:
        built.setup(model, optimizer, context)
    return built


def train(here: Here, backend: str, shape: str, options: dict[str, Any]) -> dict[str, Any]:
    """Steps on this rank: seconds of the passes and of the optimizer, each repetition."""
    import torch
    from train import PolicyGradient, batch_of, flops

    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        trainer = build(here, backend, folder, options)
    place, loss = trainer.position, PolicyGradient()
    count = options["count"] * here.group_size // place.dp_size  # a replica over several ranks gets their work together
    lengths = [options["length"]] * max(1, options["tokens"] // options["length"])
    total = sum(lengths) * count * place.dp_size
    torch.manual_seed(1 + place.dp_rank)
    batches = [batch_of(lengths, SHAPES[shape]["vocab_size"], here.device, total) for _ in range(count)]
    passes, steps = [], []
    norms: list[float] = []
    for _ in range(options["repetitions"]):
        passes += here.timed(lambda: trainer.forward_backward(batches, loss), 1)
        steps += here.timed(lambda: norms.append(trainer.optimizer_step()["grad_norm"]), 1)
    result: dict[str, Any] = {
        "grad_norm": norms[0],
        "passes": passes,
        "optimizer": steps,
        "dp": place.dp_size,
        "flops": flops(SHAPES[shape], lengths * count) * place.dp_size,
    }
    result |= {"tokens": total, "layers": SHAPES[shape]["num_hidden_layers"], "micro_batches": count} | _sizes(shape)
    if here.device.type == "cuda":
        result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        result["nccl_share"] = _nccl_share(here, lambda: (trainer.forward_backward(batches, loss), trainer.optimizer_step()))
    return result


def _sizes(shape: str) -> dict[str, int]:
    """Elements and tensors of the whole model, each once."""
    from jackfield_reshard.families import tensors

    table = tensors(SHAPES[shape])
    return {"parameters": sum(math.prod(t.shape) * len(t.layers) for t in table), "tensors": sum(len(t.layers) for t in table)}


def _nccl_share(here: Here, step: Any) -> float:
    """Device time of NCCL's kernels, waiting for peers included, over the wall time of a step. They may overlap computation."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        (took,) = here.timed(step, 1)
    return sum(e.device_time_total for e in profile.key_averages() if "nccl" in e.key.lower()) / 1e6 / took


def generate(here: Here, engine: str, shape: str, options: dict[str, Any]) -> dict[str, Any]:
    """One engine on this rank: seconds of generating the same amount of tokens in each repetition."""
    import random

    from jackfield.components import Request, WorkerContext
    from jackfield.config import ModelConfig, SamplingConfig

    longest = options["prompt_tokens"] + options["new_tokens"]
    if engine == "vllm":
        from jackfield_vllm.engine import VLLM

        sizes = {} if here.device.type == "cuda" else {"memory": 0.06, "max_num_seqs": 64, "args": {"kv_cache_memory_bytes": 2**26}}
        made: Any = VLLM(VLLM.Config(max_model_len=-(-longest // 64) * 64, **sizes))
    else:
        from jackfield_hf.engine import HFEngine

        made = HFEngine()
    with tempfile.TemporaryDirectory() as folder:
        write_config(shape, Path(folder))
        context = WorkerContext("policy", here.device, 0, here.rank, here.world, dtype=options["dtype"])
        made.setup(ModelConfig(path=folder), context)
    fill(made)
    draw = random.Random(here.rank)
    sampling = SamplingConfig(max_new_tokens=options["new_tokens"], ignore_eos=True)
    group = options["group"]
    requests = [
        Request(
            i, tuple(draw.randrange(4, 300) for _ in range(options["prompt_tokens"])), tuple(range(i * group, (i + 1) * group)), sampling
        )
        for i in range(options["prompts"])
    ]

    def work() -> None:
        produced = sum(len(s.tokens) for s in made.generate(requests))
        assert produced == len(requests) * group * options["new_tokens"], produced
        made.weights_updated(0)  # drops the prefix cache, as each training step does

    return {"seconds": here.timed(work, options["repetitions"]), "tokens": len(requests) * group * options["new_tokens"]}


def fill(engine: Any) -> None:
    """Random weights, drawn on the device."""
    import torch

    for shard in engine.shards():
        assert shard.tensor is not None
        with torch.no_grad():
            shard.tensor.fill_(1) if shard.name.endswith("norm.weight") else shard.tensor.normal_(0, 0.02)
    engine.weights_updated(0)


def worlds(most: int) -> list[int]:
    """1, 2, 4, ... and at last all."""
    return sorted({n for n in (1, 2, 4, 8, 16) if n <= most} | {most})


def generation(most: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens a second at each size; efficiency against the smallest one."""
    rows: list[dict[str, Any]] = []
    for world in worlds(most):
        try:
            found = ranks.run(world, args.device, generate, args.engine, args.shape, vars(args), timeout=args.timeout)
        except RanksFailed as error:
            rows.append(failed({"engine": args.engine, "ranks": world}, error))
            continue
        seconds = report.spread(report.slowest([r["seconds"] for r in found]))
        row = {"engine": args.engine, "ranks": world, "seconds": seconds, "tokens_per_s": seconds.per(sum(r["tokens"] for r in found))}
        rows.append(row | {"tokens_per_s_per_rank": row["tokens_per_s"].scaled(1 / world)})
    return _efficiency(rows)


def training(most: int, args: argparse.Namespace, backend: str) -> list[dict[str, Any]]:
    """Tokens a second at each size, joined and alone; efficiency against the smallest one that ran."""
    rows: list[dict[str, Any]] = []
    single: list[dict[str, Any]] | None = None
    for world in (w for w in worlds(most) if w % (args.tp * args.pp) == 0 or backend != "megatron"):
        row: dict[str, Any] = {"backend": backend, "ranks": world}
        try:
            connections = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"} if backend == "megatron" and args.tp > 1 else {}
            settings = {"timeout": args.timeout, "environment": ranks.TRAINING | connections}
            joined = ranks.run(world, args.device, train, backend, args.shape, vars(args), **settings)
        except RanksFailed as error:
            rows.append(failed(row, error))
            continue
        single = joined if world == 1 else single
        if world == 1:
            alone: list[dict[str, Any]] | None = joined
        elif args.device == "cuda" and world < most and single is not None:
            alone = single * world  # GPUs contend little: measured at the largest size
        else:
            try:
                alone = ranks.run(world, args.device, train, backend, args.shape, vars(args), alone=True, **settings)
            except RanksFailed:  # a whole model may not fit where a part of it does
                alone = None
        rows.append(row | _training_row(world, backend, joined, alone))
    return _efficiency(rows)


def _training_row(world: int, backend: str, joined: list[dict[str, Any]], alone: list[dict[str, Any]] | None) -> dict[str, Any]:
    first = joined[0]
    sharers = 1 if backend == "torch" else first["dp"]

    def steps(runs: list[dict[str, Any]], share: float) -> list[float]:
        parts = [report.slowest([r[name] for r in runs]) for name in ("passes", "optimizer")]
        return [p + o * share for p, o in zip(*parts, strict=True)]

    seconds = report.spread(steps(joined, 1))
    row: dict[str, Any] = {"dp": first["dp"], "seconds": seconds, "tokens_per_s": seconds.per(first["tokens"])}
    row["tokens_per_s_per_rank"] = row["tokens_per_s"].scaled(1 / world)
    if alone is not None:
        own = report.spread(steps(alone, 1 / sharers))
        row |= {"alone_seconds": own, "communication_share": max(0.0, 1 - own.median / seconds.median)}
    if "peak_gib" in first:
        row |= {"peak_gib": max(r["peak_gib"] for r in joined), "nccl_share": statistics.median(r["nccl_share"] for r in joined)}
    row["grad_norms"] = [r["grad_norm"] for r in joined]
    row["gflops_per_rank"] = first["flops"] / world / seconds.median / 1e9
    return row | {"workload": {k: first[k] for k in ("parameters", "tensors", "layers", "micro_batches", "flops")}}


def failed(row: dict[str, Any], error: RanksFailed) -> dict[str, Any]:
    """The row with the last line of what went wrong."""
    return row | {"error": str(error).strip().splitlines()[-1][:300]}


def _efficiency(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    base = next((r for r in rows if "error" not in r), None)
    for row in rows:
        if base is not None and "error" not in row:
            row["efficiency"] = row["tokens_per_s_per_rank"].median / base["tokens_per_s_per_rank"].median
    return rows


def links(most: int, args: argparse.Namespace) -> dict[str, Any]:
    """Measured collectives at each size above 1."""
    found = {}
    for world in worlds(most)[1:]:
        found[str(world)] = collectives.summary(ranks.run(world, args.device, collectives.measure, args.repetitions, timeout=args.timeout))
    return found


def parser() -> argparse.ArgumentParser:
    """The command line; bench/multi_gpu.py takes its defaults from it."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--processes", type=int, help="most ranks; default: all GPUs, or one a core")
    made.add_argument("--only", choices=("generation", "training"))
    made.add_argument("--shape", choices=RUNNABLE, help="default: tiny on a CPU, 1.5b on GPUs")
    made.add_argument("--backends", nargs="+", choices=BACKENDS, default=list(BACKENDS))
    made.add_argument("--engine", choices=("hf", "vllm"), help="default: hf on a CPU, vllm on GPUs")
    made.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on GPUs")
    made.add_argument("--tp", type=int, default=1, help="tensor parallel size of megatron")
    made.add_argument("--pp", type=int, default=1)
    made.add_argument("--tokens", type=int, help="in a micro-batch")
    made.add_argument("--length", type=int, help="of a sequence in training")
    made.add_argument("--count", type=int, default=2, help="micro-batches a step and rank")
    made.add_argument("--checkpointing", action="store_true")
    made.add_argument("--prompts", type=int, help="prompts a rank")
    made.add_argument("--group", type=int, default=4, help="samples a prompt")
    made.add_argument("--prompt-tokens", type=int)
    made.add_argument("--new-tokens", type=int)
    made.add_argument("--repetitions", type=int, default=5)
    made.add_argument("--network", type=float, default=50, help="GB/s a GPU between nodes, for the model")
    made.add_argument("--per-node", type=int, default=8, help="ranks of a node, for the model")
    made.add_argument("--up-to", type=int, default=4096, help="ranks, for the model")
    made.add_argument("--timeout", type=float, default=600, help="seconds for one size")
    made.add_argument("--out", type=Path, default=report.RESULTS / "scaling.json")
    return made


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what depends on the device."""
    cpu = args.device == "cpu"
    defaults = {"shape": ("tiny", "1.5b"), "engine": ("hf", "vllm"), "dtype": ("float32", "bfloat16"), "tokens": (256, 16384)}
    defaults |= {"length": (64, 2048), "prompts": (4, 64), "prompt_tokens": (32, 512), "new_tokens": (32, 256)}
    for name, (small, large) in defaults.items():
        if getattr(args, name) is None:
            setattr(args, name, small if cpu else large)
    return args


def main() -> None:
    """Measure, predict, print, write."""
    args = complete(parser().parse_args())
    most = ranks.devices(args.device, args.processes)
    if args.device == "cpu":
        import transformers  # noqa: F401 (once, for all processes that are forked)
    result: dict[str, Any] = {"machine": ranks.run(1, args.device, _machine)[0], "settings": {k: str(v) for k, v in vars(args).items()}}
    print(report.in_words(result["machine"]), flush=True)
    result["links"] = links(most, args)
    if args.only != "training":
        result["generation"] = generation(most, args)
        print("\nGeneration\n" + report.table(result["generation"]), flush=True)
    if args.only != "generation":
        rows = [row for backend in args.backends for row in training(most, args, backend)]
        result["training"] = rows
        print(
            "\nTraining\n" + report.table([{k: v for k, v in row.items() if k not in ("workload", "grad_norms")} for row in rows]),
            flush=True,
        )
        result["model"] = scaling_model.check_and_extend(rows, result["links"], args)
        print("\nModel (a prediction where nothing is measured)\n" + report.table(result["model"]))
    report.write(args.out, result)
    print(f"\nwritten: {args.out}")
    if wrong := [r for r in [*result.get("generation", ()), *result.get("training", ())] if "error" in r]:
        sys.exit(f"{len(wrong)} sizes failed, first: {wrong[0]}")


def _machine(here: Here) -> dict[str, Any]:
    return report.machine(here.device.type)


if __name__ == "__main__":
    main()

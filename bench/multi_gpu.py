"""Everything that several GPUs of one host are needed for, in one command: one JSON, one table.

    python bench/multi_gpu.py                                                # all GPUs of this machine (2, 4 or 8; 1 runs what it can)
    python bench/multi_gpu.py --sections laws switch --out gpu.json          # in parts; sections that are not named keep their results
    python bench/multi_gpu.py --device cpu --processes 4 --model tiny        # gloo, a few minutes

laws: correctness under NCCL (bench/laws.py). links: latency and rate of every collective, of neighbours, of a copy and of a matrix
product. switch: seconds, bytes and share of the link rate from training to generation, against gather-everything on the same weights in
the same run (bench/reshard.py). generation and training: throughput at 1, 2, 4, 8 (bench/scaling.py). mapping: actor, critic and reward
model on GPUs of their own against all colocated (bench/mapping.py). model: the measured rates in the simulators of resharding and scaling,
predicted beside measured. NVLink multicast stays off (NCCL_NVLS_ENABLE=0). A part that fails or does not fit says so and stops nothing
else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import collectives
import laws
import laws_engine
import mapping
import ranks
import report
import scaling
import scaling_model
import summary
from ranks import Here, RanksFailed
from shapes import RUNNABLE, SHAPES

SECTIONS = ("links", "laws", "switch", "generation", "training", "mapping", "model")


def layouts(world: int) -> list[tuple[Any, Any]]:
    """Training and engine layouts of a switch over `world` ranks."""
    from jackfield_reshard.layout import Layout

    def megatron(**sizes: int) -> Layout:
        return Layout("megatron", **sizes)

    def vllm(**sizes: int) -> Layout:
        return Layout("vllm", **sizes)

    return {
        2: [(megatron(tp=2), vllm(dp=2)), (megatron(pp=2), vllm(tp=2)), (Layout("fsdp", dp=2), vllm(tp=2))],
        4: [
            (megatron(tp=2, pp=2), vllm(tp=2, dp=2)),
            (megatron(tp=2, pp=2), vllm(tp=4)),
            (megatron(tp=4), vllm(tp=2, dp=2)),
            (Layout("fsdp", dp=4), vllm(tp=2, dp=2)),
        ],
        8: [
            (megatron(tp=2, pp=2, dp=2), vllm(tp=4, dp=2)),
            (megatron(tp=4, pp=2), vllm(tp=4, dp=2)),
            (megatron(tp=4, pp=2), vllm(tp=2, dp=4)),
            (Layout("fsdp", dp=8), vllm(tp=4, dp=2)),
        ],
    }.get(world, [])


def measure_links(most: int, args: argparse.Namespace) -> dict[str, Any]:
    """Collectives at each size, and one rank's copy and matrix rates."""
    found: dict[str, Any] = {"collectives": scaling.links(most, args.scaling)}
    return found | ranks.run(1, args.device, rates, args.repetitions, timeout=args.timeout)[0]


def rates(here: Here, repetitions: int) -> dict[str, float]:
    """Bytes a second of a copy (each byte read and written, counted once) and FLOP/s of a matrix product."""
    import torch
    from train import matrix_rate

    cuda = here.device.type == "cuda"
    source = torch.ones(1 << (31 if cuda else 26), dtype=torch.uint8, device=here.device)
    target = torch.empty_like(source)
    seconds = report.spread(here.timed(lambda: target.copy_(source), max(2, repetitions)))
    return {"copy_bytes_per_second": source.numel() / seconds.median, "flops": matrix_rate(here.device, 8192 if cuda else 256)}


def measure_switch(most: int, args: argparse.Namespace, known: dict[str, Any]) -> list[dict[str, Any]]:
    """Every pair of layouts of 2, 4, 8 ranks at every model's shape."""
    import reshard

    from jackfield_reshard.families import tensors

    options = {"dtype": args.scaling.dtype, "repetitions": args.repetitions, "transport": "p2p"}
    options |= {"bucket_bytes": args.bucket_bytes, "gather_bucket_bytes": (4 if args.device == "cpu" else 512) << 20}
    rows = []
    for world in (n for n in (2, 4, 8) if n <= most):
        links = known.get("links", {}).get("collectives", {}).get(str(world), {})
        for name in args.models:
            for train, serve in layouts(world):
                row: dict[str, Any] = {"model": name, "ranks": world, "from": str(train), "to": str(serve)}
                try:
                    found = ranks.run(
                        world, args.device, reshard.compare, tensors(SHAPES[name]), train, serve, options, timeout=args.timeout
                    )
                except RanksFailed as error:
                    rows.append(scaling.failed(row, error))
                    continue
                row = reshard.row(name, train, serve, found, links.get("link_bytes_per_second"))
                row["bucket_mb"] = args.bucket_bytes / 1e6
                rows.append(row | {"layouts": [_sizes(train), _sizes(serve)]})
    return rows or [{"skipped": f"a switch between ranks needs 2, here are {most}; bench/switch.py measures one GPU"}]


def _sizes(layout: Any) -> dict[str, Any]:
    return {"kind": layout.kind, "tp": layout.tp, "pp": layout.pp, "dp": layout.dp}


def measure_laws(most: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """See bench/laws.py."""
    quick = args.quick or args.device == "cpu"
    rows = laws.backends(args.device, most, quick, args.timeout)
    rows += laws.resharding(args.device, most, quick, args.timeout)
    return rows + laws_engine.rows(args.device, most, quick, args.timeout, args.engine)


def measure_training(most: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Pure data parallelism by every backend, and Megatron's TP2 PP2 where there are ranks for it."""
    rows = [row for backend in args.backends for row in scaling.training(most, args.scaling, backend)]
    if most >= 4 and "megatron" in args.backends:
        split = argparse.Namespace(**vars(args.scaling) | {"tp": 2, "pp": 2})
        rows += [row | {"layout": "tp2 pp2"} for row in scaling.training(most, split, "megatron")]
    return rows


def predict(known: dict[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Simulated and modelled seconds from the measured rates, beside the measured ones."""
    from jackfield_reshard.classes import between
    from jackfield_reshard.families import tensors
    from jackfield_reshard.layout import Layout
    from jackfield_reshard.plan import plan
    from jackfield_reshard.simulate import gather_everything, simulate
    from jackfield_reshard.topology import Topology

    rows: list[dict[str, Any]] = []
    links = known.get("links", {})
    width = 4 if args.scaling.dtype == "float32" else 2
    for row in known.get("switch", []):
        found = links.get("collectives", {}).get(str(row.get("ranks")), None)
        if "seconds" not in row or found is None:
            continue
        train, serve = (Layout(**sizes) for sizes in row["layouts"])
        ring = found["rings"]["all_gather"]
        speeds = {"nvlink": found["link_bytes_per_second"], "memory": 2 * links["copy_bytes_per_second"], "latency": ring["latency"]}
        table = tensors(SHAPES[row["model"]])
        topology = Topology.colocated(train.world, **speeds)
        dtype = args.scaling.dtype
        made = plan(between(table, train, serve, dtype, dtype, fused_qkv=False), topology, "identity")
        estimate = simulate(made, bucket_bytes=int(row["bucket_mb"] * 1e6)).total
        needed = float(made.received.sum(axis=0).mean())
        model = sum(_count(t) for t in table) * width
        theirs = gather_everything(model, train.world, needed, topology).total
        what = f"switch {row['model']} {row['from']} to {row['to']}"
        for way, predicted, measured in (("", estimate, row["seconds"][0]), (", gather", theirs, row["gather_seconds"][0])):
            rows.append({"what": what + way, "ranks": train.world, "predicted": predicted, "measured": measured})
    training = [_spreads(r) for r in known.get("training", []) if "layout" not in r]
    for line in scaling_model.check_and_extend(training, links.get("collectives", {}), args.scaling):
        what = f"training step, {line['backend']}"
        rows.append({"what": what, "ranks": line["ranks"], "predicted": line["predicted"], "measured": line.get("measured")})
    return [row | {"predicted_over_measured": row["predicted"] / row["measured"] if row["measured"] else None} for row in rows]


def _count(tensor: Any) -> int:
    import math

    return math.prod(tensor.shape) * len(tensor.layers)


def _spreads(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it was before it went through JSON."""
    names = ("seconds", "alone_seconds", "tokens_per_s", "tokens_per_s_per_rank")
    return row | {name: report.Spread(*row[name]) for name in names if name in row}


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    made.add_argument("--processes", type=int, help="ranks; default: all GPUs, or 4 processes")
    made.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    made.add_argument("--model", dest="models", nargs="+", choices=RUNNABLE, help="of the switch; default: 7b and llama-2-13b on GPUs")
    made.add_argument("--scale", choices=RUNNABLE, help="of generation and training; default: 1.5b on GPUs, tiny on a CPU")
    made.add_argument("--backends", nargs="+", choices=scaling.BACKENDS, default=list(scaling.BACKENDS))
    made.add_argument("--engine", choices=("hf", "vllm"), help="default: vllm on GPUs and for the laws, hf for throughput on a CPU")
    made.add_argument("--bucket-bytes", type=int, default=256 << 20)
    made.add_argument("--repetitions", type=int, default=5)
    made.add_argument("--quick", action="store_true", help="a few laws of each kind (always on a CPU)")
    made.add_argument("--timeout", type=float, default=500, help="seconds for each measurement")
    made.add_argument("--out", type=Path, default=report.RESULTS / "multi_gpu.json")
    return made


def main() -> None:
    """Run the sections, print their tables, write the JSON after each."""
    args = parser().parse_args()
    cpu = args.device == "cpu"
    most = ranks.devices(args.device, args.processes or (4 if cpu else None))
    args.models = args.models or (["tiny"] if cpu else ["7b", "llama-2-13b"])
    given = [f"--device={args.device}", f"--processes={most}", f"--repetitions={args.repetitions}", f"--timeout={args.timeout}"]
    given += [f"--engine={args.engine}"] if args.engine else []
    shape = args.scale or ("tiny" if cpu else "1.5b")
    smaller = ["--tokens=128", "--length=32", "--prompts=2", "--prompt-tokens=16", "--new-tokens=16"] if cpu else ["--checkpointing"]
    args.scaling = scaling.complete(scaling.parser().parse_args([*given, f"--shape={shape}", *smaller]))
    roles = mapping.complete(mapping.parser().parse_args([*(g for g in given if "repetitions" not in g), f"--shape={shape}"]))
    roles.processes, roles.steps = most // 4 * 4 or most, args.repetitions
    if cpu:
        import transformers  # noqa: F401 (once, for all processes that are forked)
    result: dict[str, Any] = json.loads(args.out.read_text()) if args.out.is_file() else {}
    result["machine"] = ranks.run(1, args.device, _machine)[0]
    result["settings"] = {k: str(v) for k, v in vars(args).items()}
    print(report.in_words(result["machine"]) + f"; {most} ranks", flush=True)
    works: dict[str, Callable[[], Any]] = {
        "links": lambda: measure_links(most, args),
        "laws": lambda: measure_laws(most, args),
        "switch": lambda: measure_switch(most, args, result),
        "generation": lambda: scaling.generation(most, args.scaling),
        "training": lambda: measure_training(most, args),
        "mapping": lambda: mapping.rows(roles),
        "model": lambda: predict(result, args),
    }
    wrong = 0
    for name in (s for s in SECTIONS if s in args.sections):
        begin = time.perf_counter()
        try:
            found = works[name]()
        except RanksFailed as error:
            found = [scaling.failed({}, error)]
        result[name] = json.loads(json.dumps(found))
        report.write(args.out, result)
        rows = found if isinstance(found, list) else _link_rows(found)
        wrong += sum("error" in row or row.get("ok") is False for row in rows)
        shown = [{k: v for k, v in row.items() if k not in ("workload", "layouts", "grad_norms")} for row in rows]
        print(f"\n{name} ({time.perf_counter() - begin:.0f} s)\n{report.table(shown)}", flush=True)
    result["summary"] = summary.rows(result, not cpu)
    report.write(args.out, result)
    print(f"\nsummary\n{report.table(result['summary'])}\n\nwritten: {args.out}")
    sys.exit(f"{wrong} lines with an error" if wrong else 0)


def _link_rows(found: dict[str, Any]) -> list[dict[str, Any]]:
    rows = [{"what": "copy", "GB/s": found["copy_bytes_per_second"] / 1e9}, {"what": "matrix product", "TFLOP/s": found["flops"] / 1e12}]
    for world, sized in found["collectives"].items():
        rows.append({"what": "neighbours", "ranks": world, "GB/s": sized["link_bytes_per_second"] / 1e9})
        for kind in collectives.PASSES:
            ring = sized["rings"][kind]
            rows.append({"what": kind, "ranks": world, "GB/s": ring["rate"] / 1e9, "latency_us": ring["latency"] * 1e6})
    return rows


def _machine(here: Here) -> dict[str, Any]:
    return report.machine(here.device.type)


if __name__ == "__main__":
    main()

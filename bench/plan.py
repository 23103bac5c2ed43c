"""Time and memory of planning, without GPUs: `python bench/plan.py`; median (min, max) of five repetitions, the cold one dropped.

Cases: Llama-70B on 64 GPUs, and a DeepSeek-V3-sized mixture of experts (61 layers, 256 experts) from 256 to 4,096 GPUs with the
exponent of growth (CPU time ~ GPUs^exponent, fitted over the doublings). On a busy machine read the CPU seconds.
"""

from __future__ import annotations

import argparse
import math
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import report
from shapes import SHAPES

from jackfield_reshard.classes import between
from jackfield_reshard.families import tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.plan import plan
from jackfield_reshard.topology import Topology


def cases() -> list[tuple[str, dict, Layout, Layout]]:
    """(name, model, training layout, engine layout)."""
    out = [("llama-70b", SHAPES["llama-70b"], Layout("megatron", tp=8, pp=8), Layout("vllm", tp=8, dp=8, vocabulary_multiple=64))]
    for gpus in (256, 512, 1024, 2048, 4096):
        train = Layout("megatron", tp=4, pp=16, dp=gpus // 64, ep=min(64, gpus // 16))
        serve = Layout("vllm", tp=1, dp=gpus, ep=256, vocabulary_multiple=64)
        out.append(("deepseek-v3", SHAPES["deepseek-v3"], train, serve))
    return out


def measure(name: str, config: dict, train: Layout, serve: Layout, assignment: str, repetitions: int) -> dict[str, Any]:
    """Plan several times, prove once."""
    wall, cpu = [], []
    for _ in range(repetitions):
        begin, used = time.perf_counter(), time.process_time()
        made = plan(between(tensors(config), train, serve), Topology.colocated(train.world, serve.world), assignment)
        wall.append(time.perf_counter() - begin)
        cpu.append(time.process_time() - used)
    begin = time.perf_counter()
    proof = made.prove()
    return {
        "model": name,
        "gpus": train.world,
        "from": str(train),
        "to": str(serve),
        "plan_seconds": report.spread(wall),
        "plan_cpu_seconds": report.spread(cpu),
        "proof_seconds": time.perf_counter() - begin,
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "flows": len(made.flows),
        "gb_received_per_gpu": float(np.mean(proof.received)) / 1e9,
        "share_local": made.bytes_local / (made.bytes_sent + made.bytes_local),
        "imbalance": float(proof.imbalance),
        "least_imbalance": float(proof.least_imbalance),
        "at_bound": not proof.errors,
    }


def main() -> None:
    """Run the cases, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assignment", choices=("identity", "overlap"), default="overlap")
    parser.add_argument("--gpus", type=int, default=4096, help="largest case")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--out", type=Path, default=report.RESULTS / "plan.json")
    args = parser.parse_args()
    if args.assignment == "overlap":
        import scipy.optimize  # noqa: F401 (its import, a second or more, is no planning)
    rows = [measure(*case, args.assignment, args.repetitions) for case in cases() if case[2].world <= args.gpus]
    result: dict[str, Any] = {"machine": report.machine(), "assignment": args.assignment, "rows": rows}
    print(report.in_words(result["machine"]) + "\n" + report.table(rows))
    moe = [(row["gpus"], row["plan_cpu_seconds"].median) for row in rows if row["model"] == "deepseek-v3"]
    if len(moe) > 1:
        slope = np.polyfit([math.log(g) for g, _ in moe], [math.log(s) for _, s in moe], 1)[0]
        result["growth_exponent"] = float(slope)
        print(f"growth exponent {slope:.3f}")
    report.write(args.out, result)


if __name__ == "__main__":
    main()

"""Time and memory of planning, without GPUs: `python bench/plan.py` prints a table; `--json` one line a case.

Cases: Llama-70B on 64 GPUs, and a DeepSeek-V3-sized mixture of experts (61 layers, 256 experts) from 256 to 4,096 GPUs with the
exponent of growth (CPU time ~ GPUs^exponent, fitted over the doublings). On a busy machine read the CPU seconds.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import time

import numpy as np
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


def measure(name: str, config: dict, train: Layout, serve: Layout, assignment: str) -> dict[str, object]:
    """Plan and prove once."""
    begin, cpu = time.perf_counter(), time.process_time()
    made = plan(between(tensors(config), train, serve), Topology.colocated(train.world, serve.world), assignment)
    planned, used = time.perf_counter() - begin, time.process_time() - cpu
    proof = made.prove()
    need = made.bytes_sent + made.bytes_local
    return {
        "model": name,
        "gpus": train.world,
        "from": str(train),
        "to": str(serve),
        "assignment": assignment,
        "plan_seconds": round(planned, 3),
        "plan_cpu_seconds": round(used, 3),
        "proof_seconds": round(time.perf_counter() - begin - planned, 3),
        "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "flows": len(made.flows),
        "gb_received_per_gpu": round(float(np.mean(proof.received)) / 1e9, 3),
        "share_local": round(made.bytes_local / need, 4),
        "imbalance": round(proof.imbalance, 4),
        "least_imbalance": round(proof.least_imbalance, 4),
        "at_bound": not proof.errors,
    }


def main() -> None:
    """Run the cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--assignment", choices=("identity", "overlap"), default="overlap")
    parser.add_argument("--gpus", type=int, default=4096, help="largest case")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.assignment == "overlap":
        import scipy.optimize  # noqa: F401 (its import, a second or more, is no planning)
    rows = [measure(*case, args.assignment) for case in cases() if case[2].world <= args.gpus]
    for row in rows:
        if args.json:
            print(json.dumps(row))
        else:
            print(", ".join(f"{key} {value}" for key, value in row.items()))
    moe = [(row["gpus"], row["plan_cpu_seconds"]) for row in rows if row["model"] == "deepseek-v3"]
    if len(moe) > 1:
        slope = np.polyfit([math.log(g) for g, _ in moe], [math.log(s) for _, s in moe], 1)[0]
        print(json.dumps({"growth_exponent": round(float(slope), 3)}) if args.json else f"growth exponent {slope:.3f}")


if __name__ == "__main__":
    main()

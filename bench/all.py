"""Every benchmark that this machine can run, at sizes that suit it: `make bench`. Results in bench/results/, one file each.

    python bench/all.py [--only plan reshard] [--list]

On a CPU: small models, one thread a process. With a GPU the single-GPU benchmarks, with several also bench/multi_gpu.py. A benchmark
that fails or takes longer than --timeout does not stop the others; the last table says how each ended.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import ranks
import report

HERE = Path(__file__).resolve().parent


def benchmarks(gpus: int) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name to (command line, packages it needs). Those that write JSON by `--out` get the path."""
    found = {
        "plan": ("plan.py --gpus 1024", ("scipy",)),
        "simulate_reshard": ("simulate_reshard.py", ("scipy",)),
        "advantages": ("advantages.py --samples 2048 --repeat 3", ()),
        "controller": ("controller.py --simulate --steps 2", ()),
    }
    if not gpus:
        return found | {
            "reshard": ("reshard.py --out", ()),
            "switch": ("switch.py --device cpu --model tiny --dtype float32", ()),
            "scaling": ("scaling.py --out", ("scipy",)),
            "compression": ("compression.py --seeds 0 --steps 20 --out", ()),
            "train": ("train.py --case tiny:megatron:packed:none:512 --length 64 --count 2", ("megatron",)),
            "rollout": ("rollout.py --shapes tiny --quick --out", ("vllm",)),
            "zero_copy": ("zero_copy.py --out", ("vllm",)),
            "decode_host": ("decode_host.py --samples 256 --out", ("vllm",)),
        }
    found |= {
        "switch": ("switch.py", ()),
        "train": ("train.py --out", ("megatron",)),
        "rollout": ("rollout.py --shapes 0.5b 1.5b --out", ("vllm",)),
        "zero_copy": ("zero_copy.py --out", ("vllm",)),
    }
    return found | ({"multi_gpu": ("multi_gpu.py --out", ("scipy",))} if gpus > 1 else {})


def run(name: str, line: str, timeout: float) -> dict[str, Any]:
    """One benchmark; what it prints goes to NAME.txt."""
    script, *options = line.split()
    if options and options[-1] == "--out":
        options.append(str(report.RESULTS / f"{name}.json"))
    text, begin = report.RESULTS / f"{name}.txt", time.perf_counter()
    status, said = ranks.call([sys.executable, "-W", "ignore", str(HERE / script), *options], {}, report.RESULTS, timeout)
    text.write_text(said)
    ended = f"stopped after {timeout:.0f} s" if status is None else f"failed with {status}" if status else "done"
    return {"benchmark": name, "ended": ended, "seconds": time.perf_counter() - begin, "output": f"bench/results/{text.name}"}


def main() -> None:
    """Run what is wanted; the exit status is 1 where one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--list", action="store_true", help="say what would run")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds for one benchmark")
    args = parser.parse_args()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # counts GPUs without a CUDA context in this process
    import torch

    known = benchmarks(torch.cuda.device_count())
    if unknown := sorted(set(args.only or ()) - known.keys()):
        sys.exit(f"no benchmark {', '.join(unknown)} for this machine: choose from {', '.join(known)}")
    chosen = {name: known[name] for name in known if not args.only or name in args.only}
    if args.list:
        print("\n".join(f"{name:18} python bench/{line.removesuffix(' --out')}" for name, (line, _) in chosen.items()))
        return
    report.RESULTS.mkdir(exist_ok=True)
    rows = []
    for name, (line, needs) in chosen.items():
        missing = [package for package in needs if importlib.util.find_spec(package) is None]
        if missing:
            rows.append({"benchmark": name, "ended": f"left out: {', '.join(missing)} is not installed"})
            continue
        rows.append(run(name, line, args.timeout))
        print(f"{name}: {rows[-1]['ended']} ({rows[-1]['seconds']:.0f} s)", flush=True)
    print("\n" + report.table(rows))
    sys.exit(any(row["ended"].startswith(("failed", "stopped")) for row in rows))


if __name__ == "__main__":
    main()

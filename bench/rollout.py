"""Rollout throughput: engine vllm against vLLM called directly, transformers' generate and the roofline, each in its own process.

    python bench/rollout.py [--quick]                                  # this machine's CPU or GPU
    python bench/rollout.py --shapes 0.5b 1.5b 7b --out results.json   # random weights of these shapes

Loads: `uniform N` is N distinct prompts with responses of one length, `first N` the same with one token each (their difference is the
decode steps); `rl N` is groups that share a prompt, with log-normal response lengths. Every contender runs the same requests
(`ours_packed`: with `cpu_linear: packed`). The first repetition is dropped; medians with (min, max). Ratios are what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from shapes import RUNNABLE, write_config

FIELDS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "vocab_size",
    "tie_word_embeddings",
)
STEPS = (64, 256)
"""Samples whose decode step is timed by itself, on a GPU."""
SIDES = ("ours", "ours_packed", "raw", "raw_tuned", "hf")


def uniform(count: int, prompt: int, response: int) -> list[tuple[list[int], int]]:
    """Distinct prompts, one response length."""
    draw = random.Random(0)
    return [([draw.randrange(4, 300) for _ in range(prompt)], response) for _ in range(count)]


def rl(count: int, group: int, prompt: int, median: int, longest: int) -> list[tuple[list[int], int]]:
    """Groups that share a prompt; log-normal lengths (sigma 0.8) around `median`, cut at `longest`."""
    draw = random.Random(1)
    work = []
    for _ in range(count // group):
        tokens = [draw.randrange(4, 300) for _ in range(prompt)]
        work += [(tokens, max(1, min(longest, int(median * draw.lognormvariate(0, 0.8))))) for _ in range(group)]
    return work


def floor_seconds(work: list[tuple[list[int], int]], config: dict[str, Any], machine: dict[str, float], width: int) -> float:
    """Least time: each decode step reads all weights and the live KV once; a distinct prompt is computed once (matrix products only)."""
    h, inter, layers, heads, kv, vocab, _ = (config[f] for f in FIELDS)
    head = h // heads
    block = h * (heads + 2 * kv) * head + heads * head * h + 3 * h * inter
    weights = (layers * block + vocab * h) * width
    token = 2 * layers * kv * head * width
    longest = max(n for _, n in work)
    kv_bytes = sum(token * (n * len(prompt) + n * (n - 1) // 2) for prompt, n in work)
    prompts = sum(len(prompt) for prompt in {tuple(prompt) for prompt, _ in work})
    return (longest * weights + kv_bytes) / machine["bandwidth"] + 2 * layers * block * prompts / machine["flops"]


def side(job: dict[str, Any], timeout: int) -> dict[str, Any]:
    """Run one contender; its JSON, or the end of its error."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        script = Path(__file__).with_name("rollout_side.py").resolve()
        try:
            done = subprocess.run(
                [sys.executable, "-W", "ignore", str(script), str(path)], capture_output=True, text=True, timeout=timeout, cwd=folder
            )
            lines, error = done.stdout.strip().splitlines(), done.stderr.strip()[-1500:] if done.returncode else ""
        except subprocess.TimeoutExpired as cut:
            out: Any = cut.stdout or b""
            lines, error = [line for line in out.decode().splitlines() if line.endswith("}")], f"more than {timeout} s"
    found: dict[str, Any] = json.loads(lines[-1]) if lines else {"loads": {}}
    if error or not lines:
        found["error"] = error or "no output"
    print(f"  {job['side']}: {json.dumps(found)}", flush=True)
    return found


def loads_for(cuda: bool, quick: bool) -> dict[str, list[tuple[list[int], int]]]:
    """The machine's loads."""
    if cuda:
        if quick:
            return {"uniform 256": uniform(256, 512, 256), "rl 1024": rl(1024, 16, 512, 256, 1024)}
        first = {f"first {n}": uniform(n, 512, 1) for n in STEPS}
        return first | {f"uniform {n}": uniform(n, 512, 256) for n in (*STEPS, 1024, 2048)} | {"rl 1024": rl(1024, 16, 512, 512, 2048)}
    counts = (16,) if quick else (16, 64, 128)
    return {**{f"uniform {n}": uniform(n, 48, 64) for n in counts}, **{f"rl {n}": rl(n, 8, 160, 32, 64) for n in counts}}


def main() -> None:
    """Run everything, print the table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=RUNNABLE)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=[s for s in SIDES if s != "ours_packed"])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--repetitions", type=int, default=None)
    parser.add_argument("--quick", action="store_true", help="one small shape, two repetitions")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for one contender")
    parser.add_argument(
        "--turns", action="store_true", help="all at once, taking turns: for a machine whose speed changes from minute to minute"
    )
    parser.add_argument("--loads", nargs="+", help="only loads whose name starts so")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cuda = torch.cuda.is_available()
    dtype = args.dtype or ("bfloat16" if cuda else "float32")
    repetitions = args.repetitions or (2 if args.quick else 5)
    loads = loads_for(cuda, args.quick)
    if args.loads:
        loads = {name: work for name, work in loads.items() if name.startswith(tuple(args.loads))}
    longest = max(len(prompt) + n for work in loads.values() for prompt, n in work)
    machine = side({"side": "machine", "cuda": cuda}, 600)
    name = torch.cuda.get_device_name() if cuda else f"{platform.machine()}, {os.cpu_count()} cores"
    report: dict[str, Any] = {"machine": {"name": name, "torch": torch.__version__, **machine}, "dtype": dtype, "shapes": {}}
    print(f"{name}: copy {machine['bandwidth'] / 1e9:.0f} GB/s, matrix product {machine['flops'] / 1e12:.1f} TFLOP/s, {dtype}")
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes or (["0.5b"] if cuda else ["135m"]):
            config = write_config(shape, Path(folder, shape))
            job = {"cuda": cuda, "model": str(Path(folder, shape)), "dtype": dtype, "loads": loads, "repetitions": repetitions}
            job |= {"max_len": -(-longest // 64) * 64, "memory": 0.8 if cuda else 0.2, "kv_bytes": 2**31}
            jobs = {s: {**job, "side": s.partition("_")[0], "options": options(s, cuda)} for s in args.sides}
            if args.turns:
                counter = Path(folder, "turn")
                counter.write_text("0")
                jobs = {s: j | {"turn": [str(counter), i, len(jobs)]} for i, (s, j) in enumerate(jobs.items())}
            with ThreadPoolExecutor(len(jobs) if args.turns else 1) as pool:
                found = dict(zip(jobs, pool.map(side, jobs.values(), [args.timeout] * len(jobs)), strict=True))
            report["shapes"][shape] = found
            width = 2 if dtype == "bfloat16" else 4
            show(shape, loads, found, config, machine, width)
            for count in STEPS:
                if {f"first {count}", f"uniform {count}"} <= loads.keys():
                    decode_step(count, loads, found, config, machine, width)
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))


def decode_step(
    count: int, loads: dict[str, Any], found: dict[str, Any], config: dict[str, Any], machine: dict[str, float], width: int
) -> None:
    """Seconds of a decode step of `count` samples: the uniform load without its first tokens, which the prompts are computed for."""
    names = f"uniform {count}", f"first {count}"
    steps = loads[names[0]][0][1] - loads[names[1]][0][1]
    whole, first = (floor_seconds(loads[name], config, machine, width) for name in names)
    floor = (whole - first) / steps
    print(f"\na decode step of {count} samples; weights, keys and values once at copy bandwidth: {floor * 1e3:.2f} ms")
    for side_name, result in found.items():
        if set(names) <= result["loads"].keys():
            times = [result["loads"][name]["times"] for name in names]
            whole, first = (statistics.median([wall for wall, _ in t[1:] or t]) for t in times)
            print(f"  {side_name:10s} {(whole - first) / steps * 1e3:.2f} ms, {(whole - first) / steps / floor:.2f}x")


def options(name: str, cuda: bool) -> dict[str, Any]:
    """Settings of a contender: `raw_tuned` gets the engine's own."""
    if name == "ours_packed":
        return {"cpu_linear": "packed"}
    if name != "raw_tuned":
        return {}
    if not cuda:
        return {"block_size": 32, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
    return {"max_num_seqs": 1024, "max_cudagraph_capture_size": 1024, "max_num_batched_tokens": 8192}


def show(shape: str, loads: dict[str, Any], found: dict[str, Any], config: dict[str, Any], machine: dict[str, float], width: int) -> None:
    """One table a load."""
    for load, work in loads.items():
        tokens = sum(n for _, n in work)
        floor = floor_seconds(work, config, machine, width)
        prompts = sum(len(prompt) for prompt, _ in work)
        print(f"\n{shape}, {load}: {tokens} new tokens, {prompts} prompt tokens; roofline {tokens / floor:,.0f} tok/s ({floor:.2f} s)")
        base: tuple[float, float] | None = None
        for name, result in found.items():
            if load not in result["loads"]:
                print(f"  {name:10s} failed: {result['error'].splitlines()[-1]}")
                continue
            measured = result["loads"][load]["times"]
            times, cpu = zip(*(measured[1:] or measured), strict=True)
            medians = statistics.median(times), statistics.median(cpu)
            base = base or medians
            computed = result["loads"][load]["computed"]
            note = f", computed {computed} of {tokens + prompts} tokens" if computed else ""
            print(
                f"  {name:10s} {tokens / medians[0]:10,.0f} tok/s ({tokens / max(times):,.0f}, {tokens / min(times):,.0f}), "
                f"ours is {medians[0] / base[0]:.2f}x; {tokens / medians[1]:,.0f} per CPU s ({tokens / max(cpu):,.0f}, "
                f"{tokens / min(cpu):,.0f}), ours is {medians[1] / base[1]:.2f}x; {medians[0] / floor:.2f}x the floor{note}"
            )


if __name__ == "__main__":
    main()

"""Device mapping: PPO with actor, critic and reward model on GPUs of their own, against all of them colocated on all GPUs.

    python bench/mapping.py --device cuda                    # 8 GPUs: actor 4 (TP2 PP2), critic 2 (FSDP), reward model 2 (DP)
    python bench/mapping.py --processes 4                    # gloo, a tiny model: 2 (PP2), 1 and 1

Whole training runs through launcher `fork`, as a user has them: same model, prompts, tokens and batch; random weights. Seconds of a step
and of its phases, the first step dropped; the share of the step that phases of different roles overlapped (the sum of the phases over the
step, less one) shows what a mapping gains beyond smaller groups. Both mappings run in one process each, one after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import ranks
import report
from shapes import RUNNABLE, write_config

PHASES = ("rollout", "score", "prepare", "advantage", "update", "sync")


def config(folder: Path, mapping: str, world: int, args: argparse.Namespace) -> dict[str, Any]:
    """The run's config as JSON, which is YAML."""
    actor, other = (world // 2, world // 4) if mapping == "separate" else (world, world)
    layout = {"tp": 2, "pp": 2} if actor >= 4 else {"pp": 2}
    policy: dict[str, Any] = {
        "model": {"path": str(folder / "model"), "init": "random"},
        "backend": {"name": "megatron", "dtype": args.dtype, "draw_on_device": args.device == "cuda", **layout},
        "optimizer": {"lr": 1e-6},
        "micro_batch_tokens": args.micro_batch_tokens,
    }
    critic: dict[str, Any] = {"backend": {"name": "fsdp", "dtype": args.dtype}, "micro_batch_tokens": args.micro_batch_tokens}
    reward: dict[str, Any] = {"name": "reward_model", "model": str(folder / "reward"), "dtype": args.dtype}
    engine: dict[str, Any] = {"name": args.engine}
    if args.engine == "vllm":
        engine |= {"memory": 0.3, "max_model_len": 512} if args.device == "cuda" else {"memory": 0.06, "max_num_seqs": 32}
    if mapping == "separate":
        policy["gpus"], critic["gpus"], reward["gpus"] = actor, other, other
    else:
        reward["colocate"] = "policy"
    return {
        "dir": str(folder / mapping),
        "steps": args.steps,
        "policy": policy,
        "critic": critic,
        "engine": engine,
        "algorithm": {"name": "ppo"},
        "dataset": "copy",
        "rewards": [reward],
        "sampling": {"max_new_tokens": args.new_tokens, "ignore_eos": True},
        "batch": {"prompts": args.prompts, "group_size": args.group},
        "launcher": {"name": "fork", "workers": world, "device": args.device},
        "trackers": [],
    }


def models(folder: Path, args: argparse.Namespace) -> None:
    """A policy's folder (its config and a tokenizer of 64 words) and a reward model's, with weights."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    from jackfield.testing.models import tiny_model

    for name in ("model", "reward"):
        tiny_model(folder / name, "llama", hidden=64, layers=2)
        if args.shape != "tiny":
            write_config(args.shape if name == "model" else args.reward_shape, folder / name)
    settings = AutoConfig.from_pretrained(folder / "reward", num_labels=1, pad_token_id=0)
    reward = AutoModelForSequenceClassification.from_config(settings, dtype=getattr(torch, args.dtype))
    for file in (folder / "reward").glob("*.safetensors"):
        file.unlink()
    reward.save_pretrained(folder / "reward")


def one(folder: Path, mapping: str, args: argparse.Namespace) -> None:
    """Train, in this process as the controller, which never touches a GPU."""
    from jackfield import Trainer, load_config

    (folder / f"{mapping}.yaml").write_text(json.dumps(config(folder, mapping, args.processes, args)))
    Trainer(load_config(folder / f"{mapping}.yaml")).train()


def measured(folder: Path, mapping: str, world: int) -> dict[str, Any]:
    """The run's steps, the first dropped."""
    steps = [json.loads(line) for line in (folder / mapping / "metrics.jsonl").read_text().splitlines()]
    whole = report.spread([s["time/step"] for s in steps])
    row: dict[str, Any] = {"mapping": mapping, "ranks": world, "step_seconds": whole}
    phases = {name: report.spread([s.get(f"time/{name}", 0.0) for s in steps]) for name in PHASES}
    row |= {f"{name}_s": value.median for name, value in phases.items()}
    return row | {"overlapped": max(0.0, sum(p.median for p in phases.values()) / whole.median - 1)}


def rows(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Both mappings; `ratio` is colocated over separate."""
    if args.processes < 4:
        return [{"mapping": "separate, colocated", "skipped": f"needs 4 ranks, here are {args.processes}"}]
    out: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        models(folder, args)
        given = [f"--{k.replace('_', '-')}={v}" for k, v in vars(args).items() if k not in ("out", "one", "folder") and v is not None]
        for mapping in ("separate", "colocated"):
            command = [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), *given, "--one", mapping, "--folder", name]
            status, said = ranks.call(command, {}, name, args.timeout)
            if status is None:
                out.append({"mapping": mapping, "error": f"not finished within {args.timeout:.0f} s"})
            elif status:
                out.append({"mapping": mapping, "error": (said.strip().splitlines() or ["?"])[-1][:300]})
            else:
                out.append(measured(folder, mapping, args.processes))
    if all("step_seconds" in row for row in out):
        out[0]["ratio"] = out[1]["step_seconds"].median / out[0]["step_seconds"].median
    return out


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    made.add_argument("--processes", type=int, help="ranks: a multiple of 4; default: all GPUs, or 4")
    made.add_argument("--shape", choices=RUNNABLE, help="of policy and critic; default: tiny on a CPU, 1.5b on GPUs")
    made.add_argument("--reward-shape", choices=RUNNABLE, default="0.5b")
    made.add_argument("--engine", choices=("hf", "vllm"), help="default: hf on a CPU, vllm on GPUs")
    made.add_argument("--dtype", choices=("float32", "bfloat16"))
    made.add_argument("--prompts", type=int)
    made.add_argument("--group", type=int, default=4)
    made.add_argument("--new-tokens", type=int)
    made.add_argument("--micro-batch-tokens", type=int, default=8192)
    made.add_argument("--steps", type=int, default=5)
    made.add_argument("--timeout", type=float, default=500, help="seconds for one mapping")
    made.add_argument("--out", type=Path, default=report.RESULTS / "mapping.json")
    made.add_argument("--one", help=argparse.SUPPRESS)
    made.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return made


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fill in what depends on the device."""
    cpu = args.device == "cpu"
    defaults = {"shape": ("tiny", "1.5b"), "engine": ("hf", "vllm"), "dtype": ("float32", "bfloat16")}
    for name, (small, large) in (defaults | {"prompts": (4, 64), "new_tokens": (8, 256)}).items():
        if getattr(args, name) is None:
            setattr(args, name, small if cpu else large)
    return args


def main() -> None:
    """Both mappings, a table, JSON."""
    args = complete(parser().parse_args())
    if args.one:
        one(args.folder, args.one, args)
        return
    args.processes = ranks.devices(args.device, args.processes or (4 if args.device == "cpu" else None)) // 4 * 4
    found = rows(args)
    print(report.table(found))
    report.write(args.out, {"machine": report.machine(), "settings": {k: str(v) for k, v in vars(args).items()}, "rows": found})
    sys.exit(any("error" in row for row in found))


if __name__ == "__main__":
    main()

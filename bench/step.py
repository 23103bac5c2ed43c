"""A whole GRPO step by phase: jackfield against TRL's GRPOTrainer, same model, prompts, tokens and type. A PPO step: jackfield alone.

    python bench/step.py --model models/smollm2 --trl-python ~/trl/bin/python      # both sides, one after the other
    python bench/step.py --model models/smollm2                                    # this side alone
    python bench/step.py --shape 0.5b --engine vllm --dtype bfloat16 ...           # random weights of a shape of bench/shapes.py

Each side runs in its own process: `--steps` steps, of which the first is dropped; medians with (min, max). With `--rounds` the sides
take turns, each time in a new process, and the medians are over all rounds. Seconds are wall and CPU (of the process, all threads); on
a machine that does other work the CPU seconds are the ones to compare. TRL is no dependency: give a Python that has it. In bfloat16
TRL's default is autocast over float32 weights; `--trl-weights bfloat16` is the other way. `--end` lets samples end by themselves: with
16 new tokens and a learning rate of 2e-5 the rewards are a learning curve.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from report import wait

QUIET = {"OMP_WAIT_POLICY": "PASSIVE", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
TUNED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "67108864", "MALLOC_ARENA_MAX": "1"}
"""malloc without returning pages to the kernel: on a CPU both sides gain."""


class Clock:
    """Wall and CPU seconds by phase; a phase inside another is not counted twice."""

    def __init__(self) -> None:
        self.steps: list[dict[str, list[float]]] = []
        self.inner: list[list[float]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the block, its work on the device included, to the phase."""
        wait()
        begin = time.perf_counter(), time.process_time()
        self.inner.append([0.0, 0.0])
        try:
            yield
        finally:
            wait()
            spent = [time.perf_counter() - begin[0], time.process_time() - begin[1]]
            inner = self.inner.pop()
            if self.inner:
                self.inner[-1] = [a + b for a, b in zip(self.inner[-1], spent, strict=True)]
            if self.steps:
                known = self.steps[-1].setdefault(name, [0.0, 0.0])
                self.steps[-1][name] = [k + s - i for k, s, i in zip(known, spent, inner, strict=True)]

    def wrap(self, owner: Any, method: str, name: str) -> None:
        """Time a method."""
        original = getattr(owner, method)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self(name):
                return original(*args, **kwargs)

        setattr(owner, method, timed)

    def result(self, **more: Any) -> str:
        """Every step, as JSON."""
        torch = sys.modules["torch"]
        if torch.cuda.is_available():
            more["peak_device_mb"] = torch.cuda.max_memory_allocated() >> 20
        return json.dumps({"steps": self.steps, "peak_rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, **more})


def summary(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """Medians over all steps of all rounds but each round's first."""
    steps = [s for r in rounds for s in (r["steps"][1:] or r["steps"])]
    phases = {}
    for name in sorted({n for s in steps for n in s}):
        wall, cpu = zip(*(s.get(name, [0.0, 0.0]) for s in steps), strict=True)
        phases[name] = {"wall": spread(wall), "cpu": spread(cpu)}
    totals = [[sum(v[k] for v in s.values()) for s in steps] for k in (0, 1)]
    phases["step"] = {"wall": spread(totals[0]), "cpu": spread(totals[1])}
    return {"phases": phases, "rounds": rounds, "peak_rss_mb": max(r["peak_rss_mb"] for r in rounds)}


def spread(values: Any) -> list[float]:
    """Median, smallest, largest."""
    return [round(f(values), 3) for f in (statistics.median, min, max)]


def questions(count: int) -> list[dict[str, str]]:
    """Single-digit additions."""
    rng = random.Random(0)
    pairs = [(rng.randint(1, 9), rng.randint(1, 9)) for _ in range(count)]
    return [{"question": f"What is {a} + {b}?", "answer": str(a + b)} for a, b in pairs]


def last_number(text: str, answer: str) -> float:
    """1 if the last number in the text is the answer."""
    import re

    found = re.findall(r"-?\d+", text)
    return float(bool(found) and found[-1] == answer)


def ours(args: argparse.Namespace) -> None:
    """This project's side."""
    import torch

    from jackfield import Trainer, checkpoint, hookimpl, load_config, registry

    checkpoint.save = lambda run: Path()  # what a run leaves behind is not part of a step
    torch.set_num_threads(args.threads)
    clock = Clock()
    backend, engine = registry.load("backend", args.backend), registry.load("engine", args.engine)
    for method, name in (("forward", "log-probs"), ("forward_backward", "update"), ("optimizer_step", "optimizer")):
        clock.wrap(backend, method, name)
    generate = engine.generate
    engine.generate = lambda self, requests: iter(_all(clock, generate, self, requests))
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder) / "rows.jsonl"
        rows.write_text("".join(json.dumps({"prompt": q["question"], "answer": q["answer"]}) + "\n" for q in questions(512)))
        config = {
            "dir": folder + "/run",
            "steps": args.steps,
            "policy": {
                "model": str(Path(args.model).resolve()),
                "micro_batch_tokens": args.micro_tokens,
                "backend": {"name": args.backend, "dtype": args.dtype},
                "optimizer": {"lr": args.lr, "weight_decay": 0.0},
            },
            "engine": {"name": "vllm", "max_model_len": max(256, 128 + args.new_tokens), "max_num_seqs": args.prompts * args.group}
            if args.engine == "vllm"
            else "hf",
            "seed": args.seed,
            "algorithm": args.algorithm,
            "dataset": {"name": "jsonl", "path": str(rows)},
            "rewards": ["last_number"],
            "sampling": {"max_new_tokens": args.new_tokens, "ignore_eos": not args.end},
            "batch": {"prompts": args.prompts, "group_size": args.group},
            "trackers": [],
        }
        (Path(folder) / "config.yaml").write_text(json.dumps(config))
        trainer = Trainer(load_config(Path(folder) / "config.yaml"))

        class Steps:
            """Cuts time into steps."""

            rewards: list[float] = []

            @hookimpl(wrapper=True)
            def step_start(self, run: Any) -> Any:
                clock.steps.append({})
                self.begin = time.perf_counter(), time.process_time()
                return (yield)

            @hookimpl
            def step_end(self, run: Any, metrics: dict[str, float]) -> None:
                step = clock.steps[-1]
                for k, now in enumerate((time.perf_counter(), time.process_time())):
                    step.setdefault("other", [0.0, 0.0])[k] += now - self.begin[k] - sum(v[k] for n, v in step.items() if n != "other")
                self.rewards.append(metrics["reward"])

        trainer.run.manager.register(Steps(), "steps")
        trainer.train()
    print(clock.result(rewards=Steps.rewards))


def _all(clock: Clock, generate: Any, engine: Any, requests: Any) -> list[Any]:
    with clock("rollout"):
        return list(generate(engine, requests))


def trl(args: argparse.Namespace) -> None:
    """TRL's side, with its defaults except where a setting is named on the command line."""
    import datasets
    import torch
    import transformers
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(args.threads)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    clock = Clock()

    class Timed(GRPOTrainer):
        """Phases of a step."""

        def _generate_single_turn(self, *a: Any, **k: Any) -> Any:
            with clock("rollout"):
                return super()._generate_single_turn(*a, **k)

        def _get_per_token_logps_and_entropies(self, *a: Any, **k: Any) -> Any:
            with clock("update" if torch.is_grad_enabled() else "log-probs"):
                return super()._get_per_token_logps_and_entropies(*a, **k)

        def compute_loss(self, *a: Any, **k: Any) -> Any:
            with clock("update"):
                return super().compute_loss(*a, **k)

    class Steps(transformers.TrainerCallback):
        """Cuts time into steps."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            clock.steps.append({})
            self.begin = time.perf_counter(), time.process_time()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step = clock.steps[-1]
            for k, now in enumerate((time.perf_counter(), time.process_time())):
                step.setdefault("other", [0.0, 0.0])[k] += now - self.begin[k] - sum(v[k] for n, v in step.items() if n != "other")

    rewards: list[float] = []

    def right(completions: Any, answer: Any, **_: Any) -> list[float]:
        found = [last_number(c[0]["content"], a) for c, a in zip(completions, answer, strict=True)]
        rewards.append(sum(found) / len(found))
        return found

    rows = [{"prompt": [{"role": "user", "content": q["question"]}], "answer": q["answer"]} for q in questions(512)]
    samples = args.prompts * args.group
    with tempfile.TemporaryDirectory() as folder:
        config = GRPOConfig(
            output_dir=folder,
            use_cpu=not torch.cuda.is_available(),
            report_to="none",
            save_strategy="no",
            max_steps=args.steps,
            per_device_train_batch_size=args.trl_micro,
            gradient_accumulation_steps=samples // args.trl_micro,
            num_generations=args.group,
            max_completion_length=args.new_tokens,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            bf16=args.dtype == "bfloat16" and args.trl_weights == "float32",
            seed=args.seed,
            gradient_checkpointing=False,
            temperature=1.0,
            beta=0.0,
            disable_tqdm=True,
            dataloader_pin_memory=False,
            generation_kwargs={} if args.end else {"ignore_eos": True} if args.trl_vllm else {"min_new_tokens": args.new_tokens},
            **({"use_vllm": True, "vllm_mode": "colocate", "vllm_max_model_length": 128 + args.new_tokens} if args.trl_vllm else {}),
            model_init_kwargs={"dtype": args.trl_weights, "attn_implementation": args.trl_attention},
        )
        tokenizer = transformers.AutoTokenizer.from_pretrained(args.model, padding_side="left")
        trainer = Timed(
            model=args.model,
            reward_funcs=right,
            args=config,
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            callbacks=[Steps()],
        )
        trainer.remove_callback(transformers.trainer_callback.PrinterCallback)
        clock.wrap(trainer.accelerator, "backward", "update")
        create = trainer.create_optimizer

        def create_timed(*a: Any, **k: Any) -> Any:
            optimizer = create(*a, **k)
            clock.wrap(optimizer, "step", "optimizer")
            return optimizer

        trainer.create_optimizer = create_timed
        trainer.train()
    print(clock.result(rewards=rewards))


def main() -> None:
    """Run both sides and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--shape", help="instead of a model: random weights of this size, as a Llama")
    parser.add_argument("--trl-python", default=None)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--micro-tokens", type=int, default=4096)
    parser.add_argument("--trl-micro", type=int, default=16)
    parser.add_argument("--trl-attention", default="sdpa", choices=["sdpa", "eager"])
    parser.add_argument("--trl-weights", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--trl-vllm", action="store_true", help="TRL with vLLM in its process, where that installs")
    parser.add_argument("--engine", default="hf", choices=["hf", "vllm"])
    parser.add_argument("--backend", default="torch")
    parser.add_argument("--algorithm", default="grpo", choices=["grpo", "ppo"], help="ppo has a critic of the policy's size; TRL has none")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end", action="store_true", help="samples end at the end token instead of at --new-tokens")
    parser.add_argument("--rounds", type=int, default=1, help="how often the sides take turns")
    parser.add_argument("--malloc", action="store_true", help="both sides with a malloc that keeps its pages")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--side", choices=["ours", "trl"], default=None, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        return {"ours": ours, "trl": trl}[args.side](args)
    if args.trl_python and args.algorithm != "grpo":
        parser.error("TRL 1.16 has no PPO: leave out --trl-python")
    with tempfile.TemporaryDirectory() as folder:
        if args.shape:
            args.model = folder
            make_model(args.shape, args.dtype, Path(folder))
        if not args.model:
            parser.error("give --model or --shape")
        compare(args)
    return None


def make_model(shape: str, dtype: str, folder: Path) -> None:
    """A Llama of the shape's sizes with random weights, and the quickstart's tokenizer."""
    import torch
    from shapes import SHAPES
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    sizes = {k: v for k, v in SHAPES[shape].items() if k not in ("architectures", "model_type", "torch_dtype")}
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes), dtype=getattr(torch, dtype))
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).resolve().parent.parent / "examples" / "tiny")
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    tokenizer.save_pretrained(folder)


def compare(args: argparse.Namespace) -> None:
    """Run the sides on `args.model` and print a table."""
    rounds: dict[str, list[dict[str, Any]]] = {}
    sides = {"ours": sys.executable} | ({"trl": args.trl_python} if args.trl_python else {})
    for side, python in list(sides.items()) * args.rounds:
        environment = os.environ | QUIET | {"OMP_NUM_THREADS": str(args.threads)} | (TUNED if args.malloc else {})
        done = subprocess.run(
            [python, "-W", "ignore", str(Path(__file__).resolve()), *sys.argv[1:], "--model", args.model, "--side", side],
            env=environment,
            cwd=tempfile.gettempdir() if side == "trl" else None,
            stdout=subprocess.PIPE,
            text=True,
        )
        if done.returncode:
            sys.exit(f"{side}: failed with {done.returncode}; before it: {json.dumps(rounds)}")
        rounds.setdefault(side, []).append(json.loads(done.stdout.splitlines()[-1]))
    results = {side: summary(found) for side, found in rounds.items()}
    tokens = args.prompts * args.group * args.new_tokens
    print(f"{platform.processor() or platform.machine()}, {args.threads} threads, {args.dtype}, {args.prompts} x {args.group} samples, ")
    print(f"{args.new_tokens} new tokens each ({tokens} a step); seconds a step: median (min, max)")
    names = [n for n in ("rollout", "log-probs", "update", "optimizer", "other", "step") if any(n in r["phases"] for r in results.values())]
    for name in names:
        for kind in ("cpu", "wall"):
            cells = [r["phases"].get(name, {}).get(kind, [0.0, 0.0, 0.0]) for r in results.values()]
            ratio = f"   x{cells[1][0] / cells[0][0]:.2f}" if len(cells) > 1 and cells[0][0] > 0.01 else ""
            line = "".join(f"  {side} {c[0]:8.2f} ({c[1]:.2f}, {c[2]:.2f})" for side, c in zip(results, cells, strict=True))
            print(f"{name:10} {kind:5}{line}{ratio}")
    for side, result in results.items():
        rewards = [[round(r, 2) for r in found["rewards"]] for found in result["rounds"]]
        device = f", {max(r['peak_device_mb'] for r in result['rounds'])} MB of the GPU" if "peak_device_mb" in result["rounds"][0] else ""
        print(f"{side}: peak {result['peak_rss_mb']} MB{device}; rewards {rewards[0] if len(rewards) == 1 else rewards}")
    if args.out:
        args.out.write_text(json.dumps({"args": {k: str(v) for k, v in vars(args).items()}, **results}, indent=1))


if __name__ == "__main__":
    main()

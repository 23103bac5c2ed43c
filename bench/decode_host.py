"""What a decode step costs the host beside the model runner: scheduling, taking the tokens, handing out finished samples.

    python bench/decode_host.py [--samples 256 1024] [--steps 300] [--out FILE]

Engine `vllm` generates on a CPU with a runner that computes nothing and gives random tokens; its time is taken off. Steps are scheduled one
ahead, as on a GPU, in one thread. Groups of 16 share a prompt of 64 tokens, lengths are log-normal (mean 550), so of 256 samples one ends
about every second step. Counted are steps in which only decoding happens. Contenders, by turns in one process: steps as
`steady.py` makes them, and vLLM's own scheduler under the same engine.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from statistics import mean
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import numpy as np
import report
import torch

PROMPT, GROUP, VOCAB, LONGEST = 64, 16, 64, 4096


def build(folder: Path, samples: int, steady: bool) -> Any:
    """Engine `vllm` with a small model, whose steps are scheduled one ahead."""
    from vllm.v1.attention.backends import cpu_attn

    from jackfield.components import WorkerContext
    from jackfield.config import ModelConfig
    from jackfield.testing.models import tiny_model
    from jackfield_vllm import adapter, engine
    from jackfield_vllm import steady as steps

    cpu_attn.CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda *_: [16])  # a GPU's; nothing is computed here
    suits, quick = steps.Steady.suits, adapter.quick_slots
    if not steady:
        steps.Steady.suits, adapter.quick_slots = staticmethod(lambda *_: False), lambda _: None  # type: ignore[assignment]
    path = tiny_model(folder, layers=1, hidden=32, heads=1, kv_heads=1, vocab=VOCAB, max_positions=LONGEST)
    args = {"scheduler_cls": "vllm.v1.core.sched.async_scheduler.AsyncScheduler", "kv_cache_memory_bytes": samples * 2**19}
    made = engine.VLLM(engine.VLLM.Config(block_size=16, max_num_seqs=samples, dtype="float32", memory=0.05, args=args))
    made.setup(ModelConfig(path=str(path)), WorkerContext("policy", torch.device("cpu"), 0))
    made.version = 0
    steps.Steady.suits, adapter.quick_slots = staticmethod(suits), quick  # type: ignore[assignment]
    return made


class Idle:
    """In the place of vLLM's step: a runner that gives random tokens at once, and a clock for the rest."""

    def __init__(self, core: Any) -> None:
        self.scheduler, self.rng = core._scheduler, np.random.default_rng(0)
        self.flights: list[Any] = []
        self.steps: list[dict[str, float]] = []
        self.entered: float | None = None
        core._client.engine_core.step_fn = self

    def __call__(self) -> tuple[Any, bool]:
        begin = perf_counter()
        if self.entered is not None:
            self.steps[-1]["engine"] = begin - self.entered
        given, plain, running = None, False, len(self.scheduler.running)
        scheduled = middle = perf_counter()
        if self.scheduler.has_requests():
            out = self.scheduler.schedule()
            scheduled, counts = perf_counter(), out.num_scheduled_tokens
            plain = 0 < len(counts) == out.total_num_scheduled_tokens and not out.scheduled_new_reqs
            self.flights.append((out, self._output(list(counts))))
            middle = perf_counter()
        if self.flights and (len(self.flights) > 1 or not self.scheduler.has_requests()):
            given = self.scheduler.update_from_output(*self.flights.pop(0))
        self.entered = perf_counter()
        took = {"schedule": scheduled - begin, "update": self.entered - middle}
        self.steps.append({"plain": plain, "ended": running - len(self.scheduler.running), **took})
        return given, True

    def _output(self, keys: list[str]) -> Any:
        from vllm.v1.outputs import ModelRunnerOutput

        tokens = self.rng.integers(4, VOCAB, (len(keys), 1)).tolist()
        log_probs = SimpleNamespace(logprobs=self.rng.random((len(keys), 1), np.float32))
        return ModelRunnerOutput(keys, {key: i for i, key in enumerate(keys)}, tokens, logprobs=log_probs)  # type: ignore[arg-type]


def measure(engine: Any, samples: int, count: int) -> dict[str, float]:
    """Microseconds a step."""
    from jackfield.components import Request
    from jackfield.config import SamplingConfig

    rng, idle = np.random.default_rng(1), Idle(engine.core)
    lengths = rng.lognormal(6, 0.8, samples).clip(8, LONGEST - PROMPT).astype(int).tolist()
    prompts = rng.integers(4, VOCAB, (-(-samples // GROUP), PROMPT)).tolist()
    requests = [
        Request(i, tuple(prompts[i // GROUP]), (i,), SamplingConfig(max_new_tokens=n, ignore_eos=True)) for i, n in enumerate(lengths)
    ]
    stream = engine.generate(requests)
    for _ in stream:
        if sum(step["plain"] for step in idle.steps) >= count:
            break
    stream.close()
    counted = [step for step in idle.steps if step["plain"] and "engine" in step][10:count]
    parts = {name: 1e6 * mean(step[name] for step in counted) for name in ("schedule", "update", "engine")}
    slowest = sorted(1e6 * sum(step[name] for name in parts) for step in counted)[int(len(counted) * 0.95)]
    return {**parts, "whole": sum(parts.values()), "95th percentile": slowest, "ends a step": mean(step["ended"] for step in counted)}


def main() -> None:
    """See module."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--samples", type=int, nargs="+", default=[256, 1024])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for samples in given.samples:
        for name, steady in (("steady", True), ("vLLM's own", False)):
            with tempfile.TemporaryDirectory() as folder:
                engine = build(Path(folder), samples, steady)
                measure(engine, samples, 50)
                rows.append({"samples": samples, "steps": name, **measure(engine, samples, given.steps)})
    print(report.in_words(report.machine()))
    print("microseconds a step: scheduler.schedule, update_from_output, and the engine's own part")
    print(report.table(rows))
    if given.out:
        report.write(given.out, {"machine": report.machine(), "rows": rows})


if __name__ == "__main__":
    main()

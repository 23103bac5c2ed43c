"""One contender of bench/rollout.py, in a process of its own: `python bench/rollout_side.py JOB.json`; the last line printed is JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from report import wait

Work = list[tuple[list[int], int]]
"""Samples as (prompt, number of tokens to generate)."""


def ours(job: dict[str, Any], device: torch.device) -> Callable[[Work], None]:
    """Engine `vllm` with its defaults."""
    from jackfield.components import Request, WorkerContext
    from jackfield.config import ModelConfig, SamplingConfig
    from jackfield_vllm.engine import VLLM

    engine = VLLM(VLLM.Config(max_model_len=job["max_len"], memory=job["memory"], dtype=job["dtype"], **job["options"]))
    engine.setup(ModelConfig(path=job["model"]), WorkerContext("policy", device, 0))
    generator = torch.Generator(device).manual_seed(0)
    for shard in engine.shards():
        assert shard.tensor is not None
        shard.tensor.normal_(0, 0.02, generator=generator)
    engine.weights_updated(0)
    assert engine.core is not None
    computed = job["computed"] = [0]
    engine.core.count_scheduled(lambda count: computed.__setitem__(0, computed[0] + count))

    def run(work: Work) -> None:
        computed[0] = 0
        settings = {length: SamplingConfig(max_new_tokens=length, ignore_eos=True) for _, length in work}
        requests = [Request(i, tuple(prompt), (i,), settings[length]) for i, (prompt, length) in enumerate(work)]
        found = {s.request_id: len(s.tokens) for s in engine.generate(requests)}
        assert [found[i] for i in range(len(work))] == [length for _, length in work]
        engine.weights_updated(0)  # drops the prefix cache, as each training step does

    return run


def raw(job: dict[str, Any], device: torch.device) -> Callable[[Work], None]:
    """vLLM called directly: LLM.generate on the same requests."""
    from vllm import LLM, SamplingParams

    extra: dict[str, Any] = {"gpu_memory_utilization": job["memory"]}
    if device.type == "cpu":
        torch._dynamo.config.disable = True  # type: ignore[attr-defined]
        extra = {"kv_cache_memory_bytes": job["kv_bytes"], "enforce_eager": True}
    llm = LLM(
        model=job["model"],
        dtype=job["dtype"],
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=job["max_len"],
        logprobs_mode="processed_logprobs",
        **extra,
        **job["options"],
    )

    def run(work: Work) -> None:
        prompts = [{"prompt_token_ids": prompt} for prompt, _ in work]
        params = [SamplingParams(temperature=1.0, max_tokens=n, ignore_eos=True, logprobs=0, detokenize=False) for _, n in work]
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [len(out.outputs[0].token_ids) for out in found] == [n for _, n in work]
        llm.reset_prefix_cache()

    return run


def hf(job: dict[str, Any], device: torch.device) -> Callable[[Work], None]:
    """transformers' generate on the whole padded batch, until its longest sample is finished, as trainers call it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    dtype = getattr(torch, job["dtype"])
    with device:
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(job["model"]), dtype=dtype).eval()

    @torch.no_grad()
    def run(work: Work) -> None:
        width = max(len(prompt) for prompt, _ in work)
        ids = torch.zeros(len(work), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, (prompt, _) in enumerate(work):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        longest = max(n for _, n in work)
        settings = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
        model.generate(
            ids.to(device), attention_mask=mask.to(device), max_new_tokens=longest, min_new_tokens=longest, use_cache=True, **settings
        )

    return run


def bandwidth(device: torch.device) -> tuple[float, float]:
    """Measured bytes a second of a large copy (read + write), and FLOP/s of a bf16 (CPU: fp32) matrix product."""
    size, n, dtype = (2**31, 8192, torch.bfloat16) if device.type == "cuda" else (2**28, 1024, torch.float32)
    a, b = torch.ones(size, dtype=torch.uint8, device=device), torch.empty(size, dtype=torch.uint8, device=device)
    x, y = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return 2 * size / _best(lambda: b.copy_(a)), 2 * n**3 / _best(lambda: x @ y)


def _best(action: Callable[[], Any], tries: int = 8) -> float:
    best = float("inf")
    for _ in range(tries):
        wait()
        begin = time.perf_counter()
        action()
        wait()
        best = min(best, time.perf_counter() - begin)
    return best


@contextmanager
def turn(counter: str, mine: int, count: int) -> Iterator[None]:
    """Wait until it is this contender's turn; then it is the next one's."""
    path = Path(counter)
    while int(path.read_text() or -1) % count != mine:
        time.sleep(0.02)
    yield
    path.write_text(str(int(path.read_text()) + 1))


def main(path: str) -> None:
    """Run the job's loads: seconds (wall, CPU) of each repetition."""
    job = json.loads(Path(path).read_text())
    device = torch.device("cuda", 0) if job["cuda"] else torch.device("cpu")
    if job["side"] == "machine":
        print(json.dumps(dict(zip(("bandwidth", "flops"), bandwidth(device), strict=True))))
        return
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    begin = time.perf_counter()
    run = {"ours": ours, "raw": raw, "hf": hf}[job["side"]](job, device)
    result: dict[str, Any] = {"up": time.perf_counter() - begin, "loads": {}}
    for name, work in job["loads"].items():
        times = []
        for _ in range(job["repetitions"]):
            with turn(*job["turn"]) if "turn" in job else nullcontext():
                wait()
                wall, cpu = time.perf_counter(), time.process_time()
                run(work)
                wait()
                times.append((time.perf_counter() - wall, time.process_time() - cpu))
            result["loads"][name] = {"times": times, "computed": job.get("computed", [0])[0]}
            print(json.dumps(result), flush=True)  # what is measured stays, should the time run out
    if device.type == "cuda":
        result["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1])

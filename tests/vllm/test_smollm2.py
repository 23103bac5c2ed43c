"""SmolLM2-135M served by real vLLM on CPU, held against engine `hf` and the trainer; and trained with GRPO."""

import json

import pytest
import torch

from jackfield import registry
from jackfield.components import WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, RunConfig
from jackfield.testing.samples import gap, generate, requests
from jackfield.trainer import Trainer

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

TASKS = ("What is {} + {}? Answer with a number.", "Write a sentence with {} words about the number {}.", "Count from {} to {}:")
TASKS += ("{} apples cost {} dollars. How much is one apple?",)
NEW = 24


@pytest.fixture(scope="module")
def texts(smollm2):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    return [tuple(tokenizer(TASKS[i % 4].format(i + 2, 3 * i + 5))["input_ids"]) for i in range(32)]


@pytest.fixture(scope="module")
def engines(smollm2, build, trainer, connect):
    """(vllm, hf, backend), float32, all in vLLM's storage."""
    served, backend = build(smollm2, max_model_len=512, args={"kv_cache_memory_bytes": 2**28}), trainer(smollm2)
    report = connect(backend, served, "alias").sync(0)
    assert report.bytes_aliased == sum(p.nbytes for p in backend.model.parameters())
    hf = registry.build("engine", ComponentSpec(name="hf"))
    hf.setup(ModelConfig(path=smollm2), WorkerContext("policy", torch.device("cpu"), 0))
    connect(backend, hf, "alias").sync(0)
    return served, hf, backend


def test_greedy_tokens_are_those_of_engine_hf(engines, texts, record_property):
    served, hf, backend = engines
    asked = requests(texts, group=1, temperature=0.0, max_new_tokens=NEW)
    mine, theirs = generate(served, asked), generate(hf, asked)
    ties = 0
    for request in asked:
        a, b = mine[request.id, 0].tokens, theirs[request.id, 0].tokens
        if a != b:
            at = next(i for i in range(NEW) if a[i] != b[i])
            with torch.no_grad():
                logits = backend.model(torch.tensor([[*request.tokens, *a[:at]]])).logits[0, -1]
            assert abs(logits[a[at]] - logits[b[at]]) < 1e-4, f"prompt {request.id}, token {at}: not a tie"
            ties += 1
    record_property("ties", ties)
    assert ties <= 2
    assert {s.finish_reason for s in mine.values()} >= {"length"}


def test_sampled_log_probs_are_the_backends(engines, texts, record_property):
    served, _, backend = engines
    asked = requests(texts, group=2, max_new_tokens=NEW)
    difference = gap(backend, asked, generate(served, asked))
    record_property("fp32_max", float(difference.max()))
    assert difference.max() < 1e-4


def test_the_gap_in_bfloat16_is_reported(smollm2, texts, build, trainer, connect, record_property):
    served, backend = build(smollm2, dtype="bfloat16", max_model_len=512), trainer(smollm2, dtype="bfloat16")
    assert connect(backend, served, "alias").sync(0).bytes_copied == 0
    asked = requests(texts[:8], group=2, max_new_tokens=NEW)
    difference = gap(backend, asked, generate(served, asked))
    print(f"bfloat16 gap: mean {difference.mean():.4f}, max {difference.max():.4f}")
    record_property("bf16_mean", float(difference.mean()))
    assert 0 < difference.mean() < 0.1


def test_grpo_runs_end_to_end(smollm2, tmp_path):
    config = RunConfig(
        dir=tmp_path,
        steps=2,
        policy={"model": smollm2, "optimizer": {"lr": 1e-5}},
        engine={"name": "vllm", "max_model_len": 256, "args": {"kv_cache_memory_bytes": 2**28}},
        algorithm="grpo",
        dataset="arithmetic",
        rewards=["last_number"],
        sampling={"max_new_tokens": 8},
        batch={"prompts": 2, "group_size": 4},
        trackers=[],
    )
    Trainer(config).train()
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "rollout_gap/max" in row or row.get("skipped")]
    assert len(steps) == 2
    print(steps[-1])
    for row in steps:
        if not row.get("skipped"):
            assert row["rollout_gap/max"] < 1e-3

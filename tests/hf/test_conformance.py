"""Engine `hf` under the public conformance kit: shared and copied weights, dense models and experts, few slots and many."""

from jackfield.testing.engine import EngineConformance


class TestShared(EngineConformance):
    component = "hf"
    transport = "alias"
    model_options = {"tied": True}


class TestFewSlots(EngineConformance):
    component = "hf"
    options = {"max_batch": 3, "prefill_tokens": 24}
    transport = "local"
    family = "qwen2"


class TestExperts(EngineConformance):
    component = "hf"
    family = "qwen3_moe"


class TestBfloat16(EngineConformance):
    component = "hf"
    dtype = "bfloat16"
    max_gap = 0.5
    mean_gap = 0.02
    exact_seeds = False

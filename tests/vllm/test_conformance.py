"""Engine `vllm` under the public conformance kit: shared, copied and packed weights; every family that travels as shards."""

import pytest

from jackfield.testing.engine import EngineConformance


class OnVLLM(EngineConformance):
    component = "vllm"
    options = {"memory": 0.06, "max_num_seqs": 64, "args": {"kv_cache_memory_bytes": 2**25}}
    model_options = {"hidden": 128}


@pytest.mark.vllm
class TestShared(OnVLLM):
    transport = "alias"
    model_options = {"hidden": 128, "tied": True}


@pytest.mark.vllm
class TestPacked(OnVLLM):
    options = {**OnVLLM.options, "cpu_linear": "packed"}
    transport = "local"
    family = "qwen2"


@pytest.mark.vllm
class TestPackedTiedHead(OnVLLM):
    """The trap: vLLM's own reload leaves the packed copy of a tied head as it was."""

    options = {**OnVLLM.options, "cpu_linear": "packed"}
    family = "qwen3"
    model_options = {"hidden": 128, "tied": True}


@pytest.mark.vllm
class TestQwenExperts(OnVLLM):
    family = "qwen3_moe"


@pytest.mark.vllm
class TestMixtral(OnVLLM):
    family = "mixtral"


@pytest.mark.vllm
class TestBfloat16(OnVLLM):
    """Weights small enough that the logits spread as those of the kit's own, narrower model."""

    model_options = {"hidden": 128, "initializer_range": 0.07}
    dtype = "bfloat16"
    max_gap = 0.5
    mean_gap = 0.02
    exact_seeds = False

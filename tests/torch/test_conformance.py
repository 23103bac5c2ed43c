"""Backend `torch` under the public conformance kit, in the settings that take different paths."""

from jackfield.testing.backend import BackendConformance


class TestPacked(BackendConformance):
    component = "torch"
    options = {"packing": "on"}


class TestPaddedAndTied(BackendConformance):
    component = "torch"
    options = {"packing": "off", "activation_checkpointing": True}
    family = "qwen2"
    model_options = {"tied": True}


class TestExperts(BackendConformance):
    component = "torch"
    family = "qwen3_moe"
    same_names = False


class TestBfloat16(BackendConformance):
    component = "torch"
    options = {"dtype": "bfloat16"}
    world_size = 2
    rtol = 1e-3


class TestReplicas(BackendConformance):
    component = "torch"
    world_size = 2
    family = "qwen2"
    model_options = {"tied": True}

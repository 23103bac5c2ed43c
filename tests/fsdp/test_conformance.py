"""Backend `fsdp` under the public conformance kit: two processes to the same laws as one, and one alone."""

from jackfield.testing.backend import BackendConformance


class TestTwo(BackendConformance):
    component = "fsdp"
    world_size = 2
    model_options = {"tied": True}


class TestAlone(BackendConformance):
    component = "fsdp"
    options = {"reshard_after_forward": False, "activation_checkpointing": True}
    family = "qwen2"


class TestTensorParallel(BackendConformance):
    """Norms of single heads (qwen3), whose gradients are partial."""

    component = "fsdp"
    options = {"tp": 2}
    world_size = 2
    family = "qwen3"

"""Laws 1 to 3 and 20 for training backends over several GPUs or processes: the public conformance kit, in the layouts of BENCH_LAYOUTS.

Run by bench/laws.py as `pytest bench/laws_backends.py`; BENCH_DEVICE says where, BENCH_RANKS how many ranks there may be at most.
"""

import os

import pytest

from jackfield.testing.backend import BackendConformance

DEVICE, RANKS = os.environ.get("BENCH_DEVICE", "cpu"), int(os.environ.get("BENCH_RANKS", "4"))
CHOSEN = os.environ.get("BENCH_LAYOUTS", "").split()
if DEVICE == "cpu":  # once, for all processes that are forked
    from jackfield_megatron import shim

    with shim.scope():
        import jackfield_megatron.model
        import jackfield_megatron.update  # noqa: F401

COMPONENTS = {
    "megatron": "jackfield_megatron.backend:MegatronBackend",
    "fsdp": "jackfield_torch.fsdp:FSDPBackend",
    "torch": "jackfield_torch.backend:TorchBackend",
}
LAYOUTS = {
    # name: (backend, ranks, options, family)
    "megatron-tp2-pp2": ("megatron", 4, {"tp": 2, "pp": 2}, "qwen3"),
    "megatron-tp4": ("megatron", 4, {"tp": 4}, "llama"),
    "megatron-tp2-pp2-dp2": ("megatron", 8, {"tp": 2, "pp": 2}, "llama"),
    "megatron-tp2": ("megatron", 2, {"tp": 2}, "llama"),
    "megatron-pp2": ("megatron", 2, {"pp": 2}, "qwen2"),
    "megatron-dp2": ("megatron", 2, {"overlap_grad_reduce": True, "overlap_param_gather": True}, "qwen2"),
    "megatron-cp2": ("megatron", 2, {"cp": 2}, "llama"),
    "torch2": ("torch", 2, {}, "llama"),
    "fsdp2": ("fsdp", 2, {}, "llama"),
    "fsdp4": ("fsdp", 4, {}, "llama"),
    "fsdp8": ("fsdp", 8, {}, "qwen2"),
    "megatron-alone": ("megatron", 1, {}, "llama"),
}
LAWS = {
    "test_gradient_is_that_of_transformers": "1 (any split has one process's gradient)",
    "test_micro_batches_do_not_show": "1, 2 (micro-batches, order of samples)",
    "test_log_probs_are_those_of_transformers": "8, 11 (log-probs)",
    "test_nothing_to_train": "16, 20 (fillers, equal counts)",
}


def _case(name: str) -> type:
    backend, ranks, options, family = LAYOUTS[name]
    component = COMPONENTS[backend]
    made: type = type(name, (BackendConformance,), {"component": component, "options": options, "family": family})
    made.world_size, made.device, made.__test__ = ranks, DEVICE, True
    for method in [m for m in dir(BackendConformance) if m.startswith("test_") and m not in LAWS]:
        setattr(made, method, None)
    made.pytestmark = [pytest.mark.timeout(240)]
    return made


for _name, (_, _ranks, _, _) in LAYOUTS.items():
    if _name in CHOSEN if CHOSEN else _ranks <= RANKS:
        globals()["Test" + _name.title().replace("-", "")] = _case(_name)

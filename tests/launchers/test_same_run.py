"""One GRPO run of a real model gives the same rewards and weights wherever it runs; launcher `ray` has its own in test_ray.py."""

import importlib.util

import pytest

FORK2 = ["launcher.name=fork", "launcher.device=cpu", "launcher.workers=2"]
MEGATRON = [pytest.mark.megatron, pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")]


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(["policy.backend.name=torch"], id="dp2"),
        pytest.param(["policy.backend.name=fsdp"], id="fsdp2"),
        pytest.param(["policy.backend.name=megatron", "policy.backend.tp=2"], id="megatron-tp2", marks=MEGATRON),
    ],
)
def test_two_workers_of_launcher_fork(same_run, backend, request):
    same_run(request.node.callspec.id, *FORK2, *backend)

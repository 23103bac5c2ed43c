"""One GRPO run of a real model gives the same rewards and weights wherever it runs; launcher `ray` has its own in test_ray.py."""

import importlib.util

import pytest

FORK2 = ["launcher.name=fork", "launcher.device=cpu", "launcher.workers=2"]
MEGATRON = [pytest.mark.megatron, pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="needs megatron-core")]
APART = ["launcher.workers=3", "policy.gpus=2", "engine.gpus=1", "transport={name: p2p, verify: true, bucket_bytes: 4096}"]
"""An engine on a worker of its own; every sync compares checksums (law 23) and sends about a tensor at a time."""


@pytest.mark.parametrize(
    "backend",
    [
        pytest.param(["policy.backend.name=torch"], id="dp2"),
        pytest.param(["policy.backend.name=fsdp"], id="fsdp2"),
        pytest.param(["policy.backend.name=megatron", "policy.backend.tp=2"], id="megatron-tp2", marks=MEGATRON),
        pytest.param(["policy.backend={name: megatron, tp: 2}", *APART], id="engine-apart", marks=MEGATRON),
    ],
)
def test_launcher_fork(same_run, backend, request):
    same_run(request.node.callspec.id, *FORK2, *backend)


def test_a_worker_killed_in_mid_rollout_is_named_and_the_run_resumes_to_the_same_weights(same_run, killed):
    """kill -9; law 22, with a sharded backend."""
    run = same_run("killed-on-fork", *FORK2, "policy.backend.name=fsdp", *killed)
    seconds, _, error = (run.dir / "noticed").read_text().partition(" ")
    assert float(seconds) < 60, "law 22's own bound"
    assert error.startswith("policy worker 1 of 2 (pid") and "was killed by signal 9" in error


@MEGATRON[0]
@MEGATRON[1]
def test_the_seeds_case_at_quarter_scale(same_ppo, seed_case):
    run = same_ppo("apart", "launcher.name=fork", *seed_case)
    groups = [run.policy.group, run.critic.group, run.reference.group]
    assert [g.size for g in groups] == [2, 1, 2] and groups[0] is groups[2]

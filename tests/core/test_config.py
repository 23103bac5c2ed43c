"""What roles inherit from the policy."""

import pytest
from pydantic import ValidationError

from jackfield.config import RunConfig, role_config

BASE = {"policy": {"model": "m", "backend": "fsdp", "optimizer": {"lr": 3e-3, "warmup": 5}}, "algorithm": "ppo", "dataset": "copy"}


def test_a_critic_inherits_what_it_leaves_unset():
    role = role_config(RunConfig(**BASE), "critic")
    assert role.model is not None
    assert role.backend is not None
    assert (role.model.path, role.model.head, role.backend.name) == ("m", "value", "fsdp")
    assert (role.optimizer.lr, role.optimizer.warmup) == (3e-3, 5)


def test_a_critic_keeps_what_it_sets():
    role = role_config(RunConfig(**BASE, critic={"model": "c", "optimizer": {"lr": 1e-2, "weight_decay": 0.1}}), "critic")
    assert role.model is not None
    assert (role.model.path, role.optimizer.lr, role.optimizer.weight_decay, role.optimizer.warmup) == ("c", 1e-2, 0.1, 5)
    assert role_config(RunConfig(**BASE), "policy").optimizer.weight_decay == 0


def test_a_scheduled_rate_is_inherited_whole():
    schedule = {"start": 1e-3, "end": 0.0, "steps": 10}
    base = BASE | {"policy": {"model": "m", "optimizer": {"lr": schedule}}}
    config = RunConfig(**base)
    assert role_config(config, "critic").optimizer.lr == config.policy.optimizer.lr


@pytest.mark.parametrize("rate", [float("nan"), float("inf"), -1e-3, {"start": float("nan"), "end": 0.0, "steps": 3}])
def test_a_rate_that_cannot_train_is_refused(rate):
    with pytest.raises(ValidationError, match=r"optimizer\.lr"):
        RunConfig(**BASE | {"policy": {"model": "m", "optimizer": {"lr": rate}}})


@pytest.mark.parametrize("weight", [float("nan"), float("inf")])
def test_a_weight_that_is_no_number_is_refused(weight):
    with pytest.raises(ValidationError, match="weight"):
        RunConfig(**BASE, rewards=[{"name": "share", "weight": weight}])

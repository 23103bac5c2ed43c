"""Who shares workers with whom, and on which GPUs."""

import pytest

from jackfield.errors import ConfigError
from jackfield_workers.placement import pools

ROLES = ("policy", "reference", "critic")


def placed(config, available, roles=ROLES):
    return {p.name: (p.roles, p.size, p.first) for p in pools(config, roles, available)}


def test_everything_shares_the_policys_workers_by_default(fake):
    assert placed(fake(), 8) == {"policy": (ROLES, 8, 0)}


def test_a_role_with_gpus_has_its_own_and_the_policy_the_rest(fake):
    assert placed(fake("critic.gpus=4"), 12) == {"policy": (("policy", "reference"), 8, 0), "critic": (("critic",), 4, 8)}


def test_the_seeds_case(fake):
    config = fake("policy.gpus=8", "critic.gpus=4", "reference.colocate=critic")
    assert placed(config, 12) == {"policy": (("policy",), 8, 0), "critic": (("critic", "reference"), 4, 8)}


def test_workers_may_stay_unused(fake):
    assert placed(fake("policy.gpus=2"), 8) == {"policy": (ROLES, 2, 0)}


@pytest.mark.parametrize(
    ("overrides", "available", "message"),
    [
        (["policy.gpus=8", "critic.gpus=4"], 8, "policy 8 + critic 4 = 12 workers at least, but there are 8"),
        (["critic.gpus=4"], 4, "policy the rest + critic 4 = 5 workers at least, but there are 4"),
        (
            ["policy.gpus=2", "critic.colocate=policy", "critic.gpus=1"],
            8,
            "critic.gpus is 1, but it shares the workers of policy",
        ),
        (["critic.colocate=refrence"], 8, "critic.colocate is 'refrence', which is no role of this run: choose from policy"),
        (["critic.colocate=reference", "reference.colocate=critic"], 8, "roles colocate in a circle"),
        (["critic.colocate=critic"], 8, "critic -> critic: roles colocate in a circle"),
    ],
)
def test_what_cannot_be_says_why_with_arithmetic(fake, overrides, available, message):
    with pytest.raises(ConfigError, match=message.replace("+", r"\+")):
        pools(fake(*overrides), ROLES, available)

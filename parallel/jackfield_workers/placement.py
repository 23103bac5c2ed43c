"""Which roles share workers, how many workers there are, and which GPUs they have: pure arithmetic on the config."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jackfield.config import RunConfig
from jackfield.errors import ConfigError

MODELS = ("policy", "reference", "critic", "engine")
"""Fields of the config that can have workers; every other role is a reward's label."""


@dataclass(frozen=True)
class Pool:
    """Workers that a set of roles shares. Every worker of a pool holds its part of every role of the pool."""

    name: str
    """The role that owns the pool."""
    roles: tuple[str, ...]
    """All roles of the pool, the owner first."""
    size: int
    """Workers, one a GPU (or a share of the CPUs)."""
    first: int
    """Number of the pool's first worker among all workers of the run, which is also its GPU on one host."""


def wanted(config: RunConfig, role: str) -> tuple[int | None, str | None]:
    """(`gpus`, `colocate`) of a role as the config says, with the defaults of reference and critic filled in.

    A role is `policy`, `reference`, `critic`, `engine`, or the label of a reward.
    """
    own = getattr(config, role) if role in MODELS else next(spec for spec in config.rewards if (spec.label or spec.name) == role)
    colocate = own.colocate
    if role != "policy" and colocate is None and own.gpus is None:
        colocate = "policy"
    return own.gpus, colocate


def linked(found: Sequence[Pool]) -> list[Pool]:
    """The pools of policy and engine where the engine has workers of its own: they must reach each other to bring weights over."""
    both = [pool for pool in found if "policy" in pool.roles or "engine" in pool.roles]
    return both if len(both) > 1 else []


def first_ranks(link: Sequence[Pool]) -> dict[str, int]:
    """The first rank of each pool in the group that spans them: one pool after the other."""
    result: dict[str, int] = {}
    for pool in link:
        result[pool.name] = sum(p.size for p in link if p.name in result)
    return result


def _owner(config: RunConfig, role: str, roles: Sequence[str]) -> str:
    seen = [role]
    while (other := wanted(config, seen[-1])[1]) is not None:
        if other not in roles:
            raise ConfigError(f"{seen[-1]}.colocate is {other!r}, which is no role of this run: choose from {', '.join(roles)}")
        if other in seen:
            raise ConfigError(f"{' -> '.join([*seen, other])}: roles colocate in a circle; let one of them name its gpus instead")
        seen.append(other)
    return seen[-1]


def pools(config: RunConfig, roles: Sequence[str], available: int) -> list[Pool]:
    """The pools of a run on `available` workers, in the order in which they take GPUs. Raises ConfigError where they do not fit.

    The one pool whose owner names no `gpus` (the policy's by default) gets all that the others leave.
    """
    owners = {role: _owner(config, role, roles) for role in roles}
    members = {owner: tuple([owner, *(r for r in roles if owners[r] == owner and r != owner)]) for owner in dict.fromkeys(owners.values())}
    sizes: dict[str, int | None] = {owner: wanted(config, owner)[0] for owner in members}
    for role in roles:
        gpus, owner = wanted(config, role)[0], owners[role]
        if gpus is not None and sizes[owner] not in (None, gpus):
            raise ConfigError(f"{role}.gpus is {gpus}, but it shares the workers of {owner}, which has {sizes[owner]}: drop one of the two")
        sizes[owner] = sizes[owner] or gpus
    taken = sum(size or 0 for size in sizes.values())
    rest = [owner for owner, size in sizes.items() if size is None]
    arithmetic = " + ".join(f"{owner} {size or 'the rest'}" for owner, size in sizes.items())
    if len(rest) > 1:
        raise ConfigError(f"{' and '.join(rest)} have workers of their own but only one may leave out `gpus`: {arithmetic} of {available}")
    if taken + len(rest) > available:
        raise ConfigError(f"{arithmetic} = {taken + len(rest)} workers at least, but there are {available}: lower `gpus` or colocate roles")
    result: list[Pool] = []
    first = 0
    for owner, names in members.items():
        size = sizes[owner] or available - taken
        result.append(Pool(owner, names, size, first))
        first += size
    return result

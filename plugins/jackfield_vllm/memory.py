"""How the device's memory is split between trainer and engine: one share, and arithmetic that says what does not fit."""

from __future__ import annotations

from dataclasses import dataclass

from jackfield.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True)
class Need:
    """What the engine must hold on one device, in bytes."""

    weights: int
    """This rank's weights."""
    token: int
    """Keys and values of one token."""
    reserve: int
    """Activations and graphs, beside weights and KV cache."""
    max_model_len: int
    """Longest sequence, in tokens."""


def kv_budget(share: float, total: int, free: int, need: Need) -> int:
    """Bytes left for the KV cache under `share` of `total`. Raises ConfigError with the sum where one sequence would not fit."""
    given = int(share * total)
    least = need.weights + need.reserve + need.token * need.max_model_len
    sums = (
        f"weights {_gib(need.weights)} + activations {_gib(need.reserve)} + one sequence of {need.max_model_len} tokens "
        f"x {need.token / 1024:.1f} KiB = {_gib(least)}"
    )
    if given > free:
        raise ConfigError(
            f"engine.memory {share:g} x {_gib(total)} = {_gib(given)}, but {_gib(free)} are free (others hold {_gib(total - free)}); "
            f"set engine.memory to at most {int(free / total * 100) / 100:.2f} ({sums})"
        )
    if given < least:
        shorter = (given - need.weights - need.reserve) // need.token
        way = f"or engine.max_model_len to {shorter}" if shorter > 0 else "or use more tensor parallelism (engine.tp)"
        raise ConfigError(
            f"engine.memory {share:g} x {_gib(total)} = {_gib(given)} is less than {sums}; "
            f"set engine.memory to at least {least / total + 0.005:.2f}, {way}"
        )
    return given - need.weights - need.reserve


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"

"""Seconds for advantages on the controller, beside verl's where it is installed and beside a plain loop of our own otherwise.

    python bench/advantages.py [--samples 8192] [--tokens 1024] [--repeat 5] [--threads 1] [--holes]

CPU seconds of the process, so that a busy machine matters less. Both sides get the same inputs and are checked to agree; the ratio is of
the fastest runs. `temporaries_BT` is the most memory held at once beyond inputs and results, in units of one float32 [B, T] tensor;
`exponent` is that of the tokens in the time: the slope of log seconds over log tokens at one, two and four times as many (1 is linear);
upwards, because the C library keeps blocks of at most 32 MiB, so that smaller tensors come without page faults and look faster than they
are. verl is read from an environment of its own: `PYTHONPATH=<its site-packages> python bench/advantages.py`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import jackfield_estimators as F


def inputs(samples: int, tokens: int, holes: bool) -> dict[str, Any]:
    """Rewards, values and ragged masks; groups of eight; `holes`: a tool's output in every response."""
    rng = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, tokens + 1, (samples, 1), generator=rng)
    place = torch.arange(tokens)
    mask = place < lengths
    if holes:
        mask &= (place < lengths // 3) | (place >= lengths // 2)
    outcome = torch.randint(0, 2, (samples,), generator=rng).float()
    rewards = torch.randn(samples, tokens, generator=rng) * 0.01 * mask
    return {"rewards": rewards, "values": torch.randn(samples, tokens, generator=rng), "mask": mask, "outcome": outcome}


def loop_gae(rewards: Tensor, values: Tensor, mask: Tensor, gamma: float, lam: float) -> Tensor:
    """The recursion token by token, as the paper writes it: the stand-in where verl is not installed."""
    following = last = torch.zeros(len(values))
    out = torch.zeros_like(values)
    for t in reversed(range(values.shape[1])):
        here = mask[:, t]
        new = rewards[:, t] + gamma * following - values[:, t] + gamma * lam * last
        last, following = torch.where(here, new, last), torch.where(here, values[:, t], following)
        out[:, t] = last * here
    return out


def peers(data: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """The other side by name; each returns advantages [B, T]."""
    rewards, values, mask = data["rewards"], data["values"], data["mask"]
    floats, groups = mask.float(), torch.arange(len(mask)) // 8
    placed = torch.zeros_like(values)
    placed[torch.arange(len(mask)), mask.int().cumsum(1).argmax(1)] = data["outcome"]
    if importlib.util.find_spec("verl") is None:
        return {"gae": lambda: F.masked_whiten(loop_gae(rewards, values, mask, 1.0, 0.95), mask)}
    from verl.trainer.ppo import core_algos

    gae = core_algos.compute_gae_advantage_return
    grpo, rloo = core_algos.compute_grpo_vectorized_outcome_advantage, core_algos.compute_rloo_vectorized_outcome_advantage
    index = groups.numpy()
    return {
        "gae": lambda: gae(rewards, values, floats, 1.0, 0.95)[0] * mask,
        "grpo": lambda: grpo(placed.clone(), floats, index)[0],
        "rloo": lambda: rloo(placed.clone(), floats, index)[0],
    }


def ours(data: dict[str, Any]) -> dict[str, Callable[[], tuple[Tensor, ...]]]:
    """The same on this side: advantages, and with GAE the returns."""
    mask, outcome = data["mask"], data["outcome"]
    groups, valid = torch.arange(len(mask)) // 8, mask.any(-1)

    def gae() -> tuple[Tensor, Tensor]:
        advantages, returns = F.gae(data["rewards"], data["values"], mask, gamma=1.0, lam=0.95)
        return F.masked_whiten(advantages, mask), returns

    return {
        "gae": gae,
        "grpo": lambda: (F.spread(F.group_center(outcome, groups, valid, std=True), mask),),
        "rloo": lambda: (F.spread(F.leave_one_out(outcome, groups, valid), mask),),
    }


def seconds(call: Callable[[], Any], repeat: int) -> float:
    """The fastest of `repeat` runs after one to warm up."""
    call()
    found = []
    for _ in range(repeat):
        start = time.process_time()
        call()
        found.append(time.process_time() - start)
    return min(found)


def temporaries(call: Callable[[], tuple[Tensor, ...]]) -> float:
    """Most memory held at once during the call beyond what it returns, in units of its first result, by the allocator's own trace."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as trace:
        results = call()
    held = most = 0
    for event in trace.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return (most - sum(x.nbytes for x in results)) / results[0].nbytes


def exponent(times: dict[int, float]) -> float:
    """Least-squares slope of log seconds over log tokens."""
    points = [(math.log(tokens), math.log(taken)) for tokens, taken in times.items()]
    x, y = (sum(values) / len(points) for values in zip(*points, strict=True))
    return sum((a - x) * (b - y) for a, b in points) / sum((a - x) ** 2 for a, _ in points)


def main() -> None:
    """Print one line a method, then one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("samples", 8192), ("tokens", 1024), ("repeat", 5), ("threads", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--holes", action="store_true", help="a tool's output in every response")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    data = inputs(args.samples, args.tokens, args.holes)
    mine, theirs = ours(data), peers(data)
    result: dict[str, Any] = {"samples": args.samples, "tokens": args.tokens, "threads": args.threads, "holes": args.holes}
    for name, call in mine.items():
        row = {"seconds": seconds(call, args.repeat), "temporaries_BT": temporaries(call)}
        if name in theirs:
            other = theirs[name]
            torch.testing.assert_close(call()[0], other(), rtol=1e-3, atol=1e-3)
            row |= {"other": seconds(other, args.repeat)}
            row["ratio"] = row["other"] / row["seconds"]
        times = {args.tokens: row["seconds"]}
        for tokens in (2 * args.tokens, 4 * args.tokens):
            times[tokens] = seconds(ours(inputs(args.samples, tokens, args.holes))[name], args.repeat)
        row["exponent"] = exponent(times)
        result[name] = row
        print(name, {k: round(v, 4) for k, v in row.items()}, flush=True)
    print(json.dumps(result))


if __name__ == "__main__":
    main()

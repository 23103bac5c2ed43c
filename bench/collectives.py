"""Measured rates of the links between ranks, and the ring model that turns them into seconds of a collective.

A collective of `bytes` over n ranks takes steps x latency + volume / rate: an all-gather or reduce-scatter n - 1 steps and
(n - 1) / n x bytes, an all-reduce both after one another (Thakur, Rabenseifner and Gropp 2005, section 4).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from ranks import Here
from report import slowest, spread

PASSES = {"all_gather": 1, "reduce_scatter": 1, "all_reduce": 2}
"""How often each collective goes round the ring."""


@dataclass(frozen=True)
class Ring:
    """Latency of a step in seconds, and bytes a second that a rank sends while it receives as many."""

    latency: float
    rate: float

    def seconds(self, kind: str, amount: float, ranks: int) -> float:
        """Time of one collective over `amount` bytes (of the gathered or reduced tensor)."""
        return PASSES[kind] * ((ranks - 1) * self.latency + (ranks - 1) / ranks * amount / self.rate)


def sizes(device: str) -> tuple[int, ...]:
    """Bytes to measure: from where latency counts to where only the rate does."""
    return (1 << 14, 1 << 20, 1 << 24, 1 << 28, 1 << 30) if device == "cuda" else (1 << 12, 1 << 16, 1 << 20, 1 << 23)


def measure(here: Here, repetitions: int = 5) -> list[tuple[str, int, list[float]]]:
    """(collective, bytes, seconds of each repetition on this rank). Each repetition is several calls, all but the largest."""
    import torch
    import torch.distributed as dist

    found = []
    for amount in sizes(here.device.type):
        whole = torch.zeros(amount // 4 // here.world * here.world, device=here.device)
        part = torch.zeros(len(whole) // here.world, device=here.device)
        calls = max(1, min(20, (1 << 24) // amount))
        works = {
            "all_reduce": lambda t=whole: dist.all_reduce(t),
            "all_gather": lambda t=whole, p=part: dist.all_gather_into_tensor(t, p),
            "reduce_scatter": lambda t=whole, p=part: dist.reduce_scatter_tensor(p, t),
            "neighbours": lambda t=whole: _neighbours(here, t),
        }
        for kind, work in works.items():
            times = here.timed(lambda w=work, n=calls: [w() for _ in range(n)], repetitions)
            found.append((kind, whole.numel() * 4, [t / calls for t in times]))
    return found


def _neighbours(here: Here, tensor: Any) -> None:
    """Send to the next rank and receive from the one before, as many bytes each way."""
    import torch
    import torch.distributed as dist

    if "inbox" not in vars(here) or here.inbox.numel() != tensor.numel():
        here.inbox = torch.empty_like(tensor)  # type: ignore[attr-defined]
    after, before = (here.rank + 1) % here.world, (here.rank - 1) % here.world
    operations = [dist.P2POp(dist.isend, tensor, after), dist.P2POp(dist.irecv, here.inbox, before)]  # type: ignore[attr-defined]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


def fit(kind: str, points: list[tuple[int, float]], ranks: int) -> Ring:
    """Latency and rate from (bytes, seconds); relative errors count alike, and neither gets less than nothing."""
    rows = np.array([[PASSES[kind] * (ranks - 1), PASSES[kind] * (ranks - 1) / ranks * amount] for amount, _ in points])
    seconds = np.array([s for _, s in points])
    from scipy.optimize import nnls

    (latency, inverse), _ = nnls(rows / seconds[:, None], np.ones(len(seconds)))
    return Ring(float(latency), float(1 / inverse) if inverse > 0 else float("inf"))


def summary(ranks: list[list[tuple[str, int, list[float]]]]) -> dict[str, Any]:
    """From all ranks' measurements: seconds by collective and size, the fitted rings, and the rate between neighbours."""
    world, rows = len(ranks), []
    for index, (kind, amount, _) in enumerate(ranks[0]):
        rows.append({"collective": kind, "bytes": amount, "seconds": spread(slowest([rank[index][2] for rank in ranks]))})
    rings = {k: fit(k, [(r["bytes"], r["seconds"].median) for r in rows if r["collective"] == k], world) for k in PASSES}
    link = max(r["bytes"] / r["seconds"].median for r in rows if r["collective"] == "neighbours")
    return {"ranks": world, "rows": rows, "rings": {k: asdict(v) for k, v in rings.items()}, "link_bytes_per_second": link}


def rings(found: dict[str, Any]) -> dict[str, Ring]:
    """The fitted rings of a `summary`."""
    return {kind: Ring(**values) for kind, values in found["rings"].items()}

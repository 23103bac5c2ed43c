"""The model behind bench/scaling.py: what a training step's collectives take on measured links, checked and then extended."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from collectives import Ring, rings


def collectives_of(backend: str, workload: Mapping[str, Any], dtype_bytes: int) -> list[tuple[str, float, int]]:
    """(kind, bytes of one, how many) of a data-parallel training step.

    torch: one all-reduce of every tensor's float32 gradient. fsdp: for each micro-batch every layer's weights are gathered
    twice and its float32 gradients reduced once (the root's weights, embedding and head, are gathered once). megatron, with the
    distributed optimizer: gradients reduced once a step in float32, new weights gathered once.
    """
    parameters, layers, micro = workload["parameters"], workload["layers"], workload["micro_batches"]
    if backend == "torch":
        return [("all_reduce", 4 * parameters / workload["tensors"], workload["tensors"])]
    if backend == "megatron":
        return [("reduce_scatter", 4.0 * parameters, 1), ("all_gather", float(dtype_bytes * parameters), 1)]
    layer = parameters / (layers + 1)
    return [("all_gather", dtype_bytes * layer, micro * (2 * layers + 1)), ("reduce_scatter", 4 * layer, micro * (layers + 1))]


def communication(work: Sequence[tuple[str, float, int]], found: Mapping[str, Ring], size: int) -> float:
    """Seconds of all of them one after another."""
    return sum(times * found[kind].seconds(kind, amount, size) for kind, amount, times in work) if size > 1 else 0.0


def check_and_extend(rows: Sequence[dict[str, Any]], links: Mapping[str, Any], args: argparse.Namespace) -> list[dict[str, Any]]:
    """Predicted beside measured for every size that ran, then predictions alone; pure data parallelism only.

    `predicted_from_one` knows the smallest size and the links; `predicted` knows also what contention costs at this size (the run alone)
    and how much of the communication was hidden at the size before (nothing, at the first).
    """
    out: list[dict[str, Any]] = []
    for backend in dict.fromkeys(row["backend"] for row in rows):
        ran = [r for r in rows if r["backend"] == backend and "alone_seconds" in r and r["dp"] == r["ranks"]]
        if len(ran) < 2 or not links:
            continue
        base, exposed, found = ran[0], 1.0, None
        work = collectives_of(backend, base["workload"], 4 if args.dtype == "float32" else 2)
        for row in ran[1:]:
            size, seconds, alone = row["ranks"], row["seconds"].median, row["alone_seconds"].median
            found = rings(links[str(size)])
            wire = communication(work, found, size)
            predicted = max(alone + exposed * wire, wire)
            line = {"backend": backend, "ranks": size, "measured": seconds, "predicted": predicted, "error": predicted / seconds - 1}
            line |= {"predicted_from_one": base["alone_seconds"].median + exposed * wire, "communication": wire, "exposed": exposed}
            out.append(line | {"efficiency": row["efficiency"]})
            exposed = min(1.0, max(0.0, seconds - alone) / wire)
        assert found is not None
        alone, size, measured = ran[-1]["alone_seconds"].median, ran[-1]["ranks"], ran[-1]["ranks"] / ran[-1]["tokens_per_s"].median
        while (size := size * 4) <= args.up_to:
            near = size <= args.per_node
            reached = found if near else {k: replace(r, rate=min(r.rate, args.network * 1e9)) for k, r in found.items()}
            wire = communication(work, reached, size)
            seconds = max(alone + exposed * wire, wire)  # no more can be hidden than there is time to hide it behind
            line = {"backend": backend, "ranks": size, "predicted": seconds, "communication": wire, "exposed": exposed}
            tokens = ran[-1]["seconds"].median / measured  # of a rank
            out.append(line | {"efficiency": tokens / seconds / base["tokens_per_s_per_rank"].median})
    return out

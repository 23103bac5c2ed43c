"""How long a plan takes on a topology, by arithmetic: a simulation, not a measurement.

Each GPU sends and receives at once at the link's rate; its time is the largest of what it copies, sends or receives inside the node
and sends or receives over the network, since the transports overlap the three; the plan's time is the slowest GPU's, plus one latency
for every bucket of its longest stream. Congestion beyond a GPU's own links is not modelled.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jackfield_reshard.plan import Plan
from jackfield_reshard.topology import Topology


@dataclass(frozen=True)
class Estimate:
    """Seconds by cause; `total` is less than their sum where they overlap."""

    copy: float
    node: float
    network: float
    latency: float
    total: float


def simulate(plan: Plan, alias: bool = False, bucket_bytes: int = 256 << 20) -> Estimate:
    """Time of one sync. With `alias` what both sides can share costs nothing, else it is copied."""
    topology = plan.topology
    local = plan.received[0] - plan.aliased if alias else plan.received[0]
    copy = 2 * local / topology.memory
    times = []
    for tier, rate in ((1, topology.nvlink), (2, topology.network)):
        out, into = plan.sent[tier], plan.received[tier]
        times.append((float(out.max(initial=0)) / rate, float(into.max(initial=0)) / rate))
    wire = [max(pair) for pair in times]
    packed = 2 * np.maximum(plan.received[1:].sum(axis=0), 0) / topology.memory  # unpacking beside the wire
    buckets = plan.received[1:].sum(axis=0).max(initial=0) / max(bucket_bytes // 4, 1)
    latency = float(topology.latency * (np.ceil(buckets) + (buckets > 0)))
    total = max(float(copy.max(initial=0) + packed.max(initial=0)), *wire) + latency
    return Estimate(float(copy.max(initial=0)), wire[0], wire[1], latency, total)


def gather_everything(model_bytes: float, gpus: int, engine_bytes: float, topology: Topology, engine_gpus: int | None = None) -> Estimate:
    """The common way: every trainer GPU gathers every full tensor, packs buckets, and each engine rank copies out its slice.

    A ring all-gather brings each GPU all but its own share, at the network's rate once more than one node takes part; the tensor is
    written by the gather, concatenated, packed and sliced: three copies of the model and one of the engine's part. With engines on
    GPUs of their own (`engine_gpus`) the buckets are then broadcast to them over the network, which takes as long again.
    """
    share = model_bytes * (gpus - 1) / gpus
    near = gpus <= topology.gpus_per_node
    wire = share / (topology.nvlink if near else topology.network)
    if engine_gpus:
        wire += model_bytes / topology.network
    copy = 2 * (3 * model_bytes + engine_bytes) / topology.memory
    return Estimate(copy, wire if near else 0.0, 0.0 if near else wire, 0.0, wire + copy)

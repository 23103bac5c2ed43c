"""A run's configuration as layouts, and a plan as text. Nothing is started and no tensor exists."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jackfield.errors import ConfigError
from jackfield_reshard.layout import Layout
from jackfield_reshard.plan import Plan
from jackfield_reshard.simulate import gather_everything, simulate

if TYPE_CHECKING:
    from jackfield.config import ComponentSpec


def _product(options: Mapping[str, Any], *names: str) -> int:
    product = 1
    for name in names:
        product *= int(options.get(name, 1))
    return product


def smallest(backend: ComponentSpec, engine: ComponentSpec) -> int:
    """The fewest GPUs that hold one replica of both sides."""
    return max(_product(backend.options, "tp", "pp", "cp"), _product(engine.options, "tp"))


def _rest(world: int, used: int, who: str, terms: str) -> int:
    if world % used:
        raise ConfigError(f"{who}: {world} GPUs are not a multiple of {terms} = {used}; say --gpus")
    return world // used


def training_layout(backend: ComponentSpec, world: int) -> Layout:
    """The layout of a built-in backend on so many GPUs; another backend's class may offer `plan_layout(options, world)`."""
    options = backend.options
    if backend.name == "torch":
        return Layout("torch", dp=world)
    if backend.name == "fsdp":
        tp = int(options.get("tp", 1))
        return Layout("fsdp", tp=tp, dp=_rest(world, tp, "backend fsdp", f"tp {tp}"))
    if backend.name == "megatron":
        tp, pp, cp, ep = (int(options.get(name, 1)) for name in ("tp", "pp", "cp", "ep"))
        dp = _rest(world, tp * pp * cp, "backend megatron", f"tp {tp} x pp {pp} x cp {cp}")
        etp = int(options["etp"]) if "etp" in options else 1
        return Layout("megatron", tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, etp=etp, vpp=int(options.get("vpp", 1)))
    return _offered("backend", backend, world)


def engine_layout(engine: ComponentSpec, world: int) -> Layout:
    """The layout of a built-in engine on so many GPUs."""
    if engine.name == "hf":
        return Layout("torch", dp=world)
    if engine.name == "vllm":
        tp = int(engine.options.get("tp", 1))
        spread = bool(engine.options.get("args", {}).get("enable_expert_parallel"))
        dp = _rest(world, tp, "engine vllm", f"tp {tp}")
        return Layout("vllm", tp=tp, dp=dp, ep=tp if spread else 1, vocabulary_multiple=64)
    return _offered("engine", engine, world)


def _offered(kind: str, spec: ComponentSpec, world: int) -> Layout:
    from jackfield import registry

    offer = getattr(registry.load(kind, spec.name), "plan_layout", None)
    if offer is None:
        raise ConfigError(
            f"{kind} {spec.name}: no layout is known; the class can offer a static method plan_layout(options, world) -> Layout"
        )
    layout: Layout = offer(spec.options, world)
    return layout


def size(count: float) -> str:
    """Bytes in a readable unit."""
    for unit in ("B", "KB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} TB"


def lines(plan: Plan, source: Layout, destination: Layout, model_bytes: float, ranks: int = 16) -> Iterator[str]:
    """The plan as text: totals, proof, estimate, and a table of the first ranks."""
    proof = plan.prove()
    needed = plan.bytes_local + plan.bytes_sent
    yield f"training    {source}: {source.world} ranks"
    yield f"engine      {destination}: {destination.world} ranks"
    yield f"weights     {size(model_bytes)} in the engine's type; engine ranks need {size(needed)} together"
    yield (
        f"in place    {size(plan.bytes_local)} ({plan.bytes_local / needed:.1%}), of which {size(int(plan.aliased.sum()))} can be shared "
        f"without a copy"
    )
    near, far = (int(plan.received[tier].sum()) for tier in (1, 2))
    sent = sum(flow.tier > 0 for flow in plan.flows)
    yield f"sent        {size(near)} inside nodes, {size(far)} between nodes, in {sent} flows"
    yield (
        f"proof       every element once; {'bytes equal the lower bound' if not proof.errors else '; '.join(proof.errors)}; largest sender "
        f"{proof.imbalance:.3f} of the mean (no choice of senders gets below {proof.least_imbalance:.3f})"
    )
    ours = simulate(plan, alias=True)
    apart = len(np.intersect1d(plan.topology.source, plan.assignment)) == 0
    engines = destination.world if apart else None
    theirs = gather_everything(model_bytes, source.world, model_bytes / destination.tp, plan.topology, engines)
    whole = size(model_bytes * (source.world - 1) / source.world)
    yield f"estimate    {ours.total * 1e3:.4g} ms a sync, {size(float(proof.received.mean()))} received by a GPU (simulated)"
    yield f"            gathering everything: {theirs.total * 1e3:.4g} ms, {whole} received by every training GPU (simulated)"
    yield ""
    columns = ("needs", "shared", "copied", "from node", "from far")
    yield f"{'engine rank':>11} {'GPU':>5} {'node':>5} " + " ".join(f"{name:>10}" for name in columns) + "  senders"
    pairs = plan.pair_bytes() if plan.topology.source.size * plan.topology.destination.size <= 1 << 20 else None
    for rank in range(min(ranks, destination.world)):
        local, near, far = (int(n) for n in plan.received[:, rank])
        shared, gpu = int(plan.aliased[rank]), int(plan.assignment[rank])
        senders = ""
        if pairs is not None:
            who = [int(s) for s in np.flatnonzero(pairs[:, rank]) if plan.topology.source[s] != gpu]
            senders = ", ".join(f"{s} ({size(int(pairs[s, rank]))})" for s in who[:6])
            senders += f" and {len(who) - 6} more" if len(who) > 6 else ""
        node = int(plan.topology.node(np.array([gpu]))[0])
        amounts = (local + near + far, shared, local - shared, near, far)
        yield f"{rank:>11} {gpu:>5} {node:>5} " + " ".join(f"{size(n):>10}" for n in amounts) + f"  {senders}"
    if destination.world > ranks:
        yield f"... and {destination.world - ranks} more ranks (--ranks)"

"""Ours against gather-everything, on the same processes in one run.

    python bench/reshard.py                                  # 4 processes, gloo, a made 60 MB model; and bytes for real model shapes
    python bench/reshard.py --transport auto --hidden 1024   # alias what can be shared

Gather-everything is what most frameworks do: every rank takes part in an all-gather of every tensor over the tensor-parallel ranks
and a broadcast from its pipeline stage, concatenates, fills buckets, and each engine rank copies its slice out of the full tensor.
Both sides start from the same training weights and must end with the same engine weights, which is checked. The bytes of real model
shapes (up to Llama-2-13B) are counted by both ways without tensors. Prints JSON lines; `ratio` is theirs over ours.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from shapes import SHAPES

from jackfield.components import WorkerContext
from jackfield.shard import Shard
from jackfield_reshard import transports
from jackfield_reshard.classes import between
from jackfield_reshard.families import Tensor, tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import Weights, drawn, materialise
from jackfield_reshard.plan import plan
from jackfield_reshard.sides import holding, stages
from jackfield_reshard.topology import Topology

BUCKET = 64 << 20


class Gather:
    """The common way, written as plainly as it is done: full tensors everywhere, through buckets, then slices."""

    def __init__(self, table: list[Tensor], train: Layout, source: list[Shard], engine: list[Shard], rank: int) -> None:
        self.held = {shard.name: shard for shard in source}
        self.engine: dict[str, list[Shard]] = {}
        for shard in engine:
            self.engine.setdefault(shard.name, []).append(shard)
        axes = train.axes()
        self.groups = [
            [dist.new_group([r for r in range(train.world) if axes["pp"][r] == p and axes["dp"][r] == d]) for p in range(train.pp)]
            for d in range(train.dp)
        ]
        self.mine = self.groups[int(axes["dp"][rank])][int(axes["pp"][rank])]
        depth = 1 + max(layer for t in table for layer in t.layers)
        self.names = [(t, t.name.format(layer), where[0]) for t in table for held, where in stages(t, train, depth) for layer in held]
        self.train, self.rank, self.stage = train, rank, int(axes["pp"][rank])
        self.bucket: list[tuple[str, torch.Tensor]] = []
        self.bytes_received = self.peak = 0

    def run(self) -> None:
        """One sync."""
        self.bytes_received = self.peak = 0
        for tensor, name, stage in self.names:
            full = torch.empty(tensor.shape, dtype=torch.float32)
            if self.stage == stage:
                full = self._gather(tensor, name, full)
            if self.train.pp > 1:
                root = self.train.rank(pp=stage, tp=0)
                dist.broadcast(full, root)
                self.bytes_received += 0 if self.stage == stage else full.numel() * 4
            self.bucket.append((name, full))
            if sum(t.numel() * 4 for _, t in self.bucket) >= BUCKET:
                self._flush()
        self._flush()

    def _gather(self, tensor: Tensor, name: str, full: torch.Tensor) -> torch.Tensor:
        shard = self.held[name]
        assert shard.tensor is not None
        if shard.full or self.train.tp == 1:
            return shard.tensor.detach().reshape(tensor.shape).clone()
        own = shard.tensor.detach().contiguous()
        parts = [torch.empty_like(own) for _ in range(self.train.tp)]
        dist.all_gather(parts, own, group=self.mine)
        self.bytes_received += (self.train.tp - 1) * own.numel() * 4
        along = next(d for d, (n, m) in enumerate(zip(shard.size, shard.shape, strict=True)) if n != m)
        return torch.cat(parts, dim=along).reshape(tensor.shape)

    def _flush(self) -> None:
        flat = torch.cat([t.reshape(-1) for _, t in self.bucket])
        self.peak = max(self.peak, 2 * flat.numel() * 4)
        at = 0
        for name, full in self.bucket:
            values = flat[at : at + full.numel()].view(full.shape)
            at += full.numel()
            for shard in self.engine.get(name, ()):
                assert shard.tensor is not None
                shard.tensor.copy_(values.view(shard.shape)[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.size, strict=True))])
        self.bucket = []


def seconds(work: Callable[[], Any], repeat: int) -> float:
    """Median time of the slowest rank."""
    times = []
    for _ in range(repeat):
        dist.barrier()
        begin = time.perf_counter()
        work()
        took = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(took, dist.ReduceOp.MAX)
        times.append(float(took))
    return statistics.median(times)


def total(value: float) -> int:
    """Sum over ranks."""
    amount = torch.tensor(value, dtype=torch.int64)
    dist.all_reduce(amount)
    return int(amount)


def process(rank: int, args: argparse.Namespace, store: str) -> None:
    """One rank: both ways on the same weights."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=args.processes)
    config = {
        "vocab_size": 8192,
        "hidden_size": args.hidden,
        "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": args.layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    }
    table = tensors(config)
    train, serve = Layout("megatron", tp=2, pp=args.processes // 2), Layout("vllm", tp=args.serve_tp, dp=args.processes // args.serve_tp)
    source = materialise(table, train, rank, drawn(0))
    ours, theirs = Weights(materialise(table, serve, rank, None), adopts=False), materialise(table, serve, rank, None)
    way = {"auto": transports.Auto, "p2p": transports.P2P}[args.transport]
    trainer = Weights(source, adopts=args.transport == "auto")
    link = way()
    link.connect(trainer, ours, WorkerContext("policy", torch.device("cpu"), 0, rank, args.processes))  # type: ignore[arg-type]
    begin = link._plan_seconds
    took = seconds(lambda: link.sync(0), args.repeat)
    report = link.sync(1)
    gather = Gather(table, train, trainer.shards(), theirs, rank)
    slow = seconds(gather.run, args.repeat)
    for mine, other in zip(ours.shards(), theirs, strict=True):
        assert mine.tensor is not None
        assert other.tensor is not None
        assert torch.equal(mine.tensor, other.tensor), mine.name
    model = sum(torch.Size(t.shape).numel() * len(t.layers) * 4 for t in table)
    sent, received = total(report.bytes_sent), total(gather.bytes_received)
    row = {
        "model_bytes": model,
        "from": str(train),
        "to": str(serve),
        "transport": args.transport,
        "seconds": took,
        "plan_seconds": begin,
        "bytes_sent": sent,
        "bytes_copied": total(report.bytes_copied),
        "bytes_aliased": total(report.bytes_aliased),
        "buffers_per_rank": link._wire.pool_bytes,
        "gather_seconds": slow,
        "gather_bytes": received,
        "gather_peak_per_rank": gather.peak,
        "ratio_seconds": slow / took,
        "ratio_bytes": received / max(sent, 1),
        "equal": True,
    }
    if rank == 0:
        print(json.dumps(row), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def shapes_only() -> None:
    """Bytes that each GPU receives, by both ways, at the shapes of real models; nothing is allocated."""
    for name in ("llama-2-7b", "llama-2-13b"):
        table = tensors(SHAPES[name])
        for tp, pp, serve in ((2, 2, 2), (4, 2, 4), (8, 1, 4), (8, 2, 8)):
            train, target = Layout("megatron", tp=tp, pp=pp), Layout("vllm", tp=serve, dp=tp * pp // serve)
            if any(t.cut in ("heads", "kv") and t.units % max(tp, serve) for t in table):
                continue
            made = plan(between(table, train, target), Topology.colocated(train.world), "overlap")
            model = sum(torch.Size(t.shape).numel() * len(t.layers) * 2 for t in table)
            held = sum(
                int(holding(t, train, where).volume.sum()) * len(layers) * 2
                for t in table
                for layers, where in stages(t, train, SHAPES[name]["num_hidden_layers"])
            )
            gathered = model - held / train.world
            ours = made.bytes_sent / train.world
            row = {"model": name, "from": str(train), "to": str(target), "gb_per_gpu": ours / 1e9, "gather_gb_per_gpu": gathered / 1e9}
            print(json.dumps(row | {"ratio_bytes": gathered / max(ours, 1), "at_bound": not made.prove().errors}), flush=True)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--serve-tp", type=int, default=2)
    parser.add_argument("--transport", choices=("p2p", "auto"), default="p2p")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--shapes-only", action="store_true")
    args = parser.parse_args()
    if not args.shapes_only:
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(process, (args, f"file://{folder}/store"), nprocs=args.processes)
    shapes_only()


if __name__ == "__main__":
    main()

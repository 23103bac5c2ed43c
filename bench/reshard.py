"""Ours against gather-everything (bench/gather.py), on the same processes in one run; and bytes at the shapes of real models.

    python bench/reshard.py                                              # 4 processes, gloo, a made 96 MB model
    python bench/reshard.py --transport auto --hidden 1024               # share what can be shared
    python bench/reshard.py --device cuda --shape llama-2-13b --processes 8 --train tp2,pp2,dp2 --serve tp4,dp2
    python bench/reshard.py --shapes-only                                # nothing is allocated

Both sides start from the same training weights and must end with the same engine weights, which is checked, as are the checksums of our
transfers. Five repetitions, the cold one dropped, slowest rank. Bytes by shapes come from tensors on the meta device, cut as each
layout cuts them, for the plan that real shards get; `placed` with engine ranks put on the GPUs that hold most of what they need. `ratio`
is theirs over ours.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any
from zlib import crc32

import ranks
import report
import torch
from gather import Gather
from ranks import Here
from shapes import RUNNABLE, SHAPES

from jackfield.components import WorkerContext
from jackfield.shard import Shard
from jackfield_reshard import transports
from jackfield_reshard.classes import of
from jackfield_reshard.families import Tensor, tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import Weights, materialise
from jackfield_reshard.plan import plan
from jackfield_reshard.topology import Topology

MEASURED = {"model_type": "llama", "vocab_size": 8192, "num_attention_heads": 8, "num_key_value_heads": 4, "num_hidden_layers": 4}


def fill(shards: list[Shard], seed: int = 0) -> None:
    """Numbers drawn on the device from name and place, so that ranks that hold the same box hold the same values."""
    for shard in shards:
        assert shard.tensor is not None
        generator = torch.Generator(shard.tensor.device).manual_seed(seed + crc32(f"{shard.name} {shard.offset} {shard.size}".encode()))
        shard.tensor.copy_(torch.randn(shard.size, generator=generator, device=shard.tensor.device))


def compare(here: Here, table: list[Tensor], train: Layout, serve: Layout, options: dict[str, Any]) -> dict[str, Any]:
    """One rank: our switch and gather-everything on the same weights. Seconds of each repetition, bytes, extra memory.

    `options`: transport, dtype, repetitions, bucket_bytes (ours), gather_bucket_bytes.
    """
    device, dtype = str(here.device), options["dtype"]
    source = materialise(table, train, here.rank, None, dtype, device)
    fill(source)
    ours = Weights(materialise(table, serve, here.rank, None, dtype, device), adopts=False)
    shares = options["transport"] == "auto"
    way = transports.Auto if shares else transports.P2P
    trainer = Weights(source, adopts=shares)
    buffers = _Extra(here)
    link = way(way.Config(bucket_bytes=options["bucket_bytes"], verify=True))
    link.connect(trainer, ours, WorkerContext("policy", here.device, 0, here.rank, here.world))  # type: ignore[arg-type]
    planned = link._plan_seconds
    link.sync(0)  # with checksums
    link.config = way.Config(bucket_bytes=options["bucket_bytes"])
    held, passing = buffers.kept(), _Extra(here)
    reports = []
    found: dict[str, Any] = {"seconds": here.timed(lambda: reports.append(link.sync(1)), options["repetitions"])}
    found |= {"extra": None if held is None else held + passing.peak(), "kept": passing.kept()}
    last = reports[-1]
    found |= {"plan_seconds": planned, "wire_seconds": [r.seconds["wire"] + r.seconds["copy"] for r in reports]}
    found |= {"sent": last.bytes_sent, "copied": last.bytes_copied, "aliased": last.bytes_aliased, "pool": link._wire.pool_bytes}
    proof = link.agreement.plan.prove()
    found |= {"bound": int(proof.bound.sum()), "received": int(proof.received[here.rank]), "errors": proof.errors}

    theirs = materialise(table, serve, here.rank, None, dtype, device)
    passing = _Extra(here)
    gather = Gather(table, train, trainer.shards(), theirs, here.rank, options["gather_bucket_bytes"])
    found["gather_seconds"] = here.timed(gather.run, options["repetitions"])
    found |= {"gather_received": gather.bytes_received, "gather_extra": passing.peak()}
    for mine, other in zip(ours.shards(), theirs, strict=True):
        assert mine.tensor is not None
        assert other.tensor is not None
        assert torch.equal(mine.tensor, other.tensor), f"{mine.name} {mine.offset} differs from what gathering gives"
    return found


class _Extra:
    """Device memory above what was there at the start."""

    def __init__(self, here: Here) -> None:
        self.cuda = here.device.type == "cuda"
        if self.cuda:
            here.wait()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()

    def peak(self) -> int | None:
        """Bytes at most, None on a CPU."""
        return torch.cuda.max_memory_allocated() - self.before if self.cuda else None

    def kept(self) -> int | None:
        """Bytes that are still there."""
        return torch.cuda.memory_allocated() - self.before if self.cuda else None


def row(name: str, train: Layout, serve: Layout, found: list[dict[str, Any]], link_rate: float | None = None) -> dict[str, Any]:
    """All ranks' results as one line. `link_rate`: measured bytes a second of a rank, for the share of it that the switch reaches."""
    seconds, gather = (report.spread(report.slowest([f[key] for f in found])) for key in ("seconds", "gather_seconds"))
    sent, received = sum(f["sent"] for f in found), max(f["received"] for f in found)
    line: dict[str, Any] = {"model": name, "ranks": len(found), "from": str(train), "to": str(serve), "seconds": seconds}
    line |= {"gather_seconds": gather, "ratio_seconds": gather.median / seconds.median}
    line |= {"sent_mb_per_rank": sent / len(found) / 1e6, "gather_mb_per_rank": max(f["gather_received"] for f in found) / 1e6}
    line["ratio_bytes"] = sum(f["gather_received"] for f in found) / max(sent, 1)
    line |= {"at_bound": sent == found[0]["bound"] and not found[0]["errors"], "checksums": "equal"}
    if link_rate:
        line["share_of_link"] = received / seconds.median / link_rate
    line |= {"copied_mb_per_rank": max(f["copied"] for f in found) / 1e6, "aliased_mb_per_rank": max(f["aliased"] for f in found) / 1e6}
    line |= {"pool_mb": max(f["pool"] for f in found) / 1e6, "plan_seconds": max(f["plan_seconds"] for f in found)}
    if found[0]["extra"] is not None:
        line |= {"extra_mb": max(f["extra"] for f in found) / 1e6, "gather_extra_mb": max(f["gather_extra"] for f in found) / 1e6}
        line["grown_mb"] = max(f["kept"] for f in found) / 1e6
    return line


def shapes_only() -> list[dict[str, Any]]:
    """Bytes that each GPU receives, both ways, at the shapes of real models: tensors on the meta device."""
    rows = []
    for name in ("llama-2-7b", "llama-2-13b"):
        table = tensors(SHAPES[name])
        model = sum(math.prod(t.shape) * len(t.layers) * 2 for t in table)
        for tp, pp, serve in ((2, 2, 2), (4, 2, 4), (8, 1, 4), (8, 2, 8)):
            train, target = Layout("megatron", tp=tp, pp=pp), Layout("vllm", tp=serve, dp=tp * pp // serve)
            have, need = ([materialise(table, side, r, None, "bfloat16", "meta") for r in range(side.world)] for side in (train, target))
            classes, topology = of(have, need)[0], Topology.colocated(train.world)
            made, placed = plan(classes, topology, "identity"), plan(classes, topology, "overlap")
            held = sum(s.tensor.nbytes for shards in have for s in shards if s.tensor is not None)
            gathered, ours = model - held / train.world, made.bytes_sent / train.world
            line = {"model": name, "from": str(train), "to": str(target), "gb_per_gpu": ours / 1e9, "gather_gb_per_gpu": gathered / 1e9}
            line |= {"ratio_bytes": gathered / max(ours, 1), "placed_gb_per_gpu": placed.bytes_sent / train.world / 1e9}
            rows.append(line | {"at_bound": not made.prove().errors and not placed.prove().errors})
    return rows


def layout(kind: str, text: str, **more: Any) -> Layout:
    """`tp2,pp2,dp2` as a layout."""
    return Layout(kind, **{part.rstrip("0123456789"): int(part.lstrip("abcdefghijklmnopqrstuvwxyz")) for part in text.split(",")}, **more)  # type: ignore[arg-type]


def main() -> None:
    """Parse, run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--shape", choices=RUNNABLE, help="default: a made model of --hidden and --layers")
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--train", default="tp2,pp2", help="the trainer's layout, Megatron's order (or fsdp4)")
    parser.add_argument("--serve", default="tp2,dp2", help="the engine's layout, vLLM's order")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on a CPU, bfloat16 on GPUs")
    parser.add_argument("--transport", choices=("p2p", "auto"), default="p2p")
    parser.add_argument("--bucket-bytes", type=int, default=256 << 20)
    parser.add_argument("--gather-bucket-bytes", type=int, help="default: 64 MB on a CPU, 512 MB on GPUs")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--shapes-only", action="store_true")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "reshard.json")
    args = parser.parse_args()
    args.dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    args.gather_bucket_bytes = args.gather_bucket_bytes or (64 if args.device == "cpu" else 512) << 20
    result: dict[str, Any] = {"settings": {k: str(v) for k, v in vars(args).items()}}
    if not args.shapes_only:
        ranks.devices(args.device, args.processes)
        made = MEASURED | {"hidden_size": args.hidden, "intermediate_size": 4 * args.hidden, "num_hidden_layers": args.layers}
        table = tensors(SHAPES[args.shape] if args.shape else made)
        train = Layout("fsdp", dp=int(args.train[4:])) if args.train.startswith("fsdp") else layout("megatron", args.train)
        serve = layout("vllm", args.serve)
        assert train.world == serve.world == args.processes, f"{train} and {serve} are not for {args.processes} ranks"
        found = ranks.run(args.processes, args.device, compare, table, train, serve, vars(args))
        result |= {"machine": report.machine(args.device), "measured": [row(args.shape or "made", train, serve, found)]}
        print(report.in_words(result["machine"]) + "\n" + report.table(result["measured"]) + "\n", flush=True)
    result["shapes"] = shapes_only()
    print("By shapes alone\n" + report.table(result["shapes"]))
    report.write(args.out, result)


if __name__ == "__main__":
    main()

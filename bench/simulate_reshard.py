"""SIMULATION of one weight sync from 8 to 4,096 GPUs: ours, gather-everything, and published figures beside them.

    python bench/simulate_reshard.py --nvlink 400 --network 50      # GB/s per GPU inside a node and between nodes

The model is `jackfield_reshard.simulate`: every GPU is as fast as its links allow, nothing else is in the way. Published figures were
measured on other hardware, with other models of the same size, and contain pauses and loading; they are context, not a comparison.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import report
from shapes import SHAPES

from jackfield_reshard.classes import between
from jackfield_reshard.families import tensors
from jackfield_reshard.layout import Layout
from jackfield_reshard.plan import plan
from jackfield_reshard.simulate import gather_everything, simulate
from jackfield_reshard.topology import Topology

PUBLISHED = {
    "llama-2-13b": "0.043 s",
    "qwen3-30b": "verl about 7 s (32 GPUs), NeMo-RL 0.48 to 1.0 s, slime 7 s",
    "qwen3-235b": "verl 246 to 266 s full, 11 to 15 s delta; NeMo-RL 4.6 to 4.9 s; vLLM 3.3 s (8 to 8 H100)",
    "deepseek-v3": "NeMo-RL 2.4 to 9.3 s; checkpoint-engine 1T fp8 16 s; Perplexity 1T 1.3 s (256 to 128 GPUs)",
}


def cases() -> list[tuple[str, Layout, Layout, bool]]:
    """(model, training layout, engine layout, separate GPUs)."""
    out: list[tuple[str, Layout, Layout, bool]] = []
    for gpus in (8, 64, 512, 4096):
        tp, pp = (8, 1) if gpus == 8 else (8, 8)
        out.append(("llama-70b", Layout("megatron", tp=tp, pp=pp, dp=gpus // (tp * pp)), Layout("vllm", tp=8, dp=gpus // 8), False))
    out.append(("llama-2-13b", Layout("megatron", tp=8), Layout("vllm", tp=4, dp=2), False))
    out.append(("qwen3-30b", Layout("megatron", tp=4, dp=4, ep=8), Layout("vllm", tp=4, dp=4, ep=4), True))
    out.append(("qwen3-235b", Layout("megatron", tp=4, pp=8, dp=4, ep=8), Layout("vllm", tp=4, dp=32, ep=8), False))
    out.append(("qwen3-235b", Layout("megatron", tp=4, pp=8, dp=4, ep=8), Layout("vllm", tp=4, dp=16, ep=8), True))
    for gpus in (256, 1024, 4096):
        train = Layout("megatron", tp=4, pp=16, dp=gpus // 64, ep=min(64, gpus // 16))
        out.append(("deepseek-v3", train, Layout("vllm", tp=8, dp=gpus // 8, ep=gpus if gpus <= 256 else 256), False))
    out.append(("deepseek-v3", Layout("megatron", tp=4, pp=16, dp=4, ep=16), Layout("vllm", tp=8, dp=16, ep=128), True))
    return out


def main() -> None:
    """Simulate all cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nvlink", type=float, default=400)
    parser.add_argument("--network", type=float, default=50)
    parser.add_argument("--memory", type=float, default=4100, help="GB/s of a GPU's memory, reads and writes together")
    parser.add_argument("--gpus-per-node", type=int, default=8)
    parser.add_argument("--place", choices=("identity", "overlap"), default="identity")
    parser.add_argument("--out", type=Path, default=report.RESULTS / "simulate_reshard.json")
    args = parser.parse_args()
    rates = {"nvlink": args.nvlink * 1e9, "network": args.network * 1e9, "memory": args.memory * 1e9, "gpus_per_node": args.gpus_per_node}
    rows = []
    for name, train, serve, apart in cases():
        topology = (Topology.separate if apart else Topology.colocated)(train.world, serve.world, **rates)
        table = tensors(SHAPES[name])
        made = plan(between(table, train, serve, fused_qkv=False), topology, args.place)
        proof = made.prove()
        model = sum(math.prod(t.shape) * len(t.layers) * 2 for t in table)
        needed = float(made.received.sum(axis=0).mean())
        ours, theirs = simulate(made, alias=True), gather_everything(model, train.world, needed, topology, serve.world if apart else None)
        row = {
            "model": name,
            "gpus": train.world + (serve.world if apart else 0),
            "from": str(train),
            "to": str(serve),
            "separate": apart,
            "model_gb": model / 1e9,
            "received_gb_per_gpu": float(proof.received.mean()) / 1e9,
            "seconds": ours.total,
            "node_seconds": ours.node,
            "network_seconds": ours.network,
            "gather_gb_per_gpu": model * (train.world - 1) / train.world / 1e9,
            "gather_seconds": theirs.total,
            "ratio": theirs.total / ours.total if ours.total else None,
            "imbalance": float(proof.imbalance),
            "at_bound": not proof.errors,
            "published_elsewhere": PUBLISHED.get(name),
        }
        rows.append(row)
    print(f"SIMULATION, nothing here is measured: {args.nvlink:.0f} GB/s inside a node, {args.network:.0f} GB/s a GPU between nodes")
    print(report.table(rows))
    report.write(args.out, {"simulation": True, "settings": {k: str(v) for k, v in vars(args).items()}, "rows": rows})


if __name__ == "__main__":
    main()

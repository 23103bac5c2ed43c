"""The switch from training to rollout on one device: aliased, and as a copy, at the shapes of a real model.

    PYTHONPATH=core:parallel python bench/switch.py                        # one GPU, Llama-2-13B, bf16 (needs 53 GB)
    PYTHONPATH=core:parallel python bench/switch.py --device cpu --model tiny
    PYTHONPATH=core:parallel python bench/switch.py --ipc --model llama-2-7b   # trainer and engine in two processes on one device

Prints JSON lines. `aliased`: the trainer trains in the engine's storage; a switch moves nothing. `copying`: trainer and engine have
their own copies; the compiled copies run as one CUDA graph, against a plain copy of as many bytes in one piece, measured in the same
run. `interleaved`: the same from a training layout that keeps query, key and value of each group together, as stock Megatron does.
Needs torch and pydantic, no network.
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
from shapes import RUNNABLE, SHAPES

from jackfield.components import WorkerContext
from jackfield_reshard.families import Tensor, tensors
from jackfield_reshard.ipc import Ipc
from jackfield_reshard.layout import Layout
from jackfield_reshard.materialise import Weights, materialise
from jackfield_reshard.transports import P2P, Alias, Resharding


def milliseconds(work: Callable[[], Any], device: torch.device, repeat: int) -> float:
    """Median wall time of the work, device included."""
    times = []
    for _ in range(repeat):
        if device.type == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def fill(weights: Weights) -> None:
    """Numbers that differ from tensor to tensor and row to row, made on the device."""
    for shard in weights.shards():
        assert shard.tensor is not None
        shard.tensor.normal_(0, 0.02)


def connected(transport: Resharding, trainer: Weights, engine: Weights, device: torch.device) -> Resharding:
    """The transport, planned, compiled and run once with checksums."""
    transport.connect(trainer, engine, WorkerContext("policy", device, 0))  # type: ignore[arg-type]
    transport.sync(0)
    return transport


def switch(table: list[Tensor], device: torch.device, dtype: str, repeat: int) -> None:
    """Measure all three."""
    plain, fused = Layout("torch"), Layout("vllm", vocabulary_multiple=64)
    engine = Weights(materialise(table, fused, 0, None, dtype, str(device)), adopts=False)
    trainer = Weights(materialise(table, plain, 0, None, dtype, str(device)))
    fill(trainer)
    total = sum(s.tensor.numel() * s.tensor.element_size() for s in engine.shards() if s.tensor is not None)

    trained = list(trainer.held)
    begin = time.perf_counter()
    link = connected(Alias(Alias.Config(verify=True)), trainer, engine, device)
    setup = time.perf_counter() - begin
    link.config = Alias.Config()
    report = link.sync(1)
    fill(trainer)
    row: dict[str, Any] = {"case": "aliased", "bytes": total, "tensors": len(trained), "bytes_aliased": report.bytes_aliased}
    row["switch_ms"] = milliseconds(lambda: link.sync(2), device, repeat)
    print(json.dumps(row | {"setup_s": round(setup, 2), "share_aliased": report.bytes_aliased / total}), flush=True)

    trainer.held = trained  # back to storage of its own
    fill(trainer)
    copying("copying", trainer, engine, total, device, repeat)
    trainer.held = trained = []
    stock = Weights(materialise(table, Layout("megatron", vocabulary_multiple=1), 0, None, dtype, str(device)), adopts=False)
    fill(stock)
    copying("interleaved", stock, engine, total, device, repeat)


def plain(total: int, device: torch.device, repeat: int) -> float:
    """Milliseconds that `total` bytes take at the rate of one large contiguous copy."""
    piece = min(total, 8 << 30) // 2
    source, target = torch.zeros(piece, dtype=torch.uint8, device=device), torch.zeros(piece, dtype=torch.uint8, device=device)
    return milliseconds(lambda: target.copy_(source), device, repeat) * total / piece


def copying(case: str, trainer: Weights, engine: Weights, total: int, device: torch.device, repeat: int) -> None:
    """The copying switch, its extra memory, and a plain copy of as many bytes."""
    cuda = device.type == "cuda"
    before = torch.cuda.memory_allocated() if cuda else 0
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    transport = P2P()
    transport.connect(trainer, engine, WorkerContext("policy", device, 0))  # type: ignore[arg-type]
    report = transport.sync(0)
    extra = torch.cuda.max_memory_allocated() - before if cuda else 0
    row: dict[str, Any] = {"case": case, "bytes": total, "bytes_copied": report.bytes_copied, "peak_extra_bytes": extra}
    row["bucket_bytes"] = transport.config.bucket_bytes
    row["switch_ms"] = milliseconds(lambda: transport.sync(1), device, repeat)
    row["copy_ms"] = milliseconds(transport._copies.run, device, repeat)
    row["plain_copy_ms"] = plain(total, device, repeat)
    row["ratio"] = row["switch_ms"] / row["plain_copy_ms"]
    row["gb_per_s_read_and_write"] = 2 * total / row["copy_ms"] / 1e6
    checked = P2P(P2P.Config(verify=True))
    connected(checked, trainer, engine, device)
    print(json.dumps(row | {"checksums": "equal"}), flush=True)


def between(args: argparse.Namespace) -> None:
    """Two processes on one device: the engine's process reads the trainer's memory."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_process, (args, f"file://{folder}/store"), nprocs=2)


def _process(rank: int, args: argparse.Namespace, store: str) -> None:
    device = torch.device(args.device)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    table = tensors(SHAPES[args.model])
    layout = Layout("vllm", vocabulary_multiple=64) if rank else Layout("torch")
    own = Weights(materialise(table, layout, 0, None, args.dtype, args.device))
    fill(own)
    link = Ipc(Ipc.Config(verify=True))
    link.connect(None if rank else own, own if rank else None, WorkerContext("policy", device, 0, rank, 2))  # type: ignore[arg-type]
    report = link.sync(0)
    link.config = Ipc.Config()
    took = milliseconds(lambda: link.sync(1), device, args.repeat)
    if rank:
        row = {"case": "ipc", "bytes": report.bytes_sent, "switch_ms": took, "plain_copy_ms": plain(report.bytes_sent, device, args.repeat)}
        print(json.dumps(row | {"ratio": row["switch_ms"] / row["plain_copy_ms"], "checksums": "equal"}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--model", choices=RUNNABLE, default="llama-2-13b")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--ipc", action="store_true", help="two processes that share the device: transport ipc")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.ipc:
        between(args)
        return
    if device.type == "cuda":
        print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "model": args.model}), flush=True)
    switch(tensors(SHAPES[args.model]), device, args.dtype, args.repeat)


if __name__ == "__main__":
    main()

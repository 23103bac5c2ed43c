"""What narrower sums of gradients cost backend `torch` in accuracy, and what they save: `reduce_dtype`, and PowerSGD for comparison.

    python bench/compression.py [--seeds 0 1] [--steps 120] [--ways float32 int8 ...] [--work FOLDER] [--out FILE]

examples/quickstart.yaml on two processes of this host. The run `float32` sums exactly and, at each optimizer step, sums the same gradients
in every other way too: the distance from the exact sum over its norm, and the bytes that a rank sends, counted from the collectives that it
calls (`wire`: for one large matrix, from what the loopback device has sent). The other runs train on what their way gives; their rewards
are the median over seeds (least, most), and the mean difference from `float32` with its standard error, seeds paired. PowerSGD (Vogels et
al. 2019) is PyTorch's, with error feedback and warm start.
Finished runs are kept under `--work`, where it is given, and not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import report
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from jackfield.config import OptimizerConfig
from jackfield.testing.ranks import run_ranks
from jackfield_torch.backend import TorchBackend, TorchConfig
from jackfield_torch.optimizer import MasterAdamW, ReplicatedAdamW

ROOT = Path(__file__).resolve().parent.parent
RANKS = (1, 4, 16)
"""Of PowerSGD's matrices."""
WAYS = ("float32", "bfloat16", "int8", *(f"powersgd-{rank}" for rank in RANKS))


class Sent:
    """Counts the bytes that this rank sends in collectives of the default group, on all its threads: PowerSGD's come from callbacks.

    An all-reduce is a reduce-scatter and an all-gather in a ring, as gloo and NCCL carry out large ones.
    """

    def __enter__(self) -> Sent:
        ranks, self.total = dist.get_world_size(), 0
        self.calls = dist.all_reduce, dist.all_to_all_single, dist.all_gather

        def all_reduce(tensor: Tensor, *args: Any, **options: Any) -> Any:
            self.total += 2 * tensor.nbytes * (ranks - 1) // ranks
            return self.calls[0](tensor, *args, **options)

        def all_to_all_single(output: Tensor, given: Tensor, *args: Any, **options: Any) -> Any:
            self.total += given.nbytes * (ranks - 1) // ranks
            return self.calls[1](output, given, *args, **options)

        def all_gather(output: list[Tensor], given: Tensor, *args: Any, **options: Any) -> Any:
            self.total += given.nbytes * (ranks - 1)
            return self.calls[2](output, given, *args, **options)

        dist.all_reduce, dist.all_to_all_single, dist.all_gather = all_reduce, all_to_all_single, all_gather
        return self

    def __exit__(self, *_: object) -> None:
        dist.all_reduce, dist.all_to_all_single, dist.all_gather = self.calls


class LowRank:
    """PyTorch's PowerSGD over lists of gradients, which stand for DDP's one bucket."""

    def __init__(self, rank: int) -> None:
        # the hook is made for DDP, whose buckets change in the first two steps: it wants to start later, and is told that it is later
        self.state = PowerSGDState(None, rank, start_powerSGD_iter=2, orthogonalization_epsilon=1e-8)
        self.state.iter = 2

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients by the approximation of their sums; collective."""
        self.flat = torch.cat([g.flatten() for g in gradients])
        self.shapes = [g.shape for g in gradients]
        self.flat = powerSGD_hook(self.state, self).wait() * dist.get_world_size()  # type: ignore[arg-type]
        for gradient, value in zip(gradients, self.gradients(), strict=True):
            gradient.copy_(value)

    def buffer(self) -> Tensor:
        """As of DDP's bucket, like the following."""
        return self.flat

    def gradients(self) -> list[Tensor]:
        """Views of the buffer."""
        parts = self.flat.split([shape.numel() for shape in self.shapes])
        return [part.view(shape) for part, shape in zip(parts, self.shapes, strict=True)]

    def index(self) -> int:
        """The only one."""
        return 0

    def is_last(self) -> bool:
        """The only one."""
        return True


class Compared(ReplicatedAdamW):
    """Sums exactly, and in every other way for comparison."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        super().__init__(parameters, masters, config, torch.float32)
        self.low_rank = {f"powersgd-{rank}": LowRank(rank) for rank in RANKS}
        self.found: dict[str, float] = {}

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """See ReplicatedAdamW."""
        given, results = [g.clone() for g in gradients], {}
        for way in reversed(WAYS):  # the exact one last
            for gradient, value in zip(gradients, given, strict=True):
                gradient.copy_(value)
            with Sent() as sent:
                if way in self.low_rank:
                    self.low_rank[way].reduce(gradients)
                else:
                    self.reduce_dtype = getattr(torch, way)
                    super().reduce(gradients)
            results[way] = torch.cat([g.flatten() for g in gradients])
            self.found[f"sent/{way}"] = sent.total
        exact = results["float32"]
        self.found |= {f"error/{way}": float((value - exact).norm() / exact.norm()) for way, value in results.items()}

    def step(self) -> dict[str, float]:
        """See ReplicatedAdamW; with what was found."""
        return super().step() | self.found


class Comparing(TorchBackend):
    """Backend `torch` with `Compared`."""

    def _optimizer(self, trainable: dict[str, nn.Parameter], masters: dict[str, Tensor], config: OptimizerConfig) -> MasterAdamW:
        return Compared(trainable, masters, config)


class PowerSGDConfig(TorchConfig):
    """Settings of `PowerSGD`."""

    rank: int
    """Of the approximation."""


class PowerSGD(TorchBackend):
    """Backend `torch` with PowerSGD, whose memory no checkpoint holds: for this comparison alone."""

    Config = PowerSGDConfig

    def _optimizer(self, trainable: dict[str, nn.Parameter], masters: dict[str, Tensor], config: OptimizerConfig) -> MasterAdamW:
        optimizer = ReplicatedAdamW(trainable, masters, config, torch.float32)
        optimizer.reduce = LowRank(self.config.rank).reduce  # type: ignore[method-assign]
        return optimizer


def means(runs: Sequence[Sequence[Mapping[str, float]]], steps: int) -> dict[str, list[float]]:
    """Mean reward of each run in each third of its steps."""
    third = -(-steps // 3)
    parts = {name: slice(k * third, (k + 1) * third) for k, name in enumerate(("first", "second", "last"))}
    return {name: [statistics.fmean(step["reward"] for step in run[part]) for run in runs] for name, part in parts.items()}


def wire(rank: int, way: str, values: int = 1 << 24) -> float:
    """Bytes a value that leave each of two ranks for one matrix, by the loopback device's counter, which counts other programs' too."""
    optimizer = ReplicatedAdamW({"w": nn.Parameter(torch.zeros(1))}, {}, OptimizerConfig(), getattr(torch, way))
    gradient = torch.randn(4096, values // 4096)
    dist.barrier()
    before = _sent_by_loopback()
    optimizer.reduce([gradient])
    dist.barrier()
    return (_sent_by_loopback() - before) / dist.get_world_size() / values


def _sent_by_loopback() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    return int(next(line for line in lines if line.strip().startswith("lo:")).split(":")[1].split()[8])


def finished(way: str, seed: int, steps: int, work: Path) -> list[dict[str, float]]:
    """The metrics of each step of a run, which is trained where it is not in `work`."""
    folder = work / f"{way}-{seed}-{steps}"
    done = folder.with_name(f"{folder.name}.json")
    if not done.exists():
        rows = train(way, seed, steps, folder)
        done.write_text(json.dumps(rows))
    found: list[dict[str, float]] = json.loads(done.read_text())
    return found


def train(way: str, seed: int, steps: int, folder: Path) -> list[dict[str, float]]:
    """The metrics of each step."""
    from jackfield import Trainer, load_config

    name, _, rank = way.partition("-")
    backend = {
        "float32": f"name: {__file__}:Comparing",
        "powersgd": f"name: {__file__}:PowerSGD, rank: {rank}",
    }.get(name, f"name: torch, reduce_dtype: {way}")
    settings = [f"dir={folder}", f"seed={seed}", f"steps={steps}", "trackers=[]", "checkpoint.resume=never"]
    settings += [f"policy.model.path={ROOT / 'examples' / 'tiny'}", "launcher={name: fork, workers: 2}", f"policy.backend={{{backend}}}"]
    Trainer(load_config(ROOT / "examples" / "quickstart.yaml", settings)).train()
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def main() -> None:
    """Train what is missing, then print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--work", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    wired = {way: run_ranks(2, wire, way)[0] for way in args.ways if not way.startswith("powersgd")}
    with tempfile.TemporaryDirectory() as temporary:
        work = args.work or Path(temporary)
        runs = {way: [finished(way, seed, args.steps, work) for seed in args.seeds] for way in args.ways}
    exact = [row for run in runs.get("float32", []) for row in run]
    rows: list[dict[str, Any]] = []
    for way in args.ways:
        errors = [row[f"error/{way}"] for row in exact]
        row: dict[str, Any] = {"way": way, "bytes a rank sends": int(exact[0][f"sent/{way}"]) if exact else None}
        row |= {"error, median": statistics.median(errors) if errors else None, "error, most": max(errors, default=None)}
        for name, parts in means(runs[way], args.steps).items():
            row[f"reward, {name} third"] = report.spread(parts, cold=0)
            if len(parts) > 1 and way != "float32" and "float32" in runs:
                less = [own - other for own, other in zip(parts, means(runs["float32"], args.steps)[name], strict=True)]
                row[f"{name}, less float32's"] = f"{statistics.fmean(less):+.3f} ± {statistics.stdev(less) / len(less) ** 0.5:.3f}"
        row["wire, bytes a value"] = wired.get(way)
        rows.append(row)
    print(report.in_words(report.machine()))
    print(report.table(rows))
    if args.out:
        report.write(args.out, {"machine": report.machine(), "rows": rows, "runs": runs})


if __name__ == "__main__":
    main()

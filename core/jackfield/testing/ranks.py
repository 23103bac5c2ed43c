"""Several ranks on one machine in seconds: the test process has imported everything once and forks them; they meet through a file."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def run_ranks(world: int, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
    """Call `function(rank, *args)` in `world` forked processes with a gloo default group; the (picklable) results by rank.

    The parent must not have run a backward pass on a GPU or started threads that hold locks. Raises RuntimeError with the traceback of
    the first rank that failed; the others are ended. TimeoutError names the ranks that did not finish.
    """
    with tempfile.TemporaryDirectory(prefix="jackfield-ranks-") as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        children = {}
        for rank in range(world):
            pid = os.fork()
            if pid == 0:
                _child(rank, world, Path(folder), function, args)
            children[pid] = rank
        failed: int | None = None
        deadline = time.monotonic() + timeout
        try:
            while children and failed is None and time.monotonic() < deadline:
                for pid in list(children):
                    done, status = os.waitpid(pid, os.WNOHANG)
                    if done:
                        rank = children.pop(pid)
                        failed = rank if status and failed is None else failed
                time.sleep(0.005)
        finally:
            late = sorted(children.values())
            for pid in children:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if failed is not None:
            file = Path(folder) / f"error-{failed}"
            raise RuntimeError(f"rank {failed} of {world} failed:\n{file.read_text() if file.exists() else 'it died without a traceback'}")
        if late:
            raise TimeoutError(f"ranks {late} of {world} did not finish within {timeout:.0f} s")
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


def join(rank: int, world: int, store: Path | str, device: str = "cpu") -> torch.device:
    """Make this process one of `world` that meet through the file `store`, by gloo, or by NCCL with a GPU each; returns its device.

    One thread. A default group that a backend of one rank made in the parent is forgotten, so that a forked child can join another.
    """
    import torch
    from torch.distributed import distributed_c10d as c10d

    torch.set_num_threads(1)
    if c10d.is_initialized():
        c10d._update_default_pg(None)
        c10d._world = c10d._World()
    own = torch.device(device) if device == "cpu" else torch.device(device, rank)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    c10d.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", init_method=f"file://{store}", rank=rank, world_size=world)
    return own


def _child(rank: int, world: int, folder: Path, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    status = 1
    try:
        import torch.distributed as dist

        join(rank, world, folder / "store")
        result = function(rank, *args)
        (folder / f"result-{rank}").write_bytes(pickle.dumps(result))
        dist.barrier()
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the parent must see it
        (folder / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

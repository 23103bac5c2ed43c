"""Runs a function on several processes: forked and joined by gloo on a CPU, spawned and joined by NCCL with one GPU each.

GPUs are joined as the launchers join them (`cpu:gloo,cuda:nccl`): tensors on the device go through NCCL, small objects on the host
through gloo. Each process takes its device before it joins, and a first collective connects NCCL on all ranks: a communicator made at
the first transfer would wait for ranks that have nothing to send. `device_id` would connect it too, but then torch splits that
communicator for every later group, also for groups of gloo, which leaves the ranks outside such a group waiting.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

SHELVES = [str(Path(__file__).resolve().parent.parent / shelf) for shelf in ("core", "parallel", "plugins", "algorithms", "bench")]
ENVIRONMENT = {
    # NVLink multicast: a program that misuses it can put the host's GPUs out of service
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
TRAINING = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
"""For training alone: without it, what just fits is lost to fragmentation; vLLM's memory pool and CUDA IPC do not go with it."""


sys.path[:0] = [shelf for shelf in SHELVES if shelf not in sys.path]  # a checkout need not be installed


class RanksFailed(RuntimeError):
    """A rank raised or died, or time ran out."""


@dataclass
class Here:
    """What a rank knows of itself."""

    rank: int
    world: int
    device: Any
    store: Any
    """Shared by all ranks, also where each has a process group of its own (`alone`)."""
    alone: bool = False
    gates: int = 0

    @property
    def group_rank(self) -> int:
        """Rank in the default process group."""
        return 0 if self.alone else self.rank

    @property
    def group_size(self) -> int:
        """Size of the default process group."""
        return 1 if self.alone else self.world

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)

    def gate(self) -> None:
        """Until the device is idle and every rank is here."""
        self.wait()
        self.gates += 1
        name = f"gate{self.gates}"
        self.store.add(name, 1)
        while self.store.add(name, 0) < self.world:
            time.sleep(0.0005)

    def timed(self, work: Callable[[], Any], repetitions: int) -> list[float]:
        """Wall seconds of each repetition on this rank; all ranks begin together."""
        times = []
        for _ in range(repetitions):
            self.gate()
            begin = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - begin)
        return times


def devices(kind: str, processes: int | None) -> int:
    """How many ranks there may be at most: the GPUs of this machine, or what was asked for on a CPU. Does not start CUDA here."""
    if kind == "cpu":
        return processes or len(os.sched_getaffinity(0))
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # counts GPUs without a CUDA context in this process
    import torch

    found = torch.cuda.device_count()
    if not found:
        sys.exit("no GPU here: say --device cpu")
    if processes and processes > found:
        sys.exit(f"--processes {processes}, but there are {found} GPUs")
    return processes or found


def run(
    world: int,
    device: str,
    function: Callable[..., Any],
    *args: Any,
    alone: bool = False,
    timeout: float = 600,
    environment: dict[str, str] | None = None,
) -> list[Any]:
    """`function(here, *args)` on every rank; the (picklable) results by rank. Raises RanksFailed with the first traceback.

    With `alone` every rank has a process group of its own: the same work at the same time, without communication.
    """
    settings = ENVIRONMENT | (environment or {})
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    with tempfile.TemporaryDirectory(prefix="jackfield-bench-") as folder:
        processes = [context.Process(target=_rank, args=(r, world, device, alone, folder, settings, function, args)) for r in range(world)]
        sys.stdout.flush()
        for process in processes:
            process.start()
        try:
            end = time.monotonic() + timeout
            while any(p.is_alive() for p in processes) and time.monotonic() < end and not any(p.exitcode for p in processes):
                time.sleep(0.02)
            time.sleep(0.5 if any(p.exitcode for p in processes) else 0)  # the rank that failed first is not always the first to end
            late = [rank for rank, p in enumerate(processes) if p.is_alive()]
        finally:
            for process in processes:
                process.kill()
                process.join()
        errors = sorted(Path(folder).glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
        if errors:
            raise RanksFailed(f"rank {errors[0].name[6:]} of {world}: {errors[0].read_text()}")
        if dead := [f"rank {rank} ended with {p.exitcode}" for rank, p in enumerate(processes) if p.exitcode and rank not in late]:
            raise RanksFailed(f"{', '.join(dead)} of {world}")
        if late:
            raise RanksFailed(f"ranks {late} of {world} did not finish within {timeout:.0f} s")
        return [pickle.loads((Path(folder) / f"result-{rank}").read_bytes()) for rank in range(world)]


def call(command: list[str], environment: dict[str, str], folder: Path | str, timeout: float) -> tuple[int | None, str]:
    """Run a command in a session of its own; its exit status (None: out of time, and all its processes are ended) and what it printed."""
    paths = os.pathsep.join([*SHELVES, os.environ.get("PYTHONPATH", "")])
    known = {"OMP_NUM_THREADS": "1"} | dict(os.environ) | ENVIRONMENT | {"PYTHONPATH": paths} | environment
    process = subprocess.Popen(
        command, env=known, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        said, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return None, process.communicate()[0]
    return process.returncode, said


def _rank(
    rank: int,
    world: int,
    device: str,
    alone: bool,
    folder: str,
    settings: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    status = 1
    try:
        os.environ.update(settings)  # read when CUDA and NCCL start, which is below
        import torch
        import torch.distributed as dist

        store = dist.FileStore(f"{folder}/{'gates' if alone else 'store'}", world)
        own: dict[str, Any] = {"store": dist.HashStore() if alone else dist.PrefixStore("group", store)}
        own |= {"rank": 0, "world_size": 1} if alone else {"rank": rank, "world_size": world}
        if device == "cuda":
            place = torch.device("cuda", rank)
            torch.cuda.set_device(place)
            dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(minutes=5), **own)
            dist.all_reduce(torch.zeros(1, device=place))
        else:
            place = torch.device("cpu")
            torch.set_num_threads(1)
            dist.init_process_group("gloo", timeout=timedelta(minutes=5), **own)
        here = Here(rank, world, place, dist.PrefixStore("gates", store), alone)
        result = function(here, *args)
        (Path(folder) / f"result-{rank}").write_bytes(pickle.dumps(result))
        here.gate()
        status = 0
    except BaseException:  # noqa: BLE001 - whatever it was, the parent must see it
        (Path(folder) / f"error-{rank}").write_text(traceback.format_exc())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # without destructors, which may wait for ranks that are gone

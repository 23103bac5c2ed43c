"""Checkpoints by `megatron.core.dist_checkpointing`, keyed by Hugging Face names and boxes: any layout reads any other's.

Each tensor is stored once, by the first rank that holds its box: `weight/NAME` (the float32 master where there is one),
`exp_avg/NAME` and `exp_avg_sq/NAME`, in HF shapes. So neither TP, PP, VPP, EP or DP sizes, nor the kind of optimizer, nor the padding of
the vocabulary is in the format. What Megatron's own optimizer state dicts get wrong with torch's AdamW (one `step` tensor shared by
all parameters after a load, so that it counts several times a step) does not arise: the step count is one number.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from jackfield.errors import CheckpointError
from jackfield_megatron.placement import Place

if TYPE_CHECKING:
    from jackfield_megatron.backend import MegatronBackend

MOMENTS = ("exp_avg", "exp_avg_sq")


def _write_here(transforms: Any, use_msc: bool, rank: int, buckets: Any, results: Any, **_: Any) -> None:
    """Stands for FileSystemWriterAsync.write_preloaded_data_multiproc: write in this process instead of forked ones.

    Megatron-Core 0.16 forks writers and spawns a manager process for their results (seconds, and a deadlock without psutil or a
    `__main__` guard); a thread does as well.
    """
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync

    written, mine, counter = {}, queue.Queue(), queue.Queue()  # type: ignore[var-annotated]
    for index, bucket in enumerate(buckets):
        counter.put(index)
        FileSystemWriterAsync.write_preloaded_data(transforms, index, bucket, mine, counter, True)
        number, outcome = mine.get()
        if isinstance(outcome, Exception):
            results.put(outcome)
            return
        written[number] = outcome
    results.put(written)


@contextmanager
def _in_process() -> Iterator[None]:
    from megatron.core.dist_checkpointing.strategies import filesystem_async as module

    writer = module.FileSystemWriterAsync
    saved = {n: writer.__dict__[n] for n in ("write_preloaded_data_multiproc",) if n in writer.__dict__}
    before = module._results_queue
    module._results_queue = queue.Queue()
    for name in saved:
        setattr(writer, name, staticmethod(_write_here))
    try:
        yield
    finally:
        module._results_queue = before
        for name, value in saved.items():
            setattr(writer, name, value)


def _replica(backend: MegatronBackend, place: Place) -> tuple[int, int, int]:
    """All zeros on the one rank that writes this box."""
    from megatron.core import parallel_state as ps

    if place.split.startswith("expert"):
        return 0, 0, ps.get_expert_data_parallel_rank()
    tied_copy = place.name == "model.embed_tokens.weight" and not any(m.pre_process for m in backend.modules)
    tp = ps.get_tensor_model_parallel_rank() if place.split == "whole" else 0
    return int(tied_copy), tp, ps.get_data_parallel_rank(with_context_parallel=True)


def _sharded(key: str, place: Place, tensor: Tensor, replica: tuple[int, int, int]) -> Any:
    from megatron.core.dist_checkpointing.mapping import ShardedTensor

    return ShardedTensor(
        key=key,
        data=tensor,
        dtype=tensor.dtype,
        local_shape=tuple(tensor.shape),
        global_shape=place.shape,
        global_offset=place.offset,
        axis_fragmentations=None,
        replica_id=replica,
    )


def save(backend: MegatronBackend, folder: Path, *, background: bool = False) -> Callable[[], None] | None:
    """Write a checkpoint. In the background: returns what finishes it (collective), after copying everything to host memory."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    updater = backend.updater
    adam_steps = 0 if updater is None else updater.states.adam_steps
    contents: dict[str, Any] = {"steps": 0 if updater is None else updater.steps, "adam_steps": adam_steps}
    with torch.no_grad():
        for place in backend.places:
            replica = _replica(backend, place)
            states = {"weight": place.parameter.data.float()} if updater is None else updater.states.gather(place.parameter, adam_steps)
            for kind, whole in states.items():
                if any(replica):
                    continue
                box = whole[place.rows].reshape(place.size).cpu()
                contents[f"{kind}/{place.name}/{place.offset}"] = _sharded(f"{kind}/{place.name}", place, box.clone(), replica)
    rank = backend.context.rank
    try:
        torch.save({"torch": torch.get_rng_state()}, folder / f"rng-{rank}.pt")
        with _in_process():
            request = dist_checkpointing.save(contents, str(folder), async_sharded_save=True, **_strategy("save"))
            if not background:
                request.execute_sync()
                return None
            return _in_background(request, folder)
    except (OSError, RuntimeError, CheckpointingException, CheckpointException) as error:
        raise CheckpointError(f"{folder}: cannot be written ({error}); is the disk full?") from error


def _strategy(action: str) -> dict[str, Any]:
    """Megatron-Core 0.19 would take another library for asynchronous saving."""
    import inspect

    from megatron.core import dist_checkpointing

    return {"async_strategy": "mcore"} if "async_strategy" in inspect.signature(getattr(dist_checkpointing, action)).parameters else {}


def _in_background(request: Any, folder: Path) -> Callable[[], None]:
    arguments = list(request.async_fn_args)
    if request.preload_fn is not None:
        arguments[1] = request.preload_fn()
    failure: list[BaseException] = []

    def write() -> None:
        try:
            if request.async_fn is not None:
                request.async_fn(*arguments, **request.async_fn_kwargs)
        except (OSError, RuntimeError) as error:
            failure.append(error)

    thread = threading.Thread(target=write, name="jackfield-checkpoint")
    thread.start()

    def finish() -> None:
        thread.join()
        if failure:
            raise CheckpointError(f"{folder}: cannot be written ({failure[0]}); is the disk full?") from failure[0]
        dist.barrier()
        for function in request.finalize_fns:
            function()

    return finish


@torch.no_grad()
def load(backend: MegatronBackend, folder: Path) -> None:
    """Read a checkpoint into the storage in use."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from torch.distributed.checkpoint.api import CheckpointException

    updater = backend.updater
    items = backend.places
    try:
        common = dist_checkpointing.load_common_state_dict(str(folder))
        kinds = ["weight", *(MOMENTS if updater is not None and common["adam_steps"] else ())]
        wanted = {
            f"{kind}/{p.name}/{p.offset}": _sharded(f"{kind}/{p.name}", p, torch.empty(p.size), (0, 0, backend.context.rank))
            for kind in kinds
            for p in items
        }
        loaded = dist_checkpointing.load(wanted, str(folder), validate_access_integrity=False)
    except (OSError, RuntimeError, KeyError, EOFError, CheckpointingException, CheckpointException) as error:
        reason = ([line for line in str(error).splitlines() if line.strip()] or [type(error).__name__])[-1].strip()
        raise CheckpointError(f"{folder}: cannot be read ({reason}); resume from another checkpoint, of the same model") from error
    whole: dict[int, tuple[Tensor, dict[str, Tensor]]] = {}
    for p in items:
        _, tensors = whole.setdefault(id(p.parameter), (p.parameter, {k: torch.zeros(p.parameter.shape) for k in kinds}))
        for kind in kinds:
            block = tensors[kind][p.rows]
            block.copy_(loaded[f"{kind}/{p.name}/{p.offset}"].reshape(block.shape))
    for parameter, tensors in whole.values():
        parameter.data.copy_(tensors["weight"])
    if updater is not None:
        updater.zero_grad()
        updater.steps = int(common["steps"])
        updater.states.restore(list(whole.values()), int(common["adam_steps"]))
    rng = folder / f"rng-{backend.context.rank}.pt"
    if rng.is_file():
        torch.set_rng_state(torch.load(rng, weights_only=True)["torch"])

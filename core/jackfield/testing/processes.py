"""A backend on one or several processes, driven from the test as the controller drives it."""

from __future__ import annotations

import multiprocessing
import pickle
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jackfield import microbatch, registry
from jackfield.batch import Batch
from jackfield.components import Backend, LossSums, OutputRequest, Outputs, Position, WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, OptimizerConfig
from jackfield.testing.ranks import join


@dataclass(frozen=True)
class SimpleLoss:
    """-(log-prob x advantage) of the trainable tokens, reduced by `loss_scale`; squared error to `returns` for a critic. Picklable."""

    request: OutputRequest = field(default_factory=OutputRequest)
    entropy_coef: float = 0.0

    def __call__(self, outputs: Outputs, micro_batch: Batch) -> tuple[Tensor, LossSums]:
        """See jackfield.components.Loss."""
        mask, scale = micro_batch.loss_mask, micro_batch.loss_scale
        assert scale is not None

        def clean(value: Tensor | None) -> Tensor:
            assert value is not None
            return torch.where(mask, value, 0)

        if outputs.values is not None:
            loss = (clean(outputs.values) - clean(micro_batch.returns)).square()
        else:
            loss = -clean(outputs.log_probs) * clean(micro_batch.advantages)
            if self.entropy_coef:
                loss = loss - self.entropy_coef * clean(outputs.entropy)
        total = (loss * scale).sum()
        return total, LossSums({"loss": total.detach(), "tokens": mask.sum()})


class Rank:
    """What one process does."""

    def __init__(self, rank: int = 0, world_size: int = 1, device: str = "cpu") -> None:
        self.rank, self.world_size, self.device = rank, world_size, torch.device(device)

    def build(self, component: str, options: dict[str, Any], model: ModelConfig, optimizer: OptimizerConfig | None, seed: int) -> Position:
        """A fresh backend; the last one is dropped."""
        self.backend = self.fresh(component, options)
        self.backend.setup(model, optimizer, WorkerContext("policy", self.device, seed, self.rank, self.world_size))
        return self.backend.position

    @staticmethod
    def fresh(component: str, options: dict[str, Any]) -> Backend:
        """A backend that is not set up."""
        backend: Backend = registry.build("backend", ComponentSpec(name=component, options=options))
        return backend

    def forward(self, micro_batches: Sequence[Batch], request: OutputRequest) -> list[Outputs]:
        """Outputs of this rank's micro-batches, on the CPU."""
        outputs = self.backend.forward([m.to(self.device) for m in micro_batches], request)
        return [Outputs(**{n: None if v is None else v.detach().cpu() for n, v in vars(o).items()}) for o in outputs]

    def accumulate(self, micro_batches: Sequence[Batch], loss: Any) -> LossSums:
        """One `forward_backward`."""
        sums = self.backend.forward_backward([m.to(self.device) for m in micro_batches], loss)
        return LossSums({n: v.detach().cpu() for n, v in sums.sums.items()}, {n: v.detach().cpu() for n, v in sums.maxima.items()})

    def call(self, method: str, *args: Any) -> Any:
        """Any other method of the backend; a Shard's tensor cannot travel, see `weights`."""
        return getattr(self.backend, method)(*args)

    def weights(self) -> list[tuple[str, tuple[int, ...], tuple[int, ...], Tensor]]:
        """Name, logical shape, offset and a copy of the box, for every shard."""
        out = []
        for shard in self.backend.shards():
            assert shard.tensor is not None, shard.name
            assert tuple(shard.tensor.shape) == shard.size, f"{shard.name}: tensor {list(shard.tensor.shape)} for a box {shard.size}"
            assert str(shard.tensor.dtype) == f"torch.{shard.dtype}", shard.name
            out.append((shard.name, shard.shape, shard.offset, shard.tensor.detach().cpu().clone()))
        return out


def _serve(rank: int, world_size: int, store: str, pipe: Any, device: str = "cpu") -> None:
    me = Rank(rank, world_size, str(join(rank, world_size, store, device)))
    while True:
        message = pickle.loads(pipe.recv_bytes())
        if message is None:
            break
        method, args = message
        try:
            result = (True, getattr(me, method)(*args))
        except Exception:  # noqa: BLE001 - sent to the test, which raises it
            result = (False, traceback.format_exc())
        pipe.send_bytes(pickle.dumps(result))
    torch.distributed.destroy_process_group()


class Ranks:
    """`world_size` processes joined by gloo (NCCL on `cuda`, one GPU each), or this process alone; close it when done."""

    def __init__(self, world_size: int = 1, device: str = "cpu") -> None:
        self.world_size = world_size
        self.local = Rank(device=device) if world_size == 1 else None
        if world_size > 1:
            # forked, so that a rank starts at once; a GPU does not survive a fork
            context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
            store = tempfile.mktemp(prefix="jackfield-ranks-")
            self.pipes, self.processes = [], []
            for rank in range(world_size):
                mine, theirs = context.Pipe()
                process = context.Process(target=_serve, args=(rank, world_size, store, theirs, device), daemon=True)
                process.start()
                self.pipes.append(mine)
                self.processes.append(process)

    def scatter(self, method: str, shares: Sequence[tuple[Any, ...]], timeout: float = 240) -> list[Any]:
        """Call a method of every Rank with its own arguments; results by rank. A rank's exception is raised here."""
        if self.local is not None:
            return [getattr(self.local, method)(*shares[0])]
        for pipe, args in zip(self.pipes, shares, strict=True):
            pipe.send_bytes(pickle.dumps((method, args)))
        results = []
        for rank, pipe in enumerate(self.pipes):
            if not pipe.poll(timeout):
                self.close()
                raise TimeoutError(f"rank {rank} of {self.world_size} did not answer {method} within {timeout} s")
            good, value = pickle.loads(pipe.recv_bytes())
            if not good:
                self.close()
                raise RuntimeError(f"rank {rank} of {self.world_size} in {method}:\n{value}")
            results.append(value)
        return results

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every Rank with the same arguments."""
        return self.scatter(method, [args] * self.world_size)

    def close(self) -> None:
        """End the processes; alone, the process group that a sharded backend made for itself, which later forks would inherit."""
        if self.local is not None and torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for process in [] if self.local is not None else self.processes:
            process.kill()
            process.join()


class Model:
    """A fresh backend on `ranks`, seen as one model."""

    def __init__(
        self, ranks: Ranks, component: str, options: dict[str, Any], model: ModelConfig, optimizer: OptimizerConfig | None, seed: int = 0
    ) -> None:
        self.ranks = ranks
        self.positions: list[Position] = ranks.call("build", component, options, model, optimizer, seed)

    def _shares(self, batch: Batch, micro: int | None) -> tuple[list[list[list[int]]], list[list[Batch]]]:
        """Sample indices by DP rank and micro-batch of at most `micro` samples, and each rank's micro-batches; equal counts (law 20)."""
        ranks = self.positions[0].dp_size
        own = [list(range(len(batch)))[rank::ranks] for rank in range(ranks)]
        micro = micro or max(1, len(own[0]))
        split = [[share[i : i + micro] for i in range(0, len(share), micro)] for share in own]
        count = max(len(s) for s in split)
        split = [s + [[]] * (count - len(s)) for s in split]
        taken = [[microbatch.take(batch, indices) for indices in share] for share in split]
        return split, [taken[p.dp_rank] for p in self.positions]

    def forward(self, batch: Batch, request: OutputRequest | None = None, micro: int | None = None) -> dict[str, Tensor]:
        """Outputs by name, float32 [B, T] each."""
        split, shares = self._shares(batch, micro)
        results = self.ranks.scatter("forward", [(share, request or OutputRequest()) for share in shares])
        whole: dict[str, Tensor] = {}
        for position, outputs in zip(self.positions, results, strict=True):
            if position.output:
                for indices, out in zip(split[position.dp_rank], outputs, strict=True):
                    for name, value in vars(out).items():
                        if value is not None and indices:
                            assert value.dtype == torch.float32
                            rows = torch.tensor(indices)
                            whole.setdefault(name, torch.zeros(batch.tokens.shape))[rows, : value.shape[1]] = value
        return whole

    def accumulate(self, batch: Batch, loss: Any = None, micro: int | None = None) -> dict[str, float]:
        """`forward_backward` over the whole batch; its sums over the DP ranks."""
        _, shares = self._shares(batch, micro)
        parts = self.ranks.scatter("accumulate", [(share, loss or SimpleLoss()) for share in shares])
        total = LossSums()
        for position, part in zip(self.positions, parts, strict=True):
            if position.output:
                total.add(part)
        return {name: float(value) for name, value in total.sums.items()}

    def step(self) -> dict[str, float]:
        """`optimizer_step`, which must report the same on every rank."""
        results: list[dict[str, float]] = self.ranks.call("call", "optimizer_step")
        assert all(r["grad_norm"] == results[0]["grad_norm"] for r in results)
        return results[0]

    def weights(self) -> dict[str, Tensor]:
        """Every weight whole, flat, by Hugging Face name, put together from the shards of all ranks."""
        whole: dict[str, Tensor] = {}
        written: dict[str, Tensor] = {}
        for boxes in self.ranks.call("weights"):
            for name, shape, offset, tensor in boxes:
                if name not in whole:
                    whole[name] = torch.empty(shape, dtype=tensor.dtype)
                    written[name] = torch.zeros(shape, dtype=torch.bool)
                box = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
                whole[name][box] = tensor
                written[name][box] = True
        missing = {name: int((~mask).sum()) for name, mask in written.items() if not mask.all()}
        assert not missing, f"elements in no shard: {missing}"
        return {name: tensor.flatten() for name, tensor in whole.items()}

    def save(self, folder: Path) -> Path:
        """Checkpoint into a new folder, which is returned."""
        folder.mkdir()
        self.ranks.call("call", "save", folder)
        return folder

    def load(self, folder: Path) -> None:
        """Restore a checkpoint."""
        self.ranks.call("call", "load", folder)

    def export(self, folder: Path) -> Path:
        """Export to a folder, which is returned."""
        self.ranks.call("call", "export", folder)
        return folder

"""Backend `fsdp`: FSDP2 (`fully_shard`) around any Hugging Face causal LM, one layer a unit."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from jackfield.batch import Batch
from jackfield.components import OutputRequest, Outputs, Position
from jackfield.config import OptimizerConfig
from jackfield.errors import CheckpointError, ConfigError
from jackfield.shard import Shard
from jackfield_reshard.adapters import Adapters
from jackfield_reshard.modules import weights, whole_shard
from jackfield_torch.backend import TorchBackend, TorchConfig, evaluating
from jackfield_torch.lora import Merged
from jackfield_torch.model import export_model
from jackfield_torch.optimizer import MasterAdamW
from jackfield_torch.scoring import Scorer
from jackfield_torch.tensor_parallel import Split, split


class FSDPConfig(TorchConfig):
    """Settings of backend `fsdp`. The sharded weights are float32; `dtype` is what layers compute in."""

    reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type in which gradients are summed over ranks; bfloat16 halves the traffic, with a relative error of about 2^-8."""
    tp: int = Field(default=1, gt=0)
    """Tensor parallel size, by the plan that the transformers model brings; the role's other ranks are data parallel."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward pass and gather them again for backward: less memory, more traffic."""
    cpu_offload: bool = False
    """Keep sharded weights, gradients and optimizer states on the host (GPUs only)."""


class _Root(nn.Module):
    """Scoring as one forward pass, so that FSDP's hooks see the head's weights in use and the tensors that gradients start from."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.model, self._scorer = scorer.model, scorer

    def forward(self, batch: Batch, mask: Tensor, request: OutputRequest, pack: bool | None) -> dict[str, Tensor]:
        """`Scorer.__call__`, its outputs as a dictionary."""
        return {n: v for n, v in vars(self._scorer(batch, mask, request, pack=pack)).items() if v is not None}


class ShardedAdamW(MasterAdamW):
    """The same optimizer on this rank's shards; only the gradient norm needs the other ranks."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, tensor: Split) -> None:
        self.sharded, self.tensor = dict(parameters), tensor
        local = {n: nn.Parameter(_local(p).detach()) for n, p in parameters.items()}  # a view: steps write into the shards
        super().__init__(local, {}, config)

    def gradients(self) -> list[Tensor]:
        """This rank's part of the accumulated gradients; collective where some are still to be summed over tensor-parallel ranks."""
        for name, parameter in self.sharded.items():
            gradient = None if parameter.grad is None else _local(parameter.grad)
            if gradient is not None and name in self.tensor.partial:
                self.tensor.sum(gradient)
            self.parameters[name].grad = gradient
        return super().gradients()

    def norm(self, gradients: list[Tensor]) -> float:
        """Global L2 norm over all ranks; collective. What every tensor-parallel rank holds whole counts once."""
        held = {n: p.grad for n, p in self.parameters.items() if p.grad is not None}
        shares = [g.float().square().sum() / (1 if n in self.tensor.dims else self.tensor.size) for n, g in held.items()]
        total = torch.stack(shares).sum() if shares else torch.zeros(())
        if dist.get_backend() != "gloo":
            total = total.cuda()
        dist.all_reduce(total)
        return float(total.sqrt())

    def zero_grad(self) -> None:
        """Drop the accumulated gradients."""
        super().zero_grad()
        for parameter in self.sharded.values():
            parameter.grad = None


class FSDPBackend(TorchBackend):
    """Data parallel with weights, gradients and optimizer states sharded over the role's ranks (ZeRO 3); any world size.

    One rank alone has nothing to shard: it is backend `torch` with this one's checkpoints, and makes no process group, except that
    `cpu_offload` needs FSDP to bring layers to the GPU.
    """

    Config = FSDPConfig
    tensor = Split()
    root: Any = None
    """The module that FSDP is wrapped around; None for one rank alone."""

    def _place(self, trained: bool) -> dict[str, Tensor]:
        context, config = self.context, self.config
        if config.cpu_offload and context.device.type == "cpu":
            raise ConfigError("backend fsdp: cpu_offload has nothing to do on a CPU; leave it out")
        if context.world_size % config.tp:
            rest = f"{context.world_size} % {config.tp} = {context.world_size % config.tp}"
            raise ConfigError(
                f"backend fsdp: tp is {config.tp}, which does not divide {context.role}'s {context.world_size} workers: {rest}"
            )
        if config.tp > 1 and config.lora is not None:
            raise ConfigError(f"backend fsdp: adapters are not split over tp (tp is {config.tp}); use tp: 1 with lora")
        if context.world_size == 1 and not config.cpu_offload:
            return super()._place(trained)
        if not dist.is_initialized():  # one rank with cpu_offload
            dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
            weakref.finalize(self, _leave, dist.group.WORLD)
        dtype = getattr(torch, config.dtype)
        for parameter in self.model.parameters():
            parameter.data = parameter.data.to(torch.float32 if trained else dtype)
        self.scorer = self._scorer()  # on the whole model, while there still is one
        mesh = init_device_mesh(context.device.type, (context.world_size // config.tp, config.tp), mesh_dim_names=("dp", "tp"))
        if config.tp > 1:
            self.tensor = split(self.model, mesh["tp"])
        options: dict[str, Any] = {
            "mesh": mesh["dp"],
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=dtype, reduce_dtype=getattr(torch, config.reduce_dtype), cast_forward_inputs=False
            ),
            "offload_policy": CPUOffloadPolicy() if config.cpu_offload else OffloadPolicy(),
        }
        for layer in self._layers():
            fully_shard(layer, reshard_after_forward=config.reshard_after_forward, **options)
        self.root = _Root(self.scorer)
        fully_shard(self.root, **options)
        self.model.to(context.device) if not config.cpu_offload else None
        return {}

    def _layers(self) -> list[nn.Module]:
        names = set(getattr(self.model, "_no_split_modules", None) or ())
        layers = [m for m in self.model.modules() if type(m).__name__ in names]
        if not layers:
            raise ConfigError(f"backend fsdp: {type(self.model).__name__} names no layers to shard (_no_split_modules); use backend torch")
        return layers

    def _optimizer(self, trainable: dict[str, nn.Parameter], masters: dict[str, Tensor], config: OptimizerConfig) -> MasterAdamW:
        return super()._optimizer(trainable, masters, config) if self.root is None else ShardedAdamW(trainable, config, self.tensor)

    @property
    def position(self) -> Position:
        """Every rank has its own share of the batch, the same for the ranks that share a layer."""
        tp = self.config.tp
        return Position(self.context.rank // tp, self.context.world_size // tp, self.context.rank % tp == 0)

    def _score(self, batch: Batch, mask: Tensor, request: OutputRequest) -> Outputs:
        if self.root is None:
            return super()._score(batch, mask, request)
        return Outputs(**self.root(batch, mask, request, self._pack))

    def _score_to_train(self, batch: Batch, request: OutputRequest) -> Outputs:
        """A filler runs as well: the other ranks wait for its collectives (law 21)."""
        return super()._score_to_train(batch, request) if self.root is None else self._score(batch, batch.loss_mask, request)

    def _backward(self, value: Tensor) -> None:
        """FSDP averages over its ranks; the loss has its denominators, so it is to be summed."""
        (value * self.position.dp_size).backward()

    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Batch], request: OutputRequest) -> list[Outputs]:
        """See Backend."""
        with evaluating(self.model):
            outputs = [self._score(batch, batch.response_mask, request) for batch in micro_batches]
        self._reshard()
        return outputs

    def _reshard(self) -> None:
        """Give up layers that are still gathered."""
        if self.root is not None:
            self.root.reshard()

    def shards(self) -> list[Shard]:
        """This rank's rows of each weight (of its columns, where tensor parallelism splits those), as views of the sharded storage.

        Buffers are whole on every rank.
        """
        self._reshard()
        return self._shards(self._parts())

    def _shards(self, parts: Iterable[tuple[str, Tensor, Tensor, bool]]) -> list[Shard]:
        out = []
        for name, tensor, local, buffer in parts:
            if not isinstance(tensor, DTensor):
                out.append(whole_shard(name, local, buffer))
            elif local.numel():
                shape, size = tuple(tensor.shape), tuple(local.shape)
                out.append(Shard(name, shape, self._offset(name, shape), size, str(local.dtype).removeprefix("torch."), local, buffer))
        return out

    def adapters(self) -> Adapters | None:
        """See TorchBackend."""
        self._reshard()
        return super().adapters()

    def _offset(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """Where this rank's box begins: tensor parallelism splits first, then FSDP cuts the rows of what is left."""
        offset, rows = [0] * len(shape), shape[0]
        if (dim := self.tensor.dims.get(name)) is not None:
            extent = shape[dim] // self.tensor.size
            offset[dim] = extent * self.tensor.rank
            rows = extent if dim == 0 else rows
        position = self.position
        offset[0] += min(-(-rows // position.dp_size) * position.dp_rank, rows)
        return tuple(offset)

    def _merged(self) -> Merged:
        return Merged(self.model, _local, lambda tensor: tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)

    def _parts(self) -> Iterator[tuple[str, Tensor, Tensor, bool]]:
        """(name, tensor, this rank's rows, is a buffer); merged with LoRA, which is collective."""
        if self.merged is not None:
            yield from self.merged.weights()
        else:
            yield from ((name, tensor, _local(tensor).detach(), buffer) for name, tensor, buffer in weights(self.model))

    def adopt(self, shards: Sequence[Shard]) -> bool:
        """FSDP owns its storage; an engine may adopt from it instead."""
        return self.root is None and super().adopt(shards)

    def _state(self) -> dict[str, Any]:
        """Sharded tensors by name, for torch.distributed.checkpoint: it reads them back on any number of ranks."""
        self._reshard()
        adam = self.optimizer
        trained: Mapping[str, Any] = {} if adam is None else adam.sharded if isinstance(adam, ShardedAdamW) else adam.masters
        kept = ((n, t) for n, t, _ in weights(self.model) if self.merged is None or t.requires_grad)
        state: dict[str, Any] = {f"weight/{n}": trained.get(n, t).detach() for n, t in kept}
        moments = {} if adam is None else adam.state()
        for name, parameter in trained.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                local = moments.get(f"{kind}/{name}", torch.zeros_like(_local(parameter.detach())))
                state[f"{kind}/{name}"] = _like(parameter, local)
        return state

    @contextmanager
    def _checkpointing(self) -> Iterator[dict[str, Any]]:
        """Arguments for torch.distributed.checkpoint, which warns of what is meant where one rank is alone."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
            yield {"no_dist": self.root is None}

    def save(self, folder: Path) -> None:
        """A torch.distributed checkpoint; collective. Raises CheckpointError."""
        adam = self.optimizer
        stepped = {} if adam is None else {n: float(v) for n, v in adam.state().items() if n.startswith("step/")}
        own = {"steps": 0 if adam is None else adam.steps, "stepped": stepped, "rng": torch.get_rng_state()}
        if self.context.device.type == "cuda":
            own["cuda_rng"] = torch.cuda.get_rng_state(self.context.device)
        try:
            with self._checkpointing() as how:
                dcp.save(self._state(), checkpoint_id=folder, **how)
            torch.save(own, folder / f"state-{self.context.rank}.pt")
        except (OSError, RuntimeError, dcp.api.CheckpointException) as error:
            raise CheckpointError(f"{folder}: cannot be written ({str(error).splitlines()[0]}); is the disk full?") from error

    def load(self, folder: Path) -> None:
        """Collective. Random numbers continue only on as many ranks as wrote the checkpoint."""
        state = self._state()
        try:
            with self._checkpointing() as how:
                dcp.load(state, checkpoint_id=folder, **how)
            mine = folder / f"state-{self.context.rank}.pt"
            own = torch.load(mine if mine.exists() else folder / "state-0.pt", weights_only=True)
        except (OSError, RuntimeError, EOFError, dcp.api.CheckpointException) as error:
            raise CheckpointError(f"{folder}: cannot be read ({str(error).splitlines()[0]}); resume from another checkpoint") from error
        if self.optimizer is not None:
            self.optimizer.write_back()
            moments = {n: torch.tensor(v) for n, v in own["stepped"].items()}
            names = {n.partition("/")[2] for n in moments}
            for key, value in state.items():
                kind, _, name = key.partition("/")
                if kind != "weight" and name in names:
                    moments[key] = _local(value)
            self.optimizer.zero_grad()
            self.optimizer.load_state(moments, own["steps"])
        torch.set_rng_state(own["rng"])
        if "cuda_rng" in own and self.context.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda_rng"], self.context.device)

    def export(self, folder: Path) -> None:
        """See Backend; tensors are gathered one at a time, and rank 0 writes them."""
        self._reshard()
        whole = {}
        for name, tensor, part, _ in self._parts():
            full = _like(tensor, part).full_tensor() if isinstance(tensor, DTensor) else part
            if self.context.rank == 0:
                whole[name] = full.to("cpu", getattr(torch, self.config.dtype) if full.is_floating_point() else full.dtype)
        if self.context.rank == 0:
            export_model(self.model, self.model_config, folder, whole)
        if self.context.world_size > 1:
            dist.barrier()


def _leave(group: Any) -> None:
    """End the group of a backend that made one for itself."""
    if dist.is_initialized() and dist.group.WORLD is group:
        dist.destroy_process_group()


def _local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: Any, local: Tensor) -> Any:
    if not isinstance(parameter, DTensor):
        return local
    return DTensor.from_local(
        local, parameter.device_mesh, parameter.placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )

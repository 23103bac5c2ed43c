"""The one-process reference (log-probs, loss, gradients, three AdamW steps), and what the ranks return to compare with it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jackfield.batch import Batch
from jackfield.components import LossSums, OutputRequest, Outputs, WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig

# Adam divides a gradient by its own size: an element whose gradient is rounding noise moves by the whole rate, in a random direction. With
# an eps above that noise equal gradients give equal weights, and unequal ones still show.
OPTIMIZER = OptimizerConfig(lr=1e-3, weight_decay=0.1, max_grad_norm=0.5, eps=1e-4)
REQUEST = OutputRequest(entropy=True, temperature=0.8)


def import_everything() -> None:
    """What the forked ranks would otherwise each import."""
    from jackfield_megatron import shim

    with shim.scope():
        import jackfield_megatron.model
        import jackfield_megatron.update  # noqa: F401


class PolicyLoss:
    """A policy-gradient loss with an entropy bonus; reads nothing behind the mask."""

    request = REQUEST

    def __call__(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, LossSums]:
        mask = batch.loss_mask
        log_probs, entropy = torch.where(mask, outputs.log_probs, 0), torch.where(mask, outputs.entropy, 0)
        old, advantages = torch.where(mask, batch.old_log_probs, 0), torch.where(mask, batch.advantages, 0)
        ratio = (log_probs - old).tanh().exp()  # smooth: a clip would make rounding visible
        loss = ((-advantages * ratio - 0.1 * entropy) * batch.loss_scale).sum()
        return loss, LossSums({"loss": loss.detach(), "tokens": mask.sum()}, {"ratio": torch.where(mask, ratio, 0).detach().amax()})


class ValueLoss:
    """Half the squared error of a critic."""

    request = OutputRequest(log_probs=False)

    def __call__(self, outputs: Outputs, batch: Batch) -> tuple[Tensor, LossSums]:
        error = torch.where(batch.loss_mask, outputs.values - torch.where(batch.loss_mask, batch.returns, 0), 0)
        loss = 0.5 * (error.square() * batch.loss_scale).sum()
        return loss, LossSums({"loss": loss.detach(), "tokens": batch.loss_mask.sum()})


@dataclass
class Result:
    """What is compared."""

    log_probs: Tensor
    entropy: Tensor
    loss: float
    grads: dict[str, Tensor]
    norms: list[float]
    params: dict[str, Tensor]


def reference(folder: Path, batch: Batch, steps: int = 3) -> Result:
    """The one-process `torch` backend, the whole batch at once."""
    from jackfield_torch.backend import TorchBackend

    backend = TorchBackend(TorchBackend.Config(packing="off"))
    backend.setup(ModelConfig(path=str(folder)), OPTIMIZER, WorkerContext("policy", torch.device("cpu"), 0))
    outputs = backend.forward([batch], REQUEST)[0]
    grads: dict[str, Tensor] = {}
    norms = []
    loss = 0.0
    for step in range(steps):
        sums = backend.forward_backward([batch], PolicyLoss())
        if step == 0:
            loss = float(sums.sums["loss"])
            grads = {n: p.grad.clone() for n, p in backend.model.named_parameters()}
        norms.append(backend.optimizer_step()["grad_norm"])
    params = {s.name: s.tensor.detach().clone() for s in backend.shards()}
    return Result(outputs.log_probs, outputs.entropy, loss, grads, norms, params)


def share(batch: Batch, dp_rank: int, dp_size: int, micro_batches: int) -> list[Batch]:
    """The rank's samples in micro-batches of unequal shapes, as the controller would cut them."""
    mine = batch[torch.arange(dp_rank, len(batch), dp_size)]
    return [mine[i].trim() for i in torch.arange(len(mine)).tensor_split(micro_batches)]


def build(folder: Path, rank: int, world: int, options: dict[str, Any], *, head: str = "lm", optimizer: Any = OPTIMIZER) -> Any:
    """The backend on this rank."""
    from jackfield_megatron.backend import MegatronBackend

    backend = MegatronBackend(MegatronBackend.Config(**options))
    backend.setup(ModelConfig(path=str(folder), head=head), optimizer, WorkerContext("policy", torch.device("cpu"), 0, rank, world))
    return backend


def boxes(backend: Any, tensors: Any = None) -> list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], Tensor]]:
    """This rank's weights (or other tensors by parameter) as plain boxes that can be pickled."""
    out = []
    for place, shard in zip(backend.places, backend.shards(), strict=True):
        value = shard.tensor if tensors is None else tensors[place.parameter].view(place.parameter.shape)[place.rows].reshape(shard.size)
        out.append((shard.name, shard.shape, shard.offset, shard.size, value.detach().clone()))
    return out


def assemble(ranks: list[Any]) -> dict[str, Tensor]:
    """Whole tensors from all ranks' boxes; every element must be there, and replicas must agree bit for bit."""
    whole: dict[str, Tensor] = {}
    for listed in ranks:
        for name, shape, offset, size, value in listed:
            target = whole.setdefault(name, torch.full(shape, torch.nan, dtype=value.dtype))
            view = target[tuple(slice(o, o + s) for o, s in zip(offset, size, strict=True))]
            assert view.isnan().all() or torch.equal(view, value), f"replicas of {name} differ by {(view - value).abs().max()}"
            view.copy_(value)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{name} has elements that no rank holds"
    return whole


def train(rank: int, world: int, folder: Path, batch: Batch, options: dict[str, Any], micro_batches: int, steps: int) -> dict[str, Any]:
    """What one rank does: score, accumulate, read gradients, and take optimizer steps."""
    backend = build(folder, rank, world, options)
    position = backend.position
    mine = share(batch, position.dp_rank, position.dp_size, micro_batches)
    outputs = backend.forward(mine, REQUEST)
    result: dict[str, Any] = {"position": position}
    if position.output:
        indices = torch.arange(position.dp_rank, len(batch), position.dp_size)
        width = batch.tokens.shape[1]
        pads = [(o, width - o.log_probs.shape[1]) for o in outputs]
        result["log_probs"] = torch.cat([torch.nn.functional.pad(o.log_probs, (0, n)) for o, n in pads])
        result["entropy"] = torch.cat([torch.nn.functional.pad(o.entropy, (0, n)) for o, n in pads])
        result["indices"] = indices
    norms = []
    for step in range(steps):
        sums = backend.forward_backward(mine, PolicyLoss())
        if step == 0:
            result["loss"] = float(sums.sums["loss"]) if position.output else 0.0
            result["ratio"] = float(sums.maxima["ratio"]) if position.output else 0.0
        norms.append(backend.optimizer_step()["grad_norm"])
    result["norms"] = norms
    result["params"] = boxes(backend)
    return result


def gradients(rank: int, world: int, folder: Path, batch: Batch, options: dict[str, Any], micro_batches: int) -> Any:
    """Every gradient, through the canonical names."""
    backend = build(folder, rank, world, options)
    mine = share(batch, backend.position.dp_rank, backend.position.dp_size, micro_batches)
    backend.forward_backward(mine, PolicyLoss())
    return boxes(backend, backend.gradients())

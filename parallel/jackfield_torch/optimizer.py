"""AdamW over float32 masters, with the warm-up, schedule and clipping of OptimizerConfig."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jackfield.config import OptimizerConfig
from jackfield.schedule import at
from jackfield_torch import quantised
from jackfield_torch.rounding import dither, on_grid


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """The rate of optimizer step `step`, counted from 0: the schedule, times (step + 1) / warmup until that reaches 1."""
    return at(config.lr, step) * min(1.0, (step + 1) / max(config.warmup, 1))


_LAYER = re.compile(r".*?\.layers\.\d+\.")


class MasterAdamW:
    """Keeps float32 masters of parameters of another type, and gathers their gradients in float32 as they arrive.

    Where parameters are float32 they are their own masters and nothing is copied. State is kept by parameter name.
    """

    updated: Callable[[Sequence[str]], None] | None = None
    """Told the names of parameters, layer by layer, as soon as a step has given them their new values."""

    def __init__(self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        """`masters`: float32 values by name for the parameters that are not float32."""
        self.config = config
        self.parameters = dict(parameters)
        self.masters: dict[str, Tensor] = {n: masters.get(n, p) for n, p in self.parameters.items()}
        self.narrow = [n for n, p in self.parameters.items() if self.masters[n] is not p]
        contiguous = [n for n in self.narrow if self.parameters[n].dtype == torch.bfloat16 and self.masters[n].is_contiguous()]
        self.dithered = {n for n in contiguous if on_grid(self.masters[n])}
        """Parameters that come from a bfloat16 checkpoint; others are spread between the grid's points anyway, and round to the nearest."""
        for name in self.narrow:
            self.parameters[name].register_post_accumulate_grad_hook(self._collect(self.masters[name]))
        matrices = [m for m in self.masters.values() if m.dim() > 1]
        vectors = [m for m in self.masters.values() if m.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.adam = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=config.betas, eps=config.eps, fused=True)
        self.steps = 0

    @staticmethod
    def _collect(master: Tensor) -> Any:
        """A hook that moves a narrow gradient into the master's as soon as it is there, so that only one is held at a time."""

        def hook(parameter: nn.Parameter) -> None:
            assert parameter.grad is not None
            if master.grad is None:
                master.grad = parameter.grad.float()
            else:
                master.grad.add_(parameter.grad)
            parameter.grad = None

        return hook

    def gradients(self) -> list[Tensor]:
        """The accumulated gradients."""
        return [m.grad for m in self.masters.values() if m.grad is not None]

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """Clip, step, write the masters back. A gradient that is not finite is dropped and counted instead (`bad_gradients`)."""
        rate = learning_rate(self.config, self.steps)
        gradients = self.gradients()
        norm = self.norm(gradients)
        metrics = {"grad_norm": norm, "learning_rate": rate, "bad_gradients": float(not math.isfinite(norm))}
        if gradients and math.isfinite(norm):
            if norm > self.config.max_grad_norm:
                torch._foreach_mul_(gradients, self.config.max_grad_norm / (norm + 1e-6))
            for group in self.adam.param_groups:
                group["lr"] = rate
            if self.updated is None:
                self.adam.step()
                self.write_back()
            else:
                self._step_by_layer(self.updated)
        self.steps += 1
        self.zero_grad()
        return metrics

    def write_back(self, names: Sequence[str] | None = None) -> None:
        """Round masters into the narrow parameters: those of the names, or all."""
        names = self.narrow if names is None else names
        for name in names:
            if name in self.dithered:
                dither(self.masters[name], self.parameters[name].data)
        nearest = [n for n in names if n not in self.dithered]
        if nearest:
            torch._foreach_copy_([self.parameters[n].data for n in nearest], [self.masters[n] for n in nearest])

    def _step_by_layer(self, updated: Callable[[Sequence[str]], None]) -> None:
        """The same step, one layer after the other, telling `updated` of each as soon as its weights are final."""
        layers: dict[str, list[str]] = {}
        for name in self.parameters:
            match = _LAYER.match(name)
            layers.setdefault(match[0] if match else "", []).append(name)
        whole, narrow = self.adam.param_groups, set(self.narrow)
        try:
            for names in layers.values():
                own = {id(self.masters[n]) for n in names}
                self.adam.param_groups = [g | {"params": [p for p in g["params"] if id(p) in own]} for g in whole]
                self.adam.step()
                self.write_back([n for n in names if n in narrow])
                updated(names)
        finally:
            self.adam.param_groups = whole

    def norm(self, gradients: list[Tensor]) -> float:
        """Global L2 norm."""
        return float(nn.utils.get_total_norm(gradients, foreach=True)) if gradients else 0.0

    def zero_grad(self) -> None:
        """Drop the accumulated gradients."""
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def move(self, device: torch.device) -> int:
        """Move moments and separate masters to `device`; returns the bytes that moved."""
        moved = 0
        for name, master in self.masters.items():
            state = self.adam.state.get(master, {})
            for key, value in state.items():
                if value.dim() and value.device != device:
                    state[key] = value.to(device)
                    moved += value.nbytes
            if name in self.narrow and master.device != device:
                master.data = master.data.to(device)
                moved += master.nbytes
        return moved

    def state(self) -> dict[str, Tensor]:
        """Moments by `exp_avg/NAME` and `exp_avg_sq/NAME`, and `step/NAME`; nothing for a parameter never stepped."""
        found = {}
        for name, master in self.masters.items():
            for key, value in self.adam.state.get(master, {}).items():
                found[f"{key}/{name}"] = value
        return found

    def load_state(self, state: Mapping[str, Tensor], steps: int) -> None:
        """Restore `state`."""
        self.steps = steps
        self.adam.state.clear()
        for key, value in state.items():
            kind, _, name = key.partition("/")
            master = self.masters[name]
            # clone: views of a file must not be written to
            self.adam.state[master][kind] = value.clone() if kind == "step" else value.to(master.device, copy=True)


class ReplicatedAdamW(MasterAdamW):
    """The same optimizer on every rank of the default group: gradients are summed over the ranks first, so that replicas stay equal."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], masters: Mapping[str, Tensor], config: OptimizerConfig, reduce_dtype: torch.dtype
    ) -> None:
        """`reduce_dtype`: the type in which gradients travel and are added; of int8 see `quantised`, vectors then go in float32."""
        super().__init__(parameters, masters, config)
        self.reduce_dtype = reduce_dtype

    @torch.no_grad()
    def step(self) -> dict[str, float]:
        """See MasterAdamW; collective. A weight that has a gradient on no rank has none here either, and stays as it is."""
        masters = list(self.masters.values())
        found = torch.tensor([m.grad is not None for m in masters], dtype=torch.int32, device=masters[0].device)
        dist.all_reduce(found)
        for master, ranks in zip(masters, found.tolist(), strict=True):
            if ranks and master.grad is None:
                master.grad = torch.zeros_like(master)
        self.reduce(self.gradients())
        return super().step()

    def reduce(self, gradients: Sequence[Tensor]) -> None:
        """Replace the ranks' gradients by their sums, the same on every rank; collective."""
        if self.reduce_dtype == torch.int8:
            quantised.all_reduce([g for g in gradients if g.dim() > 1], seed=self.steps)
            gradients, dtype = [g for g in gradients if g.dim() <= 1], torch.float32
        else:
            dtype = self.reduce_dtype
        waiting = []
        for gradient in gradients:
            sent = gradient.to(dtype)  # itself, where that is float32
            waiting.append((gradient, sent, dist.all_reduce(sent, async_op=True)))
        for gradient, total, work in waiting:
            work.wait()
            if total is not gradient:
                gradient.copy_(total)

"""One view of the optimizer's float32 weights and moments, whether Megatron keeps them whole or split over data parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor


class States:
    """Access by model parameter. `parts` are Megatron's optimizers, each around a torch (or fused) AdamW."""

    def __init__(self, parts: Sequence[Any], *, distributed: bool) -> None:
        self.parts, self.distributed = parts, distributed

    def _local(self, parameter: Tensor) -> tuple[Any, Tensor, slice] | None:
        """The AdamW, the float32 tensor that it updates, and which elements of the flattened parameter those are; None if none are here."""
        for part in self.parts:
            if self.distributed:
                if parameter in part.model_param_group_index_map:
                    group, order = part.model_param_group_index_map[parameter]
                    where = part._get_model_param_range_map(parameter)["param"]
                    return part.optimizer, part.optimizer.param_groups[group]["params"][order], slice(where.start, where.end)
            else:
                main = getattr(parameter, "main_param", None)
                main = parameter if main is None else main
                if any(p is main for group in part.optimizer.param_groups for p in group["params"]):
                    return part.optimizer, main, slice(0, main.numel())
        return None

    @property
    def adam_steps(self) -> int:
        """Updates made so far; the same for all parameters."""
        counts = {int(g["step"]) for part in self.parts for g in part.optimizer.param_groups if "step" in g}
        counts |= {int(s["step"]) for part in self.parts for s in part.optimizer.state.values() if "step" in s}
        count = torch.tensor(max(counts, default=0), device=torch.cuda.current_device())
        dist.all_reduce(count, op=dist.ReduceOp.MAX)
        return int(count)

    def gather(self, parameter: Tensor, steps: int) -> dict[str, Tensor]:
        """`weight`, and after the first update (`steps` > 0) `exp_avg`, `exp_avg_sq`: float32 in the parameter's shape; collective."""
        local = self._local(parameter)
        result = {}
        for kind in ("weight", *(("exp_avg", "exp_avg_sq") if steps else ())):
            whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
            if local is not None:
                adam, main, where = local
                value = main if kind == "weight" else adam.state.get(main, {}).get(kind)
                if value is not None:
                    whole[where] = value.detach().flatten().float().to(whole.device)
            if self.distributed:
                dense = getattr(parameter, "allreduce", True)
                group = (
                    parallel_state.get_data_parallel_group(with_context_parallel=True)
                    if dense
                    else parallel_state.get_expert_data_parallel_group()
                )
                dist.all_reduce(whole, group=group)
            result[kind] = whole.view(parameter.shape)
        return result

    def set_weight(self, parameter: Tensor, whole: Tensor) -> None:
        """Write the float32 weight."""
        local = self._local(parameter)
        if local is not None:
            _, main, where = local
            main.data.copy_(whole.flatten()[where].view(main.shape))

    def restore(self, items: Sequence[tuple[Tensor, dict[str, Tensor]]], steps: int) -> None:
        """Write weights and moments (whole, by parameter); every parameter gets a step count of its own."""
        for part in self.parts:
            part.optimizer.state.clear()
            for group in part.optimizer.param_groups:
                if "step" in group:
                    group["step"] = steps
        for parameter, tensors in items:
            self.set_weight(parameter, tensors["weight"])
            local = self._local(parameter)
            if local is None or not steps:
                continue
            adam, main, where = local
            group = next(g for g in adam.param_groups if any(p is main for p in g["params"]))
            state = {k: tensors[k].flatten()[where].view(main.shape).to(main.device) for k in ("exp_avg", "exp_avg_sq")}
            if "step" not in group:
                device = main.device if group.get("fused") or group.get("capturable") else "cpu"
                state["step"] = torch.tensor(float(steps), device=device)
            adam.state[main] = state

    def move(self, device: torch.device, model: Sequence[Tensor]) -> int:
        """Moments, and float32 weights that do not lie in the `model`'s own storage, to `device`; returns the bytes that moved."""
        own = {p.untyped_storage().data_ptr() for p in model}
        moved = 0
        for part in self.parts:
            for group in part.optimizer.param_groups:
                for main in group["params"]:
                    if main.device != device and main.untyped_storage().data_ptr() not in own:
                        moved += main.nbytes
                        main.data = main.data.to(device)
            for state in part.optimizer.state.values():
                for key, value in state.items():
                    if torch.is_tensor(value) and value.dim() and value.device != device:
                        state[key] = value.to(device)
                        moved += value.nbytes
        return moved

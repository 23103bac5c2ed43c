"""Gradients and optimizer steps with Megatron's DistributedDataParallel and optimizers, divisions undone.

Gradients are sums over micro-batches, DP and CP ranks (the loss holds its denominators). `forward_backward` may be called any number
of times before a step: without overlap the gradient is reduced once, in the step; with overlap each call reduces, and afterwards
the sum is left on one rank only, so that the next reduction takes it along exactly once (law 6).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from torch import Tensor

from jackfield import schedule
from jackfield.config import OptimizerConfig
from jackfield_megatron.config import Layout, MegatronConfig
from jackfield_megatron.states import States


class Updater:
    """The trained model's chunks, wrapped for data parallelism, and their optimizer."""

    def __init__(
        self, modules: Sequence[Any], options: MegatronConfig, layout: Layout, optimizer: OptimizerConfig, device: torch.device
    ) -> None:
        self.settings, self.layout, self.steps = optimizer, layout, 0
        self.overlap = options.overlap_grad_reduce
        self._reduced = self._sums_present = False
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=options.grad_reduce_dtype == "float32",
            overlap_grad_reduce=options.overlap_grad_reduce,
            overlap_param_gather=options.overlap_param_gather,
            use_distributed_optimizer=layout.distributed_optimizer,
        )
        self.config = modules[0].config
        self.chunks = [
            DistributedDataParallel(config=self.config, ddp_config=ddp, module=m, disable_bucketing=i > 0) for i, m in enumerate(modules)
        ]
        if self.overlap:
            syncs: list[Any] = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = syncs if len(syncs) > 1 else syncs[0]
        bf16 = options.dtype == "bfloat16"
        settings = MegatronOptimizerConfig(
            optimizer="adam",
            lr=1.0,
            weight_decay=optimizer.weight_decay,
            adam_beta1=optimizer.betas[0],
            adam_beta2=optimizer.betas[1],
            adam_eps=optimizer.eps,
            bf16=bf16,
            params_dtype=torch.bfloat16 if bf16 else torch.float32,
            use_distributed_optimizer=layout.distributed_optimizer,
            overlap_param_gather=options.overlap_param_gather,
            clip_grad=0.0,
        )
        self.optimizer: Any = get_megatron_optimizer(settings, self.chunks, _weight_decay_rules(settings), use_gloo_process_groups=False)
        self.states = States(self.parts, distributed=layout.distributed_optimizer)
        self._fuse(device)
        self._set_rate()
        self.zero_grad()

    @property
    def parts(self) -> list[Any]:
        """Megatron's optimizers one by one (dense and expert parameters have their own)."""
        return [o for o in getattr(self.optimizer, "chained_optimizers", [self.optimizer]) if getattr(o, "optimizer", None) is not None]

    def _fuse(self, device: torch.device) -> None:
        """torch's AdamW in one kernel on CUDA, where no fused optimizer took its place."""
        for part in self.parts:
            if device.type == "cuda" and type(part.optimizer) is torch.optim.AdamW:
                for group in part.optimizer.param_groups:
                    group["fused"], group["foreach"] = True, False

    def _set_rate(self) -> float:
        """Learning rate and decay of the coming step in every group; Megatron itself applies `wd_mult` only in its own scheduler."""
        rate = learning_rate(self.settings, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("lr_mult", 1.0)
            group["weight_decay"] = self.settings.weight_decay * group.get("wd_mult", 1.0)
        return rate

    def begin(self) -> None:
        """Before a backward pass: what an earlier, already reduced one left stays, on one rank only."""
        if not (self.overlap and self._reduced):
            return
        for chunk in self.chunks:
            chunk.finish_grad_sync()
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                for bucket in group.buckets:
                    _keep_on_one_rank(bucket.grad_data, group, self.layout.distributed_optimizer)
                group.reset()
            for parameter in chunk.params_with_grad:
                parameter.grad_added_to_main_grad = False
        self._reduced = False

    def accumulated(self) -> None:
        """After a backward pass."""
        self._reduced, self._sums_present = self.overlap, True

    def step(self) -> dict[str, float]:
        """Reduce, clip, step. A gradient that is 0 everywhere or not finite changes nothing (law 16); `bad_gradients` counts the latter."""
        rate = self._set_rate()
        if not self._sums_present:
            self.begin_empty()
        finalize_model_grads(self.chunks, None)
        self._reduced = False
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if norm > 0 and math.isfinite(norm):
            if norm > self.settings.max_grad_norm:
                for part in self.parts:
                    parameters = part.get_parameters()
                    if parameters:
                        clip_grad_by_total_norm_fp32(parameters, self.settings.max_grad_norm, norm)
            self.optimizer.step_with_ready_grads()
        self.steps += 1
        self.zero_grad()
        return {"grad_norm": norm, "learning_rate": rate, "bad_gradients": float(not math.isfinite(norm))}

    def begin_empty(self) -> None:
        """A step without any backward pass: with overlap the reductions were never started; start them on the zeros."""
        if self.overlap:
            for chunk in self.chunks:
                chunk.start_grad_sync()

    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        if self._reduced:
            for chunk in self.chunks:
                chunk.finish_grad_sync()
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._reduced = self._sums_present = False

    def gather_parameters(self) -> None:
        """Finish a gather of updated weights that overlaps with compute, before anybody reads them."""
        for chunk in self.chunks:
            if chunk.use_forward_hook:
                for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                    if not group.param_gather_dispatched:
                        group.start_param_sync(force_sync=False)
                    if group.param_gather_handle is not None:
                        group.param_gather_handle.wait()
                        group.param_gather_handle = None

    def _buffers(self) -> list[Any]:
        return [b for chunk in self.chunks for b in chunk.buffers + chunk.expert_parallel_buffers]

    def offload(self) -> int:
        """Free what generation does not need, between a step and the next backward pass; returns the bytes freed."""
        freed = 0
        if not self._sums_present:
            for buffer in self._buffers():
                storage = buffer.grad_data.untyped_storage()
                freed += storage.nbytes()
                storage.resize_(0)
        return freed + self.states.move(torch.device("cpu"), [p for chunk in self.chunks for p in chunk.module.parameters()])

    def onload(self, device: torch.device) -> None:
        """Undo `offload`."""
        for buffer in self._buffers():
            if buffer.grad_data.untyped_storage().nbytes() == 0:
                buffer.grad_data.untyped_storage().resize_(buffer.grad_data.numel() * buffer.grad_data.element_size())
                buffer.grad_data.zero_()
        self.states.move(device, [p for chunk in self.chunks for p in chunk.module.parameters()])

    def gradients(self) -> dict[Tensor, Tensor]:
        """Accumulated gradient by parameter, whole and reduced on every rank; only `zero_grad` may follow."""
        finalize_model_grads(self.chunks, None, force_all_reduce=True)
        self._reduced = False
        return {p: p.main_grad for chunk in self.chunks for p in chunk.params_with_grad}


def learning_rate(settings: OptimizerConfig, step: int) -> float:
    """Rate of optimizer step `step`, counted from 0: the schedule, times (step + 1) / warmup until that reaches 1."""
    return schedule.at(settings.lr, step) * min(1.0, (step + 1) / max(settings.warmup, 1))


def _weight_decay_rules(settings: MegatronOptimizerConfig) -> Any:
    """Megatron's standard rules: vectors and biases are not decayed. 0.16 applies them only where they are passed."""
    from megatron.core.optimizer import get_standard_config_overrides

    return get_standard_config_overrides(settings)


def _keep_on_one_rank(grad: Tensor, group: Any, distributed: bool) -> None:
    if distributed:
        size, rank = group.intra_distributed_optimizer_instance_size, group.intra_distributed_optimizer_instance_rank
        part = grad.numel() // size
        grad[: rank * part].zero_()
        grad[(rank + 1) * part :].zero_()
    elif group.data_parallel_group.rank() != 0:
        grad.zero_()

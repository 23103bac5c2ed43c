"""The backend `megatron`: Megatron-Core behind jackfield's training interface."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from jackfield.batch import Batch
from jackfield.components import Backend, Loss, LossSums, OutputRequest, Outputs, Position, WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig
from jackfield.errors import ConfigError
from jackfield.shard import Shard
from jackfield_megatron import families, fused, placement, shim, weights
from jackfield_megatron.config import MegatronConfig, resolve
from jackfield_megatron.groups import Groups
from jackfield_megatron.inputs import Inputs, Rope, prepare
from jackfield_reshard.modules import Unmoved, held
from jackfield_workers.memory import within_memory

logger = logging.getLogger(__name__)
F = TypeVar("F", bound=Callable[..., Any])


def _in_layout(method: F) -> F:
    """Run a method with this role's process groups (and, without CUDA, the shim) in place."""

    @wraps(method)
    def run(self: MegatronBackend, *args: Any, **kwargs: Any) -> Any:
        with self.groups.installed():
            return method(self, *args, **kwargs)

    return cast(F, run)


class MegatronBackend(Backend):
    """Trains Llama, Qwen2/2.5, Qwen3, Mixtral and Qwen3-MoE models with tensor, pipeline, sequence, context and expert parallelism."""

    Config = MegatronConfig
    config: MegatronConfig

    def setup(self, model: ModelConfig, optimizer: OptimizerConfig | None, context: WorkerContext) -> None:
        """Build this rank's part of the model, load its weights, wrap it for training. Raises ConfigError, DataError."""
        try:
            shim.import_megatron()
        except ImportError as error:
            raise ConfigError(f"backend megatron needs megatron-core: {error}; pip install 'jackfield[megatron]'") from error
        from transformers import AutoConfig

        self.context, self.model_config = context, model
        self.device = context.device
        self.folder = weights.model_folder(model.path)
        self.hf_config = AutoConfig.from_pretrained(self.folder)
        self.shape = families.read_shape(self.hf_config)
        self.layout = resolve(self.config, context.world_size, self.shape)
        self.fused = fused.report(self.config.fused)
        self.groups = Groups(self.layout, self.device)
        self._pending_save: Any = None
        self._build(optimizer)

    @_in_layout
    def _build(self, optimizer: OptimizerConfig | None) -> None:
        from megatron.core import parallel_state

        from jackfield_megatron.model import Model, rotary, transformer_config

        if self.context.rank == 0:
            logger.info("megatron: dp %d, %s; %s", self.layout.dp, self.layout, self.fused)
        config = transformer_config(self.shape, self.config, self.layout, self.device)
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        stages = self.layout.stages(self.shape.layers)
        padded = -(-self.shape.vocab // self.layout.tp) * self.layout.tp
        self.modules: list[Any] = []
        self.first_layers: list[int] = []
        for chunk in range(self.layout.vpp):
            stage = chunk * self.layout.pp + pp_rank
            first = sum(stages[:stage])
            module = Model(
                config,
                self.shape,
                self.config,
                range(first, first + stages[stage]),
                head=self.model_config.head,
                padded_vocab=padded,
                pre_process=stage == 0,
                post_process=stage == len(stages) - 1,
                vp_stage=chunk if self.layout.vpp > 1 else None,
            ).to(self.device)
            self.modules.append(module)
            self.first_layers.append(first)
        self.rope = Rope(*rotary(self.hf_config, self.device), getattr(torch, self.config.dtype))
        self._mark_parallel()
        self._load_weights()
        self._parts = [part for module in self.modules for part in module.modules()]
        self._unmoved = Unmoved(lambda: placement.shards(self.places))
        self.updater: Any = None
        if optimizer is None:
            for module in self.modules:
                module.requires_grad_(False)
            self.chunks = self.modules
        else:
            from jackfield_megatron.update import Updater

            self.updater = Updater(self.modules, self.config, self.layout, optimizer, self.device)
            self.chunks = self.updater.chunks
            if self.config.dtype != "float32" and self._source is not None:
                # what the weights lose in their type the masters keep (law 27)
                for parameter, value in weights.float32(self.places, self._source, optional=(families.VALUE_HEAD,)):
                    self.updater.states.set_weight(parameter, value)
        self._source = None
        self._position = Position(
            dp_rank=parallel_state.get_data_parallel_rank(),
            dp_size=self.layout.dp,
            output=pp_rank == self.layout.pp - 1
            and parallel_state.get_tensor_model_parallel_rank() == 0
            and parallel_state.get_context_parallel_rank() == 0,
        )

    @property
    def position(self) -> Position:
        """DP rank; outputs come from TP rank 0 and CP rank 0 of the last pipeline stage."""
        return self._position

    # ---- weights ----------------------------------------------------------------------------------------------------
    @property
    def places(self) -> list[placement.Place]:
        """Where HF tensors lie in this rank's parameters."""
        from megatron.core import parallel_state

        with self.groups.installed():
            ranks = placement.Ranks(
                parallel_state.get_tensor_model_parallel_rank(),
                self.layout.tp,
                parallel_state.get_expert_model_parallel_rank(),
                self.layout.ep,
                parallel_state.get_expert_tensor_parallel_rank(),
                self.layout.etp,
            )
        named = [
            (name, parameter, first)
            for module, first in zip(self.modules, self.first_layers, strict=True)
            for name, parameter in module.named_parameters()
        ]
        return list(placement.places(named, self.shape, ranks, head=self.model_config.head))

    def _mark_parallel(self) -> None:
        """Tell Megatron which parameters are split over TP: it marks them only when it initialises them itself."""
        for place in self.places:
            attributes = {"tensor_model_parallel": place.split != "whole", "partition_dim": int(place.split.endswith("columns"))}
            for name, value in (attributes | {"partition_stride": 1}).items():
                setattr(place.parameter, name, value)
            if place.split.startswith("expert"):
                # Megatron takes experts for replicated like dense weights where ep is 1, which is wrong for tp > 1 and etp 1.
                place.parameter.allreduce = False  # type: ignore[attr-defined]

    @torch.no_grad()
    def _load_weights(self) -> None:
        for module in self.modules:
            for parameter in module.parameters():
                parameter.data[...] = parameter.data if self.config.draw_on_device else 0
        self._source: Any = None
        if self.model_config.init == "pretrained":
            self._source = weights.Folder(self.folder)
        elif not self.config.draw_on_device:
            self._source = weights.random_weights(self.hf_config, self.context.seed)
        if self._source is not None:
            weights.load(self.places, self._source, optional=(families.VALUE_HEAD,))

    @_in_layout
    def shards(self) -> list[Shard]:
        """This rank's parameters as boxes of HF tensors; Q, K, V, gate and up are row blocks of Megatron's fused parameters."""
        if self.updater is not None:
            self.updater.gather_parameters()
        return self._unmoved(held(self._parts))

    @_in_layout
    def adopt(self, shards: Sequence[Shard]) -> bool:
        """Move the parameters into the given storage; impossible with the distributed optimizer, whose weights lie in one buffer."""
        if self.updater is not None and self.layout.distributed_optimizer:
            return False
        items = self.places
        given = {(s.name, s.offset, s.size): s.tensor for s in shards}
        blocks: dict[int, tuple[Tensor, list[Tensor]]] = {}
        for place in items:
            tensor = given.get((place.name, place.offset, place.size))
            if tensor is None or tensor.dtype != place.parameter.dtype or tensor.device != place.parameter.device:
                return False
            blocks.setdefault(id(place.parameter), (place.parameter, []))[1].append(tensor)
        fusedstorage = []
        for parameter, tensors in blocks.values():
            block = placement.fuse([t.reshape(-1, *parameter.shape[1:]) if t.is_contiguous() else t for t in tensors])
            if block is None or block.shape != parameter.shape:
                return False
            fusedstorage.append((parameter, block))
        for parameter, block in fusedstorage:
            block.copy_(parameter.data)
            parameter.data = block
        return True

    def export(self, folder: Path) -> None:
        """Write the weights as a Hugging Face folder, from rank 0; collective."""
        self.finish_save()
        self.shards()
        items = self.places
        if self.context.rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
        weights.export(items, folder, rank=self.context.rank, world=self.context.world_size, device=self.device)
        if self.context.rank == 0:
            self.hf_config.dtype = getattr(torch, self.config.dtype)
            self.hf_config.save_pretrained(folder)
            for file in self.folder.iterdir():
                if (
                    file.suffix in (".json", ".jinja", ".model", ".txt")
                    and not (folder / file.name).exists()
                    and "safetensors" not in file.name
                ):
                    shutil.copyfile(file, folder / file.name)

    # ---- passes -----------------------------------------------------------------------------------------------------
    def _packed(self) -> bool:
        if self.config.packing is None:
            return self.device.type == "cuda" and self.config.dtype == "bfloat16" and self.layout.cp == 1
        return self.config.packing

    def _inputs(self, batch: Batch, mask: Tensor) -> Inputs:
        from megatron.core import parallel_state

        return prepare(
            batch,
            mask,
            self.rope,
            packed=self._packed(),
            sequence_split=self.layout.tp if self.layout.sequence_parallel else 1,
            cp_size=self.layout.cp,
            cp_rank=parallel_state.get_context_parallel_rank(),
        )

    def _outputs(self, inputs: Inputs, results: tuple[Tensor, ...], request: OutputRequest) -> Outputs:
        from megatron.core import parallel_state

        from jackfield_megatron.collectives import sum_replicated

        group = parallel_state.get_context_parallel_group()
        spread = [sum_replicated(inputs.spread(r), group) for r in results]
        if self.model_config.head == "value":
            return Outputs(values=spread[0])
        return Outputs(spread[0], spread[1] if request.entropy else None, spread[2] if request.sum_pi_squared else None)

    def _run(self, items: list[Inputs], request: OutputRequest, finish: Callable[..., Any], *, forward_only: bool) -> list[Any]:
        """One pass of Megatron's schedule; what `finish(inputs, results)` gave for each micro-batch, on the last stage."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def step(iterator: Any, chunk: Any, *_: Any) -> tuple[Any, Any]:
            inputs: Inputs = next(iterator)
            out = chunk(inputs.tokens, inputs.geometry, inputs.wanted, inputs.labels, request)
            return out, partial(finish, inputs)

        iterators: list[Any] = [iter(items) for _ in self.chunks]
        results: list[Any] = get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iterators if len(iterators) > 1 else iterators[0],
            model=self.chunks if len(self.chunks) > 1 else self.chunks[0],
            num_microbatches=len(items),
            seq_length=items[0].tokens.shape[1] * self.layout.cp,
            micro_batch_size=items[0].tokens.shape[0],
            forward_only=forward_only,
        )
        return results

    def _filled(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """The interleaved schedule wants a multiple of pp micro-batches: add copies of a short one that count nothing."""
        items = list(micro_batches)
        while self.layout.vpp > 1 and len(items) % self.layout.pp:
            last = items[-1]
            empty = {"loss_mask": torch.zeros_like(last.loss_mask), "response_mask": torch.zeros_like(last.response_mask)}
            items.append(last.replace(**empty))
        return items

    @within_memory
    @_in_layout
    def forward(self, micro_batches: Sequence[Batch], request: OutputRequest) -> list[Outputs]:
        """Outputs for the tokens in `response_mask`, 0 elsewhere; empty Outputs on ranks that do not hold the last stage."""
        if not micro_batches:
            return []
        items = [self._inputs(b, b.response_mask | b.loss_mask) for b in self._filled(micro_batches)]

        def finish(inputs: Inputs, results: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Outputs]:
            zero = torch.zeros((), device=self.device)
            return zero, zero.int(), self._outputs(inputs, results, request)

        modes = [m.training for m in self.modules]
        for module in self.modules:
            module.eval()
        try:
            with torch.no_grad():
                outputs = self._run(items, request, finish, forward_only=True)
        finally:
            for module, mode in zip(self.modules, modes, strict=True):
                module.train(mode)
        return outputs[: len(micro_batches)] if outputs else [Outputs() for _ in micro_batches]

    @within_memory
    @_in_layout
    def forward_backward(self, micro_batches: Sequence[Batch], loss: Loss) -> LossSums:
        """Accumulate gradients; the sums are the same on all TP and CP ranks of the last stage, and empty on other stages."""
        total = LossSums()
        if not micro_batches:
            return total
        request = loss.request
        items = [self._inputs(b, b.loss_mask) for b in self._filled(micro_batches)]
        count = len(micro_batches)
        seen = 0

        def finish(inputs: Inputs, results: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, LossSums | None]:
            nonlocal seen
            seen += 1
            anchor = sum((r.sum() * 0 for r in results), torch.zeros((), device=self.device))
            none = torch.zeros((), dtype=torch.int, device=self.device)
            if seen > count:
                return anchor, none, None
            value, sums = loss(self._outputs(inputs, results, request), inputs.batch)
            return value + anchor, none, sums

        self.updater.begin()
        results = self._run(items, request, finish, forward_only=False)
        self.updater.accumulated()
        for sums in results:
            if sums is not None:
                total.add(sums)
        return total

    @_in_layout
    def optimizer_step(self) -> dict[str, float]:
        """Reduce over DP, clip the global norm, AdamW, next learning rate, clear."""
        result: dict[str, float] = self.updater.step()
        return result

    @_in_layout
    def zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        self.updater.zero_grad()

    @_in_layout
    def gradients(self) -> dict[Tensor, Tensor]:
        """The accumulated gradient of each parameter, for tests and diagnostics; collective, and only `zero_grad` may follow."""
        result: dict[Tensor, Tensor] = self.updater.gradients()
        return result

    # ---- checkpoints ------------------------------------------------------------------------------------------------
    @_in_layout
    def save(self, folder: Path) -> None:
        """A `dist_checkpointing` checkpoint, readable in every other layout; collective."""
        from jackfield_megatron import checkpoint

        self.finish_save()
        checkpoint.save(self, folder)

    @_in_layout
    def save_async(self, folder: Path) -> None:
        """As `save`, but return when everything is copied to host memory and write in the background; `finish_save` completes it."""
        from jackfield_megatron import checkpoint

        self.finish_save()
        self._pending_save = checkpoint.save(self, folder, background=True)

    @_in_layout
    def finish_save(self) -> None:
        """Wait until what `save_async` began is complete on disk; collective. The next save, load and export do it by themselves."""
        if self._pending_save is not None:
            finish, self._pending_save = self._pending_save, None
            finish()

    @_in_layout
    def load(self, folder: Path) -> None:
        """Read what `save` wrote, in this or another layout; collective. Raises CheckpointError."""
        from jackfield_megatron import checkpoint

        self.finish_save()
        checkpoint.load(self, folder)

    @_in_layout
    def offload(self) -> int:
        """Moments and float32 masters to the host; the gradient buffers, empty after a step, are given back."""
        return 0 if self.updater is None else int(self.updater.offload())

    @_in_layout
    def onload(self) -> None:
        """Undo `offload`."""
        if self.updater is not None:
            self.updater.onload(self.device)

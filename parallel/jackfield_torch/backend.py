"""Backend `torch`: the whole model on every rank, any Hugging Face causal LM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from jackfield.batch import Batch
from jackfield.components import Backend, BackendConfig, Loss, LossSums, OutputRequest, Outputs, Position, WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig
from jackfield.errors import CheckpointError, ConfigError
from jackfield.shard import Shard
from jackfield_reshard.adapters import Adapters
from jackfield_reshard.modules import Unmoved, adopt_into, held, module_shards, weights, whole_shard
from jackfield_torch.lora import LoRAConfig, Merged, add_adapters
from jackfield_torch.model import export_model, load_model
from jackfield_torch.norm import replace_norms
from jackfield_torch.optimizer import MasterAdamW, ReplicatedAdamW
from jackfield_torch.scoring import Scorer
from jackfield_workers.memory import within_memory


class TorchConfig(BackendConfig):
    """Settings of the backends on plain PyTorch."""

    packing: Literal["auto", "on", "off"] = "auto"
    """Run micro-batches without padding, equal prompts once: where it saves tokens; always; never. The gradient is the same."""
    reduce_dtype: Literal["float32", "bfloat16", "int8"] = "float32"
    """Type in which gradients travel between ranks: bfloat16 halves the traffic, with a relative error of about 2^-8; int8 (matrices, in
    blocks with a scale) quarters it, with one of about 2^-6."""
    lora: LoRAConfig | None = None
    """Train low-rank adapters; the rest stays as it is."""


class TorchBackend(Backend):
    """Plain data parallelism: the whole model on every rank, whose gradients are summed. The base of the sharded backends."""

    Config = TorchConfig
    config: Any
    updated: Callable[[Sequence[str]], None] | None = None
    """Told during `optimizer_step` which weights are final, layer by layer; a transport that overlaps sets it."""
    optimizer: MasterAdamW | None

    def setup(self, model: ModelConfig, optimizer: OptimizerConfig | None, context: WorkerContext) -> None:
        """See Backend. Raises DataError on a bad folder, ConfigError where `packing: on` does not suit the architecture."""
        self.model_config, self.context = model, context
        self.model = load_model(model, seed=context.seed)
        trained = optimizer is not None
        self.model.requires_grad_(trained).train(trained)
        self.merged: Merged | None = None
        if self.config.lora is not None and trained and model.head == "lm":
            add_adapters(self.model, self.config.lora, context.seed)
            self.merged = self._merged()
        if self.config.activation_checkpointing and trained:
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        masters = self._place(trained)
        self._modules, self._unmoved = list(self.model.modules()), Unmoved(lambda: module_shards(self.model))
        self.optimizer = None
        if optimizer is not None:
            trainable = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
            self.optimizer = self._optimizer(trainable, masters, optimizer)
            torch.manual_seed(context.seed)

    def _place(self, trained: bool) -> dict[str, Tensor]:
        """Move the model to where it will run, in its type; returns float32 masters of trained weights that become narrower."""
        dtype, device = getattr(torch, self.config.dtype), self.context.device
        masters = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad and dtype != torch.float32:
                masters[name] = parameter.data.to(device, torch.float32, copy=True)
            parameter.data = parameter.data.to(device, dtype)
        self.model.to(device)
        if device.type == "cpu" and dtype == torch.bfloat16:
            replace_norms(self.model)
        self.scorer = self._scorer()
        return masters

    def _merged(self) -> Merged:
        return Merged(self.model, lambda tensor: tensor, lambda tensor: tensor)

    def _scorer(self) -> Scorer:
        scorer = Scorer(self.model, value=self.model_config.head == "value")
        if self.config.packing == "on" and not scorer.can_pack:
            raise ConfigError(f"backend: packing is not possible with {type(self.model).__name__}; leave out `packing: on`")
        return scorer

    def _optimizer(self, trainable: dict[str, nn.Parameter], masters: dict[str, Tensor], config: OptimizerConfig) -> MasterAdamW:
        if self.context.world_size == 1:
            return MasterAdamW(trainable, masters, config)
        return ReplicatedAdamW(trainable, masters, config, getattr(torch, self.config.reduce_dtype))

    @property
    def position(self) -> Position:
        """Every rank has its own share of the batch."""
        return Position(self.context.rank, self.context.world_size)

    def _score(self, batch: Batch, mask: Tensor, request: OutputRequest) -> Outputs:
        return self.scorer(batch, mask, request, pack=self._pack)

    @property
    def _pack(self) -> bool | None:
        packing: str = self.config.packing
        return {"auto": None, "on": True, "off": False}[packing]

    @within_memory
    @torch.no_grad()
    def forward(self, micro_batches: Sequence[Batch], request: OutputRequest) -> list[Outputs]:
        """See Backend. Tokens outside `response_mask` are not scored: their outputs are 0."""
        with evaluating(self.model):
            return [self._score(batch, batch.response_mask, request) for batch in micro_batches]

    @within_memory
    def forward_backward(self, micro_batches: Sequence[Batch], loss: Loss) -> LossSums:
        """See Backend."""
        if self.optimizer is None:
            raise ConfigError(f"role {self.context.role}: this model was set up without an optimizer and cannot be trained")
        total = LossSums()
        for batch in micro_batches:
            value, sums = loss(self._score_to_train(batch, loss.request), batch)
            if value.requires_grad:
                self._backward(value)
            total.add(sums)
        return total

    def _backward(self, value: Tensor) -> None:
        value.backward()

    def _score_to_train(self, batch: Batch, request: OutputRequest) -> Outputs:
        """Outputs with gradients; a micro-batch without a token to train on costs nothing here."""
        if bool(batch.loss_mask[:, 1:].any()):
            return self._score(batch, batch.loss_mask, request)
        zeros = torch.zeros(batch.tokens.shape, device=batch.tokens.device)
        if self.model_config.head == "value":
            return Outputs(values=zeros)
        return Outputs(zeros, zeros if request.entropy else None, zeros if request.sum_pi_squared else None)

    def optimizer_step(self) -> dict[str, float]:
        """See Backend; `bad_gradients` is 1 where the gradient was not finite and the step was left out."""
        assert self.optimizer is not None
        self.optimizer.updated = self.updated
        return self.optimizer.step()

    def zero_grad(self) -> None:
        """See Backend."""
        if self.optimizer is not None:
            self.optimizer.zero_grad()

    def shards(self) -> list[Shard]:
        """See Backend. With LoRA the merged weights, brought up to date by the call."""
        if self.merged is not None:
            return self._shards(self.merged.weights())
        return self._unmoved(held(self._modules))

    def adapters(self) -> Adapters | None:
        """Base and adapters apart, for transports that bring the adapters alone; None without LoRA."""
        return None if self.merged is None else Adapters(self._shards(self.merged.apart()), self.merged.scale)

    def _shards(self, parts: Iterable[tuple[str, Tensor, Tensor, bool]]) -> list[Shard]:
        """From (name, the module's tensor, this rank's part, is a buffer)."""
        return [whole_shard(name, part, buffer) for name, _, part, buffer in parts]

    def adopt(self, shards: Sequence[Shard]) -> bool:
        """See Backend; with LoRA it is merged into the given storage."""
        return adopt_into(self.model, shards) if self.merged is None else self.merged.adopt(shards)

    def _tensors(self) -> dict[str, Tensor]:
        """What a checkpoint holds of the model: weights by name, the masters where there are any; with LoRA the adapters."""
        masters = {} if self.optimizer is None else self.optimizer.masters
        kept = ((n, t) for n, t, _ in weights(self.model) if self.merged is None or t.requires_grad)
        return {name: masters.get(name, tensor).detach() for name, tensor in kept}

    def save(self, folder: Path) -> None:
        """Weights and optimizer as safetensors, the rest in `state.pt`, by rank 0 alone. Raises CheckpointError."""
        if self.context.rank:
            return
        moments = {} if self.optimizer is None else self.optimizer.state()
        steps = 0 if self.optimizer is None else self.optimizer.steps
        state = {"steps": steps, "rng": torch.get_rng_state()}
        if self.context.device.type == "cuda":
            state["cuda_rng"] = torch.cuda.get_rng_state(self.context.device)
        try:
            save_file({n: t.contiguous() for n, t in self._tensors().items()}, folder / "model.safetensors")
            save_file(moments, folder / "optimizer.safetensors")
            torch.save(state, folder / "state.pt")
        except (OSError, SafetensorError, RuntimeError) as error:
            raise CheckpointError(f"{folder}: cannot be written ({error}); is the disk full?") from error

    def load(self, folder: Path) -> None:
        """See Backend. Values are copied into the storage in use, so what shares it sees them."""
        try:
            tensors = load_file(folder / "model.safetensors")
            moments = load_file(folder / "optimizer.safetensors")
            state = torch.load(folder / "state.pt", weights_only=True)
        except (OSError, SafetensorError, RuntimeError, EOFError) as error:
            raise CheckpointError(f"{folder}: cannot be read ({str(error).splitlines()[0]}); resume from another checkpoint") from error
        mine = self._tensors()
        different = sorted(n for n in {*mine, *tensors} if n not in mine or n not in tensors or mine[n].shape != tensors[n].shape)
        if different:
            raise CheckpointError(
                f"{folder}: {len(different)} weights differ from the model's, first {different[0]}; is it another model's?"
            )
        with torch.no_grad():
            for name, tensor in mine.items():
                tensor.copy_(tensors[name])
        if self.optimizer is not None:
            self.optimizer.write_back()
            self.optimizer.zero_grad()
            self.optimizer.load_state(moments, state["steps"])
        torch.set_rng_state(state["rng"])
        if "cuda_rng" in state and self.context.device.type == "cuda":
            torch.cuda.set_rng_state(state["cuda_rng"], self.context.device)

    def export(self, folder: Path) -> None:
        """See Backend; by rank 0 alone. With LoRA the merged weights."""
        if self.context.rank:
            return
        whole = None if self.merged is None else {name: part for name, _, part, _ in self.merged.weights()}
        export_model(self.model, self.model_config, folder, whole)

    def offload(self) -> int:
        """Optimizer states to the host."""
        return 0 if self.optimizer is None else self.optimizer.move(torch.device("cpu"))

    def onload(self) -> None:
        """Optimizer states back to the device."""
        if self.optimizer is not None:
            self.optimizer.move(self.context.device)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Dropout off; afterwards every module is in the mode it was in."""
    training = [part for part in model.modules() if part.training]
    model.eval()
    try:
        yield
    finally:
        for part in training:
            part.training = True

"""Backend `counting`: trains with another backend and does something of its own around it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jackfield import Backend, Batch, Outputs, registry
from jackfield.components import BackendConfig, Loss, LossSums, OutputRequest, Position, WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, OptimizerConfig
from jackfield.shard import Shard


class Counting(Backend):
    """Passes everything on to the backend `inner`, and counts optimizer steps."""

    class Config(BackendConfig):
        """Which backend does the work, and how."""

        inner: str = "torch"
        """Name of the wrapped backend."""
        options: dict[str, Any] = {}
        """Its own options."""

    config: Config

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        common = {"dtype": self.config.dtype, "activation_checkpointing": self.config.activation_checkpointing}
        self.inner: Backend = registry.build("backend", ComponentSpec(name=self.config.inner, options=common | self.config.options))
        self.steps = 0

    def setup(self, model: ModelConfig, optimizer: OptimizerConfig | None, context: WorkerContext) -> None:
        """Load the model."""
        self.inner.setup(model, optimizer, context)

    @property
    def position(self) -> Position:
        """This rank's place in data parallelism."""
        return self.inner.position

    def forward(self, micro_batches: Sequence[Batch], request: OutputRequest) -> list[Outputs]:
        """Outputs of each micro-batch, without gradients."""
        return self.inner.forward(micro_batches, request)

    def forward_backward(self, micro_batches: Sequence[Batch], loss: Loss) -> LossSums:
        """Add the micro-batches' gradient. Sum, never average: the loss has its denominators already."""
        return self.inner.forward_backward(micro_batches, loss)

    def optimizer_step(self) -> dict[str, float]:
        """Step; what is returned here shows among the run's metrics."""
        self.steps += 1
        return self.inner.optimizer_step() | {"example/optimizer_steps": float(self.steps)}

    def zero_grad(self) -> None:
        """Drop the gradient."""
        self.inner.zero_grad()

    def shards(self) -> list[Shard]:
        """Weights and persistent buffers, as views of the storage in use."""
        return self.inner.shards()

    def adopt(self, shards: Sequence[Shard]) -> bool:
        """Move the weights into the engine's storage."""
        return self.inner.adopt(shards)

    def save(self, folder: Path) -> None:
        """Everything that exact resume needs (law 29)."""
        (folder / "inner").mkdir(exist_ok=True)
        self.inner.save(folder / "inner")
        (folder / "steps").write_text(str(self.steps))

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        self.inner.load(folder / "inner")
        self.steps = int((folder / "steps").read_text())

    def export(self, folder: Path) -> None:
        """Write a Hugging Face folder."""
        self.inner.export(folder)

    def offload(self) -> int:
        """Make room for generation."""
        return self.inner.offload()

    def onload(self) -> None:
        """Undo `offload`."""
        self.inner.onload()

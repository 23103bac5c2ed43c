"""What a backend says when a micro-batch does not fit its device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from jackfield.batch import Batch
from jackfield.errors import ConfigError

F = TypeVar("F", bound=Callable[..., Any])


def within_memory(method: F) -> F:
    """For `forward` and `forward_backward` of a backend: running out of memory is a ConfigError that says what to change."""

    @wraps(method)
    def run(self: Any, micro_batches: Sequence[Batch], *args: Any) -> Any:
        try:
            return method(self, micro_batches, *args)
        except torch.OutOfMemoryError as error:
            role = self.context.role
            largest = max(micro_batches, key=lambda batch: int(batch.lengths.sum()))
            ways = [f"lower {role}.micro_batch_tokens"]
            if not self.config.activation_checkpointing:
                ways.append(f"set {role}.backend.activation_checkpointing: true")
            raise ConfigError(
                f"role {role}: out of memory on {self.context.device} with micro-batches of up to {int(largest.lengths.sum())} tokens "
                f"({len(largest)} samples); {', or '.join(ways)} ({str(error).splitlines()[0]})"
            ) from error

    return cast(F, run)

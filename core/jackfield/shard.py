"""The one vocabulary in which training backends and engines name their weights to each other (docs/resharding.md)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Shard:
    """A box of one logical tensor, held by one rank.

    `name` is the Hugging Face name (the first of several tied names). `shape` is the global *logical* shape, unflattened where a
    layout interleaves, so that every box is one strided view. Padded vocabulary rows belong to no box; a replicated
    KV head appears as several shards with the same box.
    """

    name: str
    """Canonical Hugging Face parameter or buffer name."""
    shape: tuple[int, ...]
    """Global logical shape; its product is the element count of the Hugging Face tensor."""
    offset: tuple[int, ...]
    """First index of the box in each logical dimension."""
    size: tuple[int, ...]
    """Extent of the box in each logical dimension."""
    dtype: str
    """Element type as torch prints it without the prefix, such as "bfloat16"."""
    tensor: torch.Tensor | None = field(default=None, compare=False, repr=False)
    """Local view of exactly `size`, sharing the owner's storage; None where only metadata is planned."""
    buffer: bool = False
    """True for a persistent buffer, which is synchronised but not trained."""

    @property
    def full(self) -> bool:
        """Whether the box is the whole tensor."""
        return self.size == self.shape


BYTES = ("bytes_aliased", "bytes_copied", "bytes_sent", "bytes_saved")
"""The byte counts of a SyncReport."""


@dataclass
class SyncReport:
    """What one weight synchronisation did, on one rank from a transport, of all ranks from `run.policy.sync`.

    Seconds are wall time, of the slowest rank; bytes are summed over ranks.
    """

    version: int
    """Policy version that the engine serves afterwards."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Phase to seconds; phases are pause, plan, copy, wire, load, resume."""
    bytes_aliased: int = 0
    """Bytes that trainer and engine share, so that nothing moved."""
    bytes_copied: int = 0
    """Bytes copied within a device."""
    bytes_sent: int = 0
    """Bytes sent between processes."""
    bytes_saved: int = 0
    """Bytes that did not have to be sent because the receiver had them already (transport delta)."""

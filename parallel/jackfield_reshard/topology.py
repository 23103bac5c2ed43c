"""Where ranks stand: which GPU each source and destination rank has, and what links the GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class Topology:
    """GPUs are numbered over nodes; source rank r is on GPU `source[r]`, destination rank r on `destination[r]`."""

    source: np.ndarray
    destination: np.ndarray
    gpus_per_node: int = 8
    nvlink: float = 400e9
    """Bytes a second that a GPU sends (and, at once, receives) inside its node."""
    network: float = 50e9
    """Bytes a second that a GPU sends to other nodes."""
    memory: float = 4.1e12
    """Bytes a second that a GPU's memory moves, reads and writes together: a copy moves each byte twice."""
    latency: float = 20e-6
    """Seconds a message costs beside its bytes."""
    nodes: np.ndarray | None = field(default=None)
    """The node of each GPU, where it is not simply GPU // gpus_per_node."""

    @classmethod
    def colocated(cls, ranks: int, engines: int | None = None, **rates: float) -> Topology:
        """Rank r of either side on GPU r."""
        return cls(np.arange(ranks), np.arange(engines or ranks), **rates)  # type: ignore[arg-type]

    @classmethod
    def separate(cls, ranks: int, engines: int, **rates: float) -> Topology:
        """The engine's ranks on GPUs of their own, after the trainer's, beginning with a new node."""
        per_node = int(rates.get("gpus_per_node", 8))
        first = -(-ranks // per_node) * per_node if ranks + engines > per_node else ranks
        return cls(np.arange(ranks), first + np.arange(engines), **rates)  # type: ignore[arg-type]

    def node(self, gpus: np.ndarray) -> np.ndarray:
        """The node of each GPU."""
        return gpus // self.gpus_per_node if self.nodes is None else self.nodes[gpus]

"""Batched strided copies within a device; on CUDA captured once as a graph and replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one shape are the same memory, element by element."""
    if a.dtype != b.dtype or a.shape != b.shape or a.data_ptr() != b.data_ptr() or a.device != b.device:
        return False
    return all(x == y or n == 1 for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True))


class CopyList:
    """Copies `sources[i]` into `targets[i]` (equal shapes; a different dtype is a cast). Built once, run at every sync."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor], graph: bool = True) -> None:
        self.targets, self.sources = [t.detach() for t in targets], [s.detach() for s in sources]
        self.bytes = sum(t.numel() * t.element_size() for t in self.targets)
        self._wants_graph = graph and bool(self.targets) and all(t.is_cuda for t in (*self.targets, *self.sources))
        self._graph: torch.cuda.CUDAGraph | None = None

    def _copy(self) -> None:
        with torch.no_grad():
            groups: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
            for target, source in zip(self.targets, self.sources, strict=True):
                pair = groups.setdefault((target.dtype, source.dtype), ([], []))
                pair[0].append(target)
                pair[1].append(source)
            for targets, sources in groups.values():
                torch._foreach_copy_(targets, sources, non_blocking=True)

    def run(self) -> None:
        """Copy everything; on CUDA asynchronously, in the current stream."""
        if not self.targets:
            return
        if not self._wants_graph:
            self._copy()
            return
        if self._graph is None:
            self._copy()  # warm up: lazy initialisation must not be captured
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._copy()
            self._graph = graph
        self._graph.replay()

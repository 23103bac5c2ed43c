"""Strided copies within a device, compiled once; on CUDA captured as one graph and replayed."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one shape are the same memory, element by element."""
    if a.dtype != b.dtype or a.shape != b.shape or a.data_ptr() != b.data_ptr() or a.device != b.device:
        return False
    return all(x == y or n == 1 for x, y, n in zip(a.stride(), b.stride(), a.shape, strict=True))


def widest(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """The same copy with elements of 16 bytes where alignment allows, so that a strided copy reads and writes whole words."""
    size = target.element_size()
    if target.dtype != source.dtype or size >= 16 or target.dim() == 0 or (target.is_contiguous() and source.is_contiguous()):
        return target, source
    per = 16 // size
    for tensor in (target, source):
        if tensor.stride(-1) != 1 or tensor.shape[-1] % per or tensor.storage_offset() % per or tensor.data_ptr() % 16:
            return target, source
        if any(stride % per for stride in tensor.stride()[:-1]):
            return target, source
    return target.view(torch.complex128), source.view(torch.complex128)


class CopyList:
    """Copies `sources[i]` into `targets[i]` (equal shapes; a different dtype is a cast). Built once, run at every sync."""

    def __init__(self, targets: Sequence[Tensor], sources: Sequence[Tensor], graph: bool = True) -> None:
        self.bytes = sum(t.numel() * t.element_size() for t in targets)
        pairs = [(t.detach(), s.detach()) for t, s in zip(targets, sources, strict=True)]
        self._cuda = bool(pairs) and all(t.is_cuda and s.is_cuda for t, s in pairs)
        self.pairs = [widest(t, s) for t, s in pairs] if self._cuda else pairs
        self._graph: torch.cuda.CUDAGraph | None = None
        self._wants_graph = graph and self._cuda

    def _copy(self) -> None:
        with torch.no_grad():
            for target, source in self.pairs:
                target.copy_(source, non_blocking=True)

    def run(self) -> None:
        """Copy everything; on CUDA asynchronously, in the current stream."""
        if not self._wants_graph:
            self._copy()
            return
        if self._graph is None:
            self._copy()  # warm up: lazy initialisation must not be captured
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                self._copy()
            self._graph = graph
        self._graph.replay()

"""Megatron's process groups for one role. Several roles of one process may have different layouts: each call installs its own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from jackfield_megatron import shim
from jackfield_megatron.config import Layout

_BUILT: dict[tuple[Any, ...], dict[str, Any]] = {}
"""Megatron's global state by layout: process groups are per process, so roles with the same layout share them."""


def _state() -> dict[str, Any]:
    from megatron.core import parallel_state

    return {n: v for n, v in vars(parallel_state).items() if n.startswith("_") and n[1:2].isupper() and not callable(v)}


class Groups:
    """The process groups of one layout; collective to create."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        if not dist.is_initialized():
            backend = "nccl" if device.type == "cuda" else "gloo"
            dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        self.layout = layout
        self.key = (dist.get_world_size(), layout.tp, layout.pp, layout.vpp, layout.cp, layout.ep, layout.etp)
        with shim.scope():
            self._build()

    def _build(self) -> None:
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        if self.key in _BUILT:
            return
        layout = self.layout
        for name, value in _state().items():
            setattr(parallel_state, name, {} if isinstance(value, dict) else None)
        parallel_state.initialize_model_parallel(
            layout.tp,
            layout.pp,
            layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            create_gloo_process_groups=False,
        )
        model_parallel_cuda_manual_seed(1234)
        _BUILT[self.key] = _state()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Inside, Megatron's global state is this layout's, and it runs on this machine's device."""
        from megatron.core import parallel_state

        with shim.scope():
            for name, value in _BUILT[self.key].items():
                setattr(parallel_state, name, value)
            yield

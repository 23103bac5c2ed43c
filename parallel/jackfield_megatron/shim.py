"""Megatron-Core on machines without CUDA: every name that is patched, why, and for how long.

Megatron-Core calls `torch.cuda` unconditionally. With gloo and the local layer spec everything else works on a CPU, so a scope
around each call into Megatron replaces exactly the names in `PATCHES` and takes them back afterwards: nothing outside this
backend ever sees them. On a machine with CUDA `scope` does nothing. `tests/megatron/test_shim.py` fails when a new
Megatron-Core no longer contains the code that a patch is for.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

_CPU = torch.device("cpu")


class _Stream:
    """Stands for a CUDA stream: a CPU has only one, so every wait is over already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def record_event(self, event: Any = None) -> _Stream:
        return self


def _numpy_if_asked(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@dataclass(frozen=True)
class Patch:
    """One replaced name."""

    module: str
    """Module that holds it."""
    name: str
    value: Any
    """What stands there on a CPU."""
    used_by: tuple[str, str]
    """Module of Megatron-Core and the text in its source that needs the patch."""


PATCHES = (
    # every allocation asks for the current CUDA device
    Patch("torch.cuda", "current_device", lambda: _CPU, ("megatron.core.tensor_parallel.layers", "torch.cuda.current_device()")),
    # batched point-to-point communication waits for the device
    Patch("torch.cuda", "synchronize", lambda *a: None, ("megatron.core.pipeline_parallel.p2p_communication", "torch.cuda.synchronize()")),
    # the random-state tracker saves and sets the device's state; on a CPU that is the process's
    Patch(
        "torch.cuda",
        "get_rng_state",
        lambda *a: torch.get_rng_state(),
        ("megatron.core.tensor_parallel.random", "torch.cuda.get_rng_state()"),
    ),
    # without this a seed given to the tracker would silently not apply
    Patch("torch.cuda", "manual_seed", torch.manual_seed, ("megatron.core.tensor_parallel.random", "torch.cuda.manual_seed(seed)")),
    # the all-to-all token dispatcher copies split sizes on a side stream
    Patch("torch.cuda", "Stream", _Stream, ("megatron.core.transformer.moe.token_dispatcher", "torch.cuda.Stream()")),
    Patch(
        "torch.cuda",
        "current_stream",
        lambda *a: _Stream(),
        ("megatron.core.transformer.moe.token_dispatcher", "torch.cuda.current_stream()"),
    ),
    # recomputation restores the random state that its forward pass saw
    Patch(
        "megatron.core.tensor_parallel.random",
        "_get_cuda_rng_state",
        lambda *a, **k: torch.get_rng_state(),
        ("megatron.core.tensor_parallel.random", "def _get_cuda_rng_state"),
    ),
    Patch(
        "megatron.core.tensor_parallel.random",
        "_set_cuda_rng_state",
        lambda state, *a, **k: torch.set_rng_state(state),
        ("megatron.core.tensor_parallel.random", "def _set_cuda_rng_state"),
    ),
    # split sizes become numpy arrays only where they lie on a CUDA device
    Patch(
        "megatron.core.transformer.moe.token_dispatcher",
        "maybe_move_tensor_to_cpu",
        _numpy_if_asked,
        ("megatron.core.transformer.moe.token_dispatcher", "maybe_move_tensor_to_cpu("),
    ),
)


class _CudaMeansCpu(torch.overrides.TorchFunctionMode):
    """`device="cuda"` literals, pinned memory, `.cuda()`, and checks of `.type()` against CUDA type names. Per thread."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if str(kwargs.get("device")).startswith("cuda"):
            kwargs["device"] = _CPU
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


_depth = 0
_missing = object()


@contextmanager
def scope() -> Iterator[None]:
    """Inside, Megatron-Core runs on this machine's CPU. Reentrant; does nothing where there is CUDA."""
    global _depth
    if torch.cuda.is_available() or _depth:
        yield
        return
    import_megatron()
    saved = []
    for patch in PATCHES:
        module = importlib.import_module(patch.module)
        saved.append((module, patch.name, getattr(module, patch.name)))
        setattr(module, patch.name, patch.value)
    _depth = 1
    try:
        with _CudaMeansCpu():
            yield
    finally:
        _depth = 0
        for module, name, value in saved:
            setattr(module, name, value)


def _stand_in_for_triton() -> list[str]:
    """Megatron-Core 0.19 imports triton while it defines kernels that a CPU never runs; a name is enough where it is missing.

    Returns the names to take away again after the import, so that nobody else believes that triton is here.
    """
    if importlib.util.find_spec("triton") is not None:
        return []

    class Anything(types.ModuleType):
        """Any attribute, callable, usable as a decorator with and without arguments."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return Anything(f"{self.__name__}.{name}")

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Anything(self.__name__)

    names = ["triton", "triton.language", "triton.runtime"]
    for name in names:
        module = Anything(name)
        module.__path__ = []
        module.__version__ = "3.4.0"  # type: ignore[attr-defined]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        sys.modules[name] = module
    return names


def import_megatron() -> None:
    """Import the parts of Megatron-Core that others import lazily, with two import-time corrections.

    Without CUDA `torch.compile` is the identity while modules bind it as their fuser (the import takes half the time, and nothing
    is compiled on a CPU). Megatron-Core 0.16.1 names `te_general_gemm` in `moe_utils` without defining it when Transformer
    Engine is missing, on a GPU as well.
    """
    compile_ = torch.compile
    borrowed: list[str] = []
    if not torch.cuda.is_available():
        borrowed = _stand_in_for_triton()
        torch.compile = lambda f=None, **k: f if f is not None else (lambda g: g)  # type: ignore[assignment]
    try:
        importlib.import_module("megatron.core.tensor_parallel.random")
        importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
        moe = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    finally:
        torch.compile = compile_
        for name in borrowed:
            del sys.modules[name]
    if getattr(moe, "te_general_gemm", _missing) is _missing:
        moe.te_general_gemm = None  # type: ignore[attr-defined]

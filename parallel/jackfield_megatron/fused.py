"""Which fused kernels are there: Transformer Engine first, then NVIDIA's apex, then plain torch; and which apex is the wrong one."""

from __future__ import annotations

import importlib.metadata
import importlib.util

from jackfield.errors import ConfigError

BUILD_APEX = "build NVIDIA's from https://github.com/NVIDIA/apex with its CUDA extensions"


def transformer_engine(*, required: bool = False) -> bool:
    """Whether Transformer Engine for PyTorch can be used. Raises ConfigError if it must and cannot."""
    found = (
        importlib.util.find_spec("transformer_engine") is not None and importlib.util.find_spec("transformer_engine.pytorch") is not None
    )
    if required and not found:
        raise ConfigError(
            "fused: transformer_engine is asked for, but transformer_engine.pytorch is not installed; say fused: auto or torch"
        )
    return found


def apex() -> str:
    """`nvidia`, `missing`, or `impostor`: PyPI's package of that name is an unrelated web toolkit without fused optimizers."""
    if importlib.util.find_spec("apex") is None:
        return "missing"
    try:
        from apex.optimizers import FusedAdam  # noqa: F401
    except ImportError:
        return "impostor"
    return "nvidia"


def report(choice: str) -> str:
    """One line on what was taken. Raises ConfigError for the wrong apex."""
    kind = apex()
    if kind == "impostor":
        try:
            version = " " + importlib.metadata.version("apex")
        except importlib.metadata.PackageNotFoundError:
            version = ""
        raise ConfigError(
            f"the installed package apex{version} is PyPI's web toolkit, not NVIDIA's apex (it has no apex.optimizers.FusedAdam); "
            f"uninstall it, or {BUILD_APEX}"
        )
    engine = choice != "torch" and transformer_engine(required=choice == "transformer_engine")
    linear = "Transformer Engine" if engine else "torch"
    optimizer = "Transformer Engine" if transformer_engine() else {"nvidia": "apex", "missing": "torch"}[kind]
    return f"linear layers and norms: {linear}; optimizer: {optimizer}; attention: torch SDPA and varlen_attn"

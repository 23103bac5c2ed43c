"""Public test kit for plugin authors: conformance classes, tiny models and fakes (docs/testing.md).

Names resolve on first use, so that the pytest plugin costs nothing where no test uses it.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "algorithm": ("AlgorithmConformance",),
    "backend": ("BackendConformance",),
    "engine": ("EngineConformance",),
    "parts": ("DatasetConformance", "RewardConformance", "RolloutConformance", "TrackerConformance"),
    "systems": ("HooksConformance", "LauncherConformance", "TransportConformance"),
    "runs": ("fake_config", "fake_run"),
    "models": ("random_batch", "tiny_model"),
    "ranks": ("run_ranks",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"jackfield.testing.{_HOME[name]}"), name)
    raise AttributeError(f"module 'jackfield.testing' has no attribute {name!r}")

"""jackfield: reinforcement-learning post-training of language models that nobody has to fork.

Everything public is importable from here; names resolve on first use, so that `import jackfield` stays light. A plugin adds names of its
own by entry points of group `jackfield.export`; the core's come first.
"""

from importlib import import_module
from typing import Any

__version__ = "0.1.0"
JACKFIELD_API = 1
"""Version of the plugin interface that this core speaks; a component says which it was written for in `api` (docs/api-policy.md)."""
OLDEST_API = 1
"""Oldest plugin interface that this core still speaks."""

_HOMES = {
    "algorithm": ("Algorithm", "AlgorithmConfig", "LossOutput", "Needs"),
    "batch": ("Batch",),
    "components": (
        *("Backend", "Component", "ComponentConfig", "Dataset", "Engine", "Launcher", "Outputs"),
        *("Reward", "Rollout", "Tracker", "Transport"),
    ),
    "config": ("load_config",),
    "hookspecs": ("hookimpl",),
    "trainer": ("Trainer",),
}
_HOME = {name: module for module, names in _HOMES.items() for name in names}
__all__ = ["JACKFIELD_API", "__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"jackfield.{_HOME[name]}"), name)
    registry = import_module("jackfield.registry")
    if any(entry.name == name for entry in registry.entries("export")):
        return registry.load("export", name)
    raise AttributeError(f"module 'jackfield' has no attribute {name!r}")

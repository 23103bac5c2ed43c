"""jackfield: reinforcement-learning post-training of language models that nobody has to fork.

Everything public is importable from here; names resolve on first use, so that `import jackfield` stays light.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jackfield.algorithm import Algorithm as Algorithm
    from jackfield.algorithm import AlgorithmConfig as AlgorithmConfig
    from jackfield.algorithm import ClippedAlgorithm as ClippedAlgorithm
    from jackfield.algorithm import ClippedConfig as ClippedConfig
    from jackfield.algorithm import LossOutput as LossOutput
    from jackfield.algorithm import Needs as Needs
    from jackfield.batch import Batch as Batch
    from jackfield.components import Backend as Backend
    from jackfield.components import Component as Component
    from jackfield.components import ComponentConfig as ComponentConfig
    from jackfield.components import Dataset as Dataset
    from jackfield.components import Engine as Engine
    from jackfield.components import Launcher as Launcher
    from jackfield.components import Outputs as Outputs
    from jackfield.components import Reward as Reward
    from jackfield.components import Rollout as Rollout
    from jackfield.components import Tracker as Tracker
    from jackfield.components import Transport as Transport
    from jackfield.config import load_config as load_config
    from jackfield.hookspecs import hookimpl as hookimpl
    from jackfield.trainer import Trainer as Trainer

__version__ = "0.1.0"
JACKFIELD_API = 1
"""Version of the plugin interface that this core speaks; a component says which it was written for in `api` (docs/api-policy.md)."""
OLDEST_API = 1
"""Oldest plugin interface that this core still speaks."""

_HOMES = {
    "algorithm": ("Algorithm", "AlgorithmConfig", "ClippedAlgorithm", "ClippedConfig", "LossOutput", "Needs"),
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
    raise AttributeError(f"module 'jackfield' has no attribute {name!r}")

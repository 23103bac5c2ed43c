"""Which of the dotted settings on stdin (a JSON list) exist nowhere: neither in a run's config nor in any installed plugin."""

from __future__ import annotations

import functools
import json
import sys
from typing import Any, get_args

from pydantic import BaseModel

from jackfield import registry
from jackfield.config import RunConfig
from jackfield.errors import PluginError

KINDS = {"backend": "backend", "engine": "engine", "rollout": "rollout", "algorithm": "algorithm", "rewards": "reward"}
KINDS |= {"dataset": "dataset", "launcher": "launcher", "transport": "transport", "trackers": "tracker", "hooks": "hooks"}


SLOW = ("reasoning_gym", "math")
"""Plugins that take seconds to import and that no page names."""


@functools.cache
def configs(kind: str) -> list[type[BaseModel]]:
    """The settings of every installed plugin of a kind."""
    found = []
    for entry in (e for e in registry.entries(kind) if e.name not in SLOW):
        try:
            config = getattr(registry.load(kind, f"{entry.distribution}/{entry.name}"), "Config", None)
        except PluginError:
            continue
        found += [config] if config is not None else []
    return found


def models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in get_args(annotation) for model in models_in(part)]


def exists(path: str) -> bool:
    """Whether `a.b.c` is a field of a run's config, or of some plugin that can stand there."""
    models: list[type[BaseModel]] = [RunConfig]
    for name in path.split("."):
        fields = [model.model_fields[name] for model in models if name in model.model_fields]
        if not fields:
            return False
        models = [inner for field in fields for inner in models_in(field.annotation)] + (configs(KINDS[name]) if name in KINDS else [])
    return True


if __name__ == "__main__":
    print(json.dumps([path for path in json.load(sys.stdin) if not exists(path)]))

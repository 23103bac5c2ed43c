"""What the plugins of a run resolve to here: the controller and every worker must agree before the first step."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Iterator
from pathlib import Path

import torch

import jackfield
from jackfield import registry
from jackfield.config import ComponentSpec, RunConfig
from jackfield.errors import PluginError

Fingerprint = tuple[tuple[str, str], ...]
"""(what, what it is here) in the order of registration."""


def _specs(config: RunConfig) -> Iterator[tuple[str, ComponentSpec]]:
    yield "algorithm", config.algorithm
    for role in ("policy", "reference", "critic"):
        if (backend := getattr(config, role).backend) is not None:
            yield "backend", backend
    yield "engine", config.engine
    yield "transport", config.transport
    yield from (("reward", spec) for spec in config.rewards)
    yield from (("hooks", spec) for spec in config.hooks)


def _identity(kind: str, name: str) -> str:
    module, colon, attribute = name.rpartition(":")
    if not colon:
        entry = registry.find(kind, name)
        return f"{entry.distribution} {entry.version} {entry.target}"
    if module.endswith(".py"):
        path = Path(module)
        return f"{hashlib.sha256(path.read_bytes()).hexdigest()[:16]} {attribute}" if path.is_file() else "no such file"
    return name


def fingerprint(config: RunConfig) -> Fingerprint:
    """Versions of jackfield, torch and Python, then every plugin in order. Raises PluginError for one that is not installed."""
    base = [("jackfield", jackfield.__version__), ("torch", torch.__version__), ("python", ".".join(platform.python_version_tuple()[:2]))]
    return (*base, *((f"{kind} {spec.name!r}", _identity(kind, spec.name)) for kind, spec in _specs(config)))


def compare(controller: Fingerprint, worker: Fingerprint, where: str) -> None:
    """Raise PluginError for the first difference, naming the worker."""
    if [name for name, _ in controller] != [name for name, _ in worker]:
        raise PluginError(
            f"{where} has other plugins or another order than the controller: {', '.join(n for n, _ in worker)} instead of "
            f"{', '.join(n for n, _ in controller)}; install the same versions on every host"
        )
    for (name, mine), (_, theirs) in zip(controller, worker, strict=True):
        if mine != theirs:
            raise PluginError(f"{where} resolves {name} to {theirs!r}, the controller to {mine!r}: install the same versions on every host")

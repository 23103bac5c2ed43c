"""Launcher `local`: every role in this process, on its GPU if it has one; calls are plain calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from jackfield.components import Launcher
from jackfield.config import RunConfig
from jackfield.errors import ConfigError
from jackfield.launcher import WorkerGroup


class LocalGroup:
    """One worker in this process."""

    size = 1

    def __init__(self, worker: Any) -> None:
        self.worker = worker

    def call(self, method: str, *args: Any) -> list[Any]:
        """See WorkerGroup."""
        return [getattr(self.worker, method)(*args)]

    def scatter(self, method: str, role: str | None, shares: Sequence[Any], *args: Any) -> list[Any]:
        """See WorkerGroup."""
        return self.call(method, *([role] if role else []), shares[0], *args)

    def stream(self, method: str, shares: Sequence[Any]) -> Iterator[Any]:
        """See WorkerGroup."""
        yield from getattr(self.worker, method)(shares[0])


class LocalLauncher(Launcher):
    """One process, world size 1: the embedded default."""

    def start(self, config: RunConfig, roles: Sequence[str]) -> dict[str, WorkerGroup]:
        """One worker for all roles. Raises ConfigError where a role wants more, or to be beside one that is not there."""
        wanted = {role: getattr(config, role, None) or next(r for r in config.rewards if r.label == role) for role in roles}
        for role, spec in wanted.items():
            if (spec.gpus or 1) > 1:
                raise ConfigError(f"{role} wants gpus: {spec.gpus}, but launcher local is one process: use launcher fork or ray")
            if spec.colocate is not None and spec.colocate not in roles:
                choice = ", ".join(roles)
                raise ConfigError(f"{role}.colocate is {spec.colocate!r}, which is no role of this run: choose from {choice}")
        import torch

        from jackfield.worker import Worker

        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        group = LocalGroup(Worker(config, device))
        return dict.fromkeys(roles, group)

    def stop(self) -> None:
        """Nothing was started."""

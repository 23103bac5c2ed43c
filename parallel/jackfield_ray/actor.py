"""The Ray actor around a worker: messages in and out as packets, so that tensors are one block in the object store."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import numpy as np
import torch

from jackfield.config import RunConfig
from jackfield_workers.fingerprint import Fingerprint
from jackfield_workers.group import bundles
from jackfield_workers.host import Failure, Host, Seat
from jackfield_workers.wire import join, pack, split, unpack

Message = tuple[bytes, np.ndarray]
"""A packet as Ray stores it best: the array travels out of band, without being pickled."""


def to_message(value: Any) -> Message:
    """Pack for Ray."""
    return join(pack(value))


def from_message(message: Message) -> Any:
    """Unpack; the tensors can be written to, unlike Ray's shared memory."""
    return unpack(split(message[0], memoryview(bytearray(message[1].data))))


@dataclass(frozen=True)
class Place:
    """Where an actor runs."""

    node: str
    address: str
    gpu: str
    pid: int

    def __str__(self) -> str:
        return f"pid {self.pid} on {self.address}"


class RayHost:
    """One worker of a pool."""

    def where(self) -> Place:
        """Where Ray has put this actor."""
        import ray

        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return Place(context.get_node_id(), ray.util.get_node_ip_address(), gpus[0] if gpus else "", os.getpid())

    def serve(self, name: str, size: int, seconds: float) -> str:
        """Serve the rendezvous `name` for `size` workers; its address."""
        import ray

        host = ray.util.get_node_ip_address()
        store = torch.distributed.TCPStore(  # type: ignore[attr-defined]
            host, 0, size, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=seconds)
        )
        self.stores = {**getattr(self, "stores", {}), name: store}
        return f"tcp:{host}:{store.port}"

    def start(self, seat: Seat, config: RunConfig, expected: Fingerprint, folder: str, log: str) -> Any:
        """Become worker `seat`; output goes to `log` from now on."""
        os.makedirs(os.path.dirname(log), exist_ok=True)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (1, 2):
            os.dup2(descriptor, stream)
        if os.path.isdir(folder):
            os.chdir(folder)  # relative paths in the config mean what they mean on the controller
        try:
            self.host = Host(seat, config, expected, getattr(self, "stores", {}).get("pool"))
        except Exception as error:  # noqa: BLE001 - isolation by design: the controller raises it with rank and traceback
            return Failure.of(error)
        return None

    def call(self, message: Message) -> tuple[str, Any]:
        """(`end`, packed result) or (`failure`, Failure)."""
        try:
            method, args = from_message(message)
            if method == "link":
                args = (*args, getattr(self, "stores", {}).get("link"))
            return "end", to_message(self.host.call(method, args))
        except Exception as error:  # noqa: BLE001 - as above
            return "failure", Failure.of(error)

    def stream(self, message: Message) -> Iterator[tuple[str, Any]]:
        """(`items`, packed list) as they come, then (`end`, None) or (`failure`, Failure)."""
        try:
            method, args = from_message(message)
            for bundle in bundles(self.host.call(method, args)):
                yield "items", to_message(bundle)
        except Exception as error:  # noqa: BLE001 - as above
            yield "failure", Failure.of(error)
            return
        yield "end", None

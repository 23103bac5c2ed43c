"""Messages between processes: one pickle and one block of bytes that holds every tensor, so that big batches are copied once."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jackfield.batch import Batch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ALIGN = 64
"""Tensors start at multiples of this many bytes, enough for every element type and for vector loads."""


@dataclass(frozen=True)
class Packet:
    """A message as bytes."""

    head: bytes
    """The pickle; tensors stand in it as (offset, size, dtype, shape)."""
    body: bytearray | memoryview
    """The tensors' elements."""

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return len(self.head) + len(self.body)


class _Packer(pickle.Pickler):
    def __init__(self, stream: io.BytesIO) -> None:
        super().__init__(stream, protocol=5)
        self.tensors: list[tuple[int, Tensor]] = []
        self.offset = 0

    def persistent_id(self, obj: Any) -> Any:
        """Tensors leave the pickle; everything else stays."""
        if type(obj) not in (Tensor, torch.nn.Parameter):
            return None
        tensor = obj.detach().cpu().contiguous()
        self.tensors.append((self.offset, tensor))
        place = (self.offset, tensor.nbytes, tensor.dtype, tuple(tensor.shape))
        self.offset += -(-tensor.nbytes // ALIGN) * ALIGN
        return place

    def reducer_override(self, obj: Any) -> Any:
        """A batch is its fields: a tenth of the time of the container's own pickling."""
        if type(obj) is not Batch:
            return NotImplemented
        tensors = {n: v for n, v in obj.items() if isinstance(v, Tensor)}
        scores = None if obj.scores is None else dict(obj.scores.items())
        return _batch, (len(obj), tensors, dict(obj.extras.items()), scores, list(obj.records))


def _batch(size: int, tensors: dict[str, Tensor], extras: dict[str, Tensor], scores: dict[str, Tensor] | None, records: list[Any]) -> Batch:
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    fields: dict[str, Any] = dict(tensors)
    return Batch(
        **fields,
        extras=TensorDict(extras, [size]),
        scores=None if scores is None else TensorDict(scores, [size]),
        records=NonTensorStack(*[NonTensorData(r) for r in records]) if records else [],
        batch_size=[size],
    )


class _Unpacker(pickle.Unpickler):
    def __init__(self, packet: Packet) -> None:
        super().__init__(io.BytesIO(packet.head))
        self.body = packet.body

    def persistent_load(self, pid: Any) -> Tensor:
        """A view of the body."""
        offset, size, dtype, shape = pid
        if not size:
            return torch.empty(shape, dtype=dtype)
        return torch.frombuffer(self.body, dtype=torch.uint8, count=size, offset=offset).view(dtype).reshape(shape)


def pack(message: Any) -> Packet:
    """The message as bytes. Tensors arrive detached, on the CPU. Raises pickle.PicklingError and the like for what cannot travel."""
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(message)
    body = bytearray(packer.offset)
    for offset, tensor in packer.tensors:
        if tensor.nbytes:
            torch.frombuffer(body, dtype=torch.uint8, count=tensor.nbytes, offset=offset).copy_(tensor.reshape(-1).view(torch.uint8))
    return Packet(stream.getvalue(), body)


def unpack(packet: Packet) -> Any:
    """The message; its tensors share the packet's body."""
    return _Unpacker(packet).load()


def send(connection: Connection, packet: Packet) -> None:
    """Write a packet. Raises OSError where the other side is gone."""
    connection.send_bytes(packet.head)
    connection.send_bytes(len(packet.body).to_bytes(8, "little"))
    if packet.body:
        connection.send_bytes(packet.body)


def receive(connection: Connection) -> Packet:
    """Read a packet. Raises EOFError or OSError where the other side is gone."""
    head = connection.recv_bytes()
    body = bytearray(int.from_bytes(connection.recv_bytes(), "little"))
    if body:
        connection.recv_bytes_into(body)
    return Packet(head, body)

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
    """The pickle, and where each tensor's elements are in the body."""
    body: bytearray | memoryview
    """The tensors' elements."""

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return len(self.head) + len(self.body)


class _Packer(pickle.Pickler):
    """Overrides nothing for numbers and strings, of which there are millions; a `persistent_id` would be called for each."""

    def reducer_override(self, obj: Any) -> Any:
        """Tensors leave the pickle. A batch is its fields: a tenth of the time of the container's own pickling."""
        kind = type(obj)
        if kind is Tensor or kind is torch.nn.Parameter:
            flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _tensor, (pickle.PickleBuffer(flat.numpy()), obj.dtype, tuple(obj.shape))
        if kind is not Batch:
            return NotImplemented
        tensors = {n: v for n, v in obj.items() if isinstance(v, Tensor)}
        scores = None if obj.scores is None else dict(obj.scores.items())
        return _batch, (len(obj), tensors, dict(obj.extras.items()), scores, None if obj.records is None else list(obj.records))


def _tensor(elements: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(elements):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(elements, dtype=torch.uint8).view(dtype).reshape(shape)


def _batch(
    size: int, tensors: dict[str, Tensor], extras: dict[str, Tensor], scores: dict[str, Tensor] | None, records: list[Any] | None
) -> Batch:
    from tensordict import NonTensorData, NonTensorStack, TensorDict

    fields: dict[str, Any] = dict(tensors)
    return Batch(
        **fields,
        extras=TensorDict(extras, [size]),
        scores=None if scores is None else TensorDict(scores, [size]),
        records=NonTensorStack(*[NonTensorData(r) for r in records]) if records else records,
        batch_size=[size],
    )


def pack(message: Any) -> Packet:
    """The message as bytes. Tensors arrive detached, on the CPU. Raises pickle.PicklingError and the like for what cannot travel."""
    stream, buffers = io.BytesIO(), []
    _Packer(stream, protocol=5, buffer_callback=lambda b: buffers.append(b.raw())).dump(message)
    places, end = [], 0
    for buffer in buffers:
        places.append((end, buffer.nbytes))
        end += -(-buffer.nbytes // ALIGN) * ALIGN
    body = bytearray(end)
    for (start, size), buffer in zip(places, buffers, strict=True):
        body[start : start + size] = buffer
    return Packet(pickle.dumps((places, stream.getvalue())), body)


def unpack(packet: Packet) -> Any:
    """The message; its tensors share the packet's body."""
    places, head = pickle.loads(packet.head)
    body = memoryview(packet.body)
    return pickle.loads(head, buffers=[body[start : start + size] for start, size in places])


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

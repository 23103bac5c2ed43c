"""Messages between processes: one pickle, and the bytes of every tensor straight from its storage, so that big batches are not copied."""

from __future__ import annotations

import io
import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from jackfield.batch import Batch

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

ALIGN = 64
"""In one block tensors start at multiples of this many bytes, enough for every element type and for vector loads."""
AT_ONCE = 512
"""Buffers that one system call takes (Linux: at most 1,024)."""


@dataclass(frozen=True)
class Packet:
    """A message as bytes."""

    head: bytes
    """The pickle without the tensors' elements."""
    body: Sequence[memoryview]
    """The elements of each tensor: the sender's own memory, until the packet is sent."""


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

    fields: dict[str, Any] = {"rollout_log_probs": None, "versions": None, **tensors}
    return Batch(
        **fields,
        extras=TensorDict(extras, [size]),
        scores=None if scores is None else TensorDict(scores, [size]),
        records=NonTensorStack(*[NonTensorData(r) for r in records]) if records else records,
        batch_size=[size],
    )


def pack(message: Any) -> Packet:
    """The message as bytes. Tensors arrive detached, on the CPU. Raises pickle.PicklingError and the like for what cannot travel."""
    stream, body = io.BytesIO(), []
    _Packer(stream, protocol=5, buffer_callback=lambda buffer: body.append(buffer.raw())).dump(message)
    return Packet(stream.getvalue(), body)


def unpack(packet: Packet) -> Any:
    """The message; its tensors share the packet's body."""
    return pickle.loads(packet.head, buffers=packet.body)


def send(connection: Connection, packet: Packet) -> None:
    """Write a packet. Raises OSError where the other side is gone."""
    head = pickle.dumps((packet.head, [len(part) for part in packet.body]))
    _all(os.writev, connection, [memoryview(len(head).to_bytes(8, "little") + head), *packet.body])


def receive(connection: Connection) -> Packet:
    """Read a packet. Raises EOFError or OSError where the other side is gone."""
    length = memoryview(bytearray(8))
    _all(os.readv, connection, [length])
    head = memoryview(bytearray(int.from_bytes(length, "little")))
    _all(os.readv, connection, [head])
    pickled, sizes = pickle.loads(head)
    body = [memoryview(np.empty(size, np.uint8)) for size in sizes]
    _all(os.readv, connection, body)
    return Packet(pickled, body)


def _all(move: Callable[[int, Sequence[memoryview]], int], connection: Connection, buffers: Sequence[memoryview]) -> None:
    """Read or write all of the buffers, straight from or into their memory (`Connection`'s own calls copy it two or three times)."""
    waiting = [buffer for buffer in buffers if len(buffer)][::-1]
    while waiting:
        moved = move(connection.fileno(), waiting[: -AT_ONCE - 1 : -1])
        if not moved:
            raise EOFError
        while moved:
            buffer = waiting.pop()
            if moved < len(buffer):
                waiting.append(buffer[moved:])
            moved -= min(moved, len(buffer))


def join(packet: Packet) -> tuple[bytes, np.ndarray]:
    """A packet as its head and one block, for carriers that are slow with many parts."""
    sizes = [len(part) for part in packet.body]
    block = np.empty(sum(-(-size // ALIGN) * ALIGN for size in sizes), np.uint8)
    start = 0
    for part in packet.body:
        block[start : start + len(part)] = part
        start += -(-len(part) // ALIGN) * ALIGN
    return pickle.dumps((packet.head, sizes)), block


def split(head: bytes, block: memoryview) -> Packet:
    """The packet that was joined; its body is in the block."""
    pickled, sizes = pickle.loads(head)
    body, start = [], 0
    for size in sizes:
        body.append(block[start : start + size])
        start += -(-size // ALIGN) * ALIGN
    return Packet(pickled, body)

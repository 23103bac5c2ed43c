"""Messages between processes: one pickle, and the bytes of every tensor straight from its storage, so that big batches are not copied."""

from __future__ import annotations

import functools
import io
import itertools
import math
import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jackfield.batch import Batch
from jackfield.components import Sample
from jackfield.microbatch import Share

ALIGN = 64
"""In one block tensors start at multiples of this many bytes, enough for every element type and for vector loads."""
SAMPLE = {"tokens": (np.int64, torch.int64), "log_probs": (np.float32, torch.float32), "versions": (np.int32, torch.int32)}
"""The arrays of a sample, as workers give them."""


@dataclass(frozen=True)
class Gathered:
    """Elements that are brought together where the message is written: rows of a tensor, or arrays one after the other."""

    size: int
    """Bytes."""
    into: Callable[[memoryview], Any]
    """Fill this many bytes."""

    def __len__(self) -> int:
        return self.size


@dataclass(frozen=True)
class Packet:
    """A message as bytes."""

    head: bytes
    """The pickle without the tensors' elements."""
    body: Sequence[memoryview | Gathered]
    """The elements of each tensor: the sender's own memory, until the packet is sent."""

    @property
    def sizes(self) -> list[int]:
        """Bytes of each part."""
        return [len(part) for part in self.body]

    def write(self, block: memoryview) -> None:
        """The body into a block of `span(sizes)` bytes."""
        for part, (start, end) in zip(self.body, places(self.sizes), strict=True):
            if isinstance(part, memoryview):
                block[start:end] = part
            elif end > start:
                part.into(block[start:end])

    def parts(self) -> list[memoryview]:
        """The body as memory, part by part."""
        return [part if isinstance(part, memoryview) else _filled(part) for part in self.body]


class Bundle(list[Any]):
    """Items of a stream that travel together: samples as one array of each kind for all, since each small array has its price."""


@dataclass(frozen=True)
class _Made:
    """Stands in a pickle for what a call returns."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]


class _Packer(pickle.Pickler):
    """Overrides nothing for numbers and strings, of which there are millions; a `persistent_id` would be called for each."""

    def __init__(self, stream: io.BytesIO) -> None:
        body: list[memoryview | Gathered] = []
        late: dict[int, Gathered] = {}

        def part(buffer: pickle.PickleBuffer) -> None:  # a method would tie the pickler, and with it the batch, into a cycle
            body.append(late.pop(id(buffer), None) or buffer.raw())

        super().__init__(stream, protocol=5, buffer_callback=part)
        self.body, self.late = body, late

    def reducer_override(self, obj: Any) -> Any:
        """Tensors leave the pickle. A batch is its fields: a tenth of the time of the container's own pickling."""
        kind = type(obj)
        if kind is Tensor or kind is torch.nn.Parameter:
            flat = obj.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            return _tensor, (pickle.PickleBuffer(flat.numpy()), obj.dtype, tuple(obj.shape))
        if kind is _Made:
            return obj.call, obj.arguments
        if kind is Batch:
            return _batch, _fields(obj, len(obj), lambda value: value, None if obj.records is None else list(obj.records))
        if kind is Share and obj.samples is not None:
            return Share, (self._chosen(obj.batch, obj.samples), obj.sizes)
        if kind is Bundle:
            return self._bundle(obj)
        return NotImplemented

    def _late(self, shape: tuple[int, ...], kind: torch.dtype, into: Callable[[Tensor], Any]) -> _Made:
        """A tensor whose elements are brought together later: an empty buffer here, which is a full one for whoever reads the message."""
        place = pickle.PickleBuffer(bytearray())
        self.late[id(place)] = Gathered(math.prod(shape) * kind.itemsize, lambda block: into(_tensor(block, kind, shape)))
        return _Made(_tensor, (place, kind, shape))

    def _chosen(self, batch: Batch, samples: Tensor) -> _Made:
        """Some samples of a batch, without the columns that are padding in all of them."""
        full, width = batch.tokens.shape, int(batch.lengths[samples].max())

        def rows(value: Tensor) -> _Made:
            value = (value[:, :width] if value.shape[:2] == full else value).detach().cpu()
            shape = (len(samples), *value.shape[1:])
            return self._late(shape, value.dtype, lambda out: torch.index_select(value, 0, samples, out=out))

        records = None if batch.records is None else list(batch.records)
        return _Made(_batch, _fields(batch, len(samples), rows, records and [records[i] for i in samples.tolist()]))

    def _bundle(self, items: Bundle) -> Any:
        if not all(type(i) is Sample and _usual(i) for i in items) or not items:
            return list, (list(items),)
        lengths = [len(i.tokens) for i in items]
        columns = [
            self._late((sum(lengths),), kind, functools.partial(_joined, [getattr(i, name) for i in items]))
            for name, (_, kind) in SAMPLE.items()
        ]
        return _samples, ([(i.request_id, i.index, i.finish_reason) for i in items], lengths, *columns)


def _usual(sample: Sample) -> bool:
    """Whether its sequences are arrays of one length, of the types that workers give."""
    arrays: dict[str, Any] = {name: getattr(sample, name) for name in SAMPLE}
    return all(type(a) is np.ndarray and a.dtype == SAMPLE[n][0] and a.shape == arrays["tokens"].shape for n, a in arrays.items())


def _joined(arrays: Sequence[Any], out: Tensor) -> None:
    np.concatenate(arrays, out=out.numpy())


def _samples(rest: Sequence[tuple[int, int, str]], lengths: Sequence[int], *columns: Tensor) -> list[Sample]:
    tokens, log_probs, versions = (column.numpy() for column in columns)
    own = [slice(end - length, end) for length, end in zip(lengths, itertools.accumulate(lengths), strict=True)]
    return [
        Sample(request, index, tokens[s], log_probs[s], versions[s], reason)  # type: ignore[arg-type]
        for (request, index, reason), s in zip(rest, own, strict=True)
    ]


def _tensor(elements: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not len(elements):
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(elements, dtype=torch.uint8).view(dtype).reshape(shape)


def _fields(batch: Batch, size: int, change: Callable[[Tensor], Any], records: list[Any] | None) -> tuple[Any, ...]:
    tensors, extras = ({n: change(v) for n, v in x.items() if isinstance(v, Tensor)} for x in (batch, batch.extras))
    scores = None if batch.scores is None else {n: change(v) for n, v in batch.scores.items() if isinstance(v, Tensor)}
    return size, tensors, extras, scores, records


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
    stream = io.BytesIO()
    packer = _Packer(stream)
    packer.dump(message)
    return Packet(stream.getvalue(), packer.body)


def unpack(packet: Packet) -> Any:
    """The message that has arrived; its tensors share the packet's body."""
    return pickle.loads(packet.head, buffers=packet.parts())


def places(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Where each part lies in one block."""
    start = 0
    for size in sizes:
        yield start, start + size
        start += -(-size // ALIGN) * ALIGN


def span(sizes: Sequence[int]) -> int:
    """Bytes of a block that holds parts of these sizes."""
    return sum(-(-size // ALIGN) * ALIGN for size in sizes)


def _filled(part: Gathered) -> memoryview:
    block = memoryview(np.empty(len(part), np.uint8))
    if len(part):
        part.into(block)
    return block


def join(packet: Packet) -> tuple[bytes, np.ndarray]:
    """A packet as its head and one block, for carriers that are slow with many parts."""
    block = np.empty(span(packet.sizes), np.uint8)
    packet.write(memoryview(block))
    return pickle.dumps((packet.head, packet.sizes)), block


def split(head: bytes, block: memoryview) -> Packet:
    """The packet that was joined; its body is in the block."""
    pickled, sizes = pickle.loads(head)
    return Packet(pickled, [block[start:end] for start, end in places(sizes)])

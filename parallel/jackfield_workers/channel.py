"""What carries messages between two processes of one host: small ones through the pipe, large ones in memory that both have mapped."""

from __future__ import annotations

import mmap
import os
import pickle
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle

import numpy as np

from jackfield_workers.wire import ALIGN, Packet, places, span

AT_ONCE = 512
"""Buffers that one system call takes (Linux: at most 1,024)."""
SHARED_FROM = 1 << 16
"""Bytes of tensors from which a message travels in shared memory."""
SEGMENTS = 16
"""Segments a side lends at most. Where the other side holds on to all of them messages go through the pipe, which makes the sender wait."""


class Segment:
    """Memory without a name, which ends with the last process that has it, however that ends. Byte 0: whether it is lent."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.descriptor = number, os.memfd_create("jackfield")
        self.grow(size)

    def grow(self, size: int) -> None:
        """Make room for this many bytes and, so that it is rarely done again, up to twice as many: untouched memory is free."""
        size = 1 << (size - 1).bit_length()
        os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)


class Channel:
    """One end of a connection. A lent segment comes back when the receiver's last tensor in it is gone, whoever holds that.

    Raises EOFError or OSError where the other side is gone.
    """

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.lent: list[Segment] = []
        """Segments that this side writes; each is free or lent to the other side."""
        self.borrowed: dict[int, mmap.mmap] = {}
        """Segments of the other side by number."""

    def send(self, packet: Packet) -> None:
        """Write a packet."""
        sizes = packet.sizes
        segment, new = self._segment(ALIGN + span(sizes)) if sum(sizes) >= SHARED_FROM else (None, False)
        if segment is None:
            self._write((packet.head, sizes, None), packet.parts())
            return
        packet.write(memoryview(segment.memory)[ALIGN:])
        segment.memory[0] = 1
        self._write((packet.head, sizes, (segment.number, len(segment.memory), new)), [])
        if new:
            send_handle(self.connection, segment.descriptor, os.getpid())

    def receive(self) -> Packet:
        """Read a packet."""
        length = memoryview(bytearray(8))
        self._all(os.readv, [length])
        head = memoryview(bytearray(int.from_bytes(length, "little")))
        self._all(os.readv, [head])
        pickled, sizes, place = pickle.loads(head)
        if place is None:
            body = [memoryview(np.empty(size, np.uint8)) for size in sizes]
            self._all(os.readv, body)
            return Packet(pickled, body)
        number, size, new = place
        if new:
            descriptor = recv_handle(self.connection)
            self.borrowed[number] = mmap.mmap(descriptor, size)
            os.close(descriptor)
        memory = self.borrowed[number]
        block = np.frombuffer(memory, np.uint8, span(sizes), ALIGN)
        weakref.finalize(block, _give_back, memory, os.getpid()).atexit = False
        whole = memoryview(block)
        return Packet(pickled, [whole[start:end] for start, end in places(sizes)])

    def close(self) -> None:
        """Forget all segments; tensors in them stay valid."""
        for segment in self.lent:
            os.close(segment.descriptor)
        self.lent.clear()
        self.borrowed.clear()

    def _segment(self, size: int) -> tuple[Segment | None, bool]:
        """A free segment of this size, and whether the other side has to map it (anew); none where all that may be are lent."""
        free = sorted((s for s in self.lent if not s.memory[0]), key=lambda s: len(s.memory))
        for segment in free:
            if len(segment.memory) >= size:
                return segment, False
        if free:
            free[-1].grow(size)
            return free[-1], True
        if len(self.lent) == SEGMENTS:
            return None, False
        self.lent.append(Segment(len(self.lent), size))
        return self.lent[-1], True

    def _write(self, head: object, body: Sequence[memoryview]) -> None:
        pickled = pickle.dumps(head)
        self._all(os.writev, [memoryview(len(pickled).to_bytes(8, "little") + pickled), *body])

    def _all(self, move: Callable[[int, Sequence[memoryview]], int], buffers: Sequence[memoryview]) -> None:
        """Read or write all of the buffers, straight from or into their memory (`Connection`'s own calls copy it two or three times)."""
        waiting = [buffer for buffer in buffers if len(buffer)][::-1]
        while waiting:
            moved = move(self.connection.fileno(), waiting[: -AT_ONCE - 1 : -1])
            if not moved:
                raise EOFError
            while moved:
                buffer = waiting.pop()
                if moved < len(buffer):
                    waiting.append(buffer[moved:])
                moved -= min(moved, len(buffer))


def _give_back(memory: mmap.mmap, owner: int) -> None:
    if os.getpid() == owner:  # a child that the receiver has forked drops its copies of the tensors, not the tensors
        memory[0] = 0

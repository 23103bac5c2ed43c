"""What carries messages between two processes of one host: small ones through the pipe, large ones in memory that both have mapped."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import pickle
import resource
import weakref
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from socket import recv_fds, send_fds, socket

import numpy as np

from jackfield.errors import WorkerError
from jackfield_workers.wire import ALIGN, Packet, places, span

AT_ONCE = 512
"""Buffers that one system call takes (Linux: at most 1,024)."""
SHARED_FROM = 1 << 16
"""Bytes of tensors from which a message travels in shared memory."""
SEGMENTS = 16
"""Segments a side lends at most. Where the other side holds on to all of them, or the system gives no more, messages go through the pipe,
which makes the sender wait."""


class Segment:
    """Memory without a name, which ends with the last process that has it, however that ends. Byte 0: whether it is lent."""

    def __init__(self, number: int, size: int) -> None:
        self.number, self.descriptor = number, os.memfd_create("jackfield")
        try:
            self.grow(size)
        except OSError:
            os.close(self.descriptor)
            raise

    def grow(self, size: int) -> None:
        """Make room for this many bytes and, so that it is rarely done again, up to twice as many: untouched memory is free."""
        size = 1 << (size - 1).bit_length()
        os.ftruncate(self.descriptor, size)
        self.memory = mmap.mmap(self.descriptor, size)


class Channel:
    """One end of a connection. A lent segment comes back when the receiver's last tensor in it is gone, whoever holds that.

    Raises EOFError or OSError where the other side is gone, WorkerError where this process cannot take what comes.
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
            with _socket(self.connection) as carrier:
                send_fds(carrier, [b"\0"], [segment.descriptor])

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
            self.borrowed[number] = self._mapped(size)
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
        """A free segment of this size, and whether the other side has to map it (anew); none where no more can be had."""
        free = sorted((s for s in self.lent if not s.memory[0]), key=lambda s: len(s.memory))
        for segment in free:
            if len(segment.memory) >= size:
                return segment, False
        with contextlib.suppress(OSError):  # too many open files, no memory, a limit, or memfd_create forbidden: there is the pipe
            if free:
                free[-1].grow(size)
                return free[-1], True
            if len(self.lent) < SEGMENTS:
                self.lent.append(Segment(len(self.lent), size))
                return self.lent[-1], True
        return None, False

    def _mapped(self, size: int) -> mmap.mmap:
        """The segment whose descriptor comes next."""
        with _socket(self.connection) as carrier:
            byte, descriptors, *_ = recv_fds(carrier, 1, 1)
        if not byte:
            raise EOFError
        try:
            if not descriptors:  # the kernel drops what finds no place in the table of open files
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return mmap.mmap(descriptors[0], size)
        except OSError as error:
            files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
            raise WorkerError(
                f"a segment of {size} bytes of shared memory cannot be read: {error.strerror}; "
                f"raise this process's limits (`ulimit -n`, now {files} open files; `ulimit -v`)"
            ) from error
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

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


@contextlib.contextmanager
def _socket(connection: Connection) -> Iterator[socket]:
    """The connection as a socket, which can pass descriptors; multiprocessing's own calls take one more descriptor for it."""
    carrier = socket(fileno=connection.fileno())
    try:
        yield carrier
    finally:
        carrier.detach()


def _give_back(memory: mmap.mmap, owner: int) -> None:
    if os.getpid() == owner:  # a child that the receiver has forked drops its copies of the tensors, not the tensors
        memory[0] = 0

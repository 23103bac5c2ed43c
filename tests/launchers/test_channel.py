"""Large messages in shared memory: what arrives is what was sent, stays as it is while somebody has it, and leaves nothing behind."""

import contextlib
import gc
import os
import resource
import signal
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch

from jackfield import microbatch
from jackfield.components import Sample
from jackfield.errors import WorkerError
from jackfield.testing.models import random_batch
from jackfield.worker import as_array
from jackfield_workers import channel, fork
from jackfield_workers.channel import Channel
from jackfield_workers.group import FLUSH_ITEMS, FLUSH_SECONDS, _stream, bundles
from jackfield_workers.wire import Bundle, join, pack, split, unpack

BIG = channel.SHARED_FROM


@pytest.fixture
def ends():
    """Both ends of a connection."""
    return tuple(Channel(end) for end in Pipe())


def through(ends, message):
    ends[0].send(pack(message))
    return unpack(ends[1].receive())


def same(a, b):
    assert a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.contiguous().view(torch.uint8))


def test_tensors_of_every_kind_in_one_large_message(ends):
    torch.manual_seed(0)
    kinds = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool]
    sent = [(torch.rand(3, 7) * 9).to(kind) for kind in kinds]
    sent += [torch.rand(5, 6, 4).transpose(0, 2), torch.arange(100)[::7], torch.tensor(2.5)[None], torch.tensor([torch.nan, -0.0])]
    sent += [torch.empty(0), torch.empty(0, 4, dtype=torch.int32), torch.rand(300, 500).T, torch.empty(3, 0)]
    got = through(ends, {"x": sent, "text": "y"})
    assert len(ends[0].lent) == 1 and got["text"] == "y"
    for one, other in zip(got["x"], sent, strict=True):
        same(one, other)


def test_a_message_stays_as_it_is_while_any_tensor_of_it_lives_and_its_memory_is_used_again(ends):
    first = through(ends, [torch.full((BIG,), 1, dtype=torch.uint8), torch.full((10,), 1)])
    kept = first[1][2:4]
    del first
    second = through(ends, torch.full((BIG,), 2, dtype=torch.uint8))
    assert kept.tolist() == [1, 1] and set(second.tolist()) == {2} and len(ends[0].lent) == 2
    second += 1  # what arrives can be written to
    del kept, second
    for value in range(5):
        assert set(through(ends, torch.full((BIG,), value, dtype=torch.uint8)).tolist()) == {value}
    assert len(ends[0].lent) == 2


def test_a_segment_grows_with_what_it_carries(ends):
    for size in (BIG, 3 * BIG, 40 * BIG, BIG):
        sent = torch.randint(0, 255, (size,), dtype=torch.uint8)
        same(through(ends, sent), sent)
    assert [len(segment.memory) for segment in ends[0].lent] == [64 * BIG]


def test_where_the_receiver_keeps_everything_messages_go_through_the_pipe(ends, monkeypatch):
    monkeypatch.setattr(channel, "SEGMENTS", 2)
    kept = [through(ends, torch.full((BIG,), value, dtype=torch.uint8)) for value in range(4)]
    assert [set(x.tolist()) for x in kept] == [{0}, {1}, {2}, {3}] and len(ends[0].lent) == 2


@contextlib.contextmanager
def limited(kind, most):
    """At most so much of a resource for this process."""
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


@pytest.fixture
def room():
    """`room(count)`: a context in which this process can open `count` more files."""
    opened = []

    def within(count):
        last = max(int(name) for name in os.listdir("/proc/self/fd"))
        while not opened or opened[-1] < last:
            opened.append(os.open(os.devnull, os.O_RDONLY))
        return limited(resource.RLIMIT_NOFILE, opened[-1] + 1 + count)

    yield within
    for descriptor in opened:
        os.close(descriptor)


def piped(ends, message):
    """As `through`, for more than a pipe holds: reading begins before writing ends."""
    got = []
    receiver = threading.Thread(target=lambda: got.append(unpack(ends[1].receive())), daemon=True)
    receiver.start()
    ends[0].send(pack(message))
    receiver.join(timeout=20)
    return got.pop()


def test_where_the_system_gives_no_more_memory_messages_go_through_the_pipe(ends, room):
    sent = torch.arange(BIG // 8)
    files = len(os.listdir("/proc/self/fd"))
    with limited(resource.RLIMIT_FSIZE, BIG // 2):
        same(piped(ends, sent), sent)
    assert not ends[0].lent
    assert len(os.listdir("/proc/self/fd")) == files
    with room(0):
        same(piped(ends, sent), sent)
    assert not ends[0].lent
    same(piped(ends, sent), sent)
    with limited(resource.RLIMIT_FSIZE, BIG // 2):  # the segment that is there cannot grow, and stays in use
        more = torch.arange(BIG // 4)
        same(piped(ends, more), more)
        same(piped(ends, sent), sent)
    assert len(ends[0].lent) == 1


@pytest.mark.parametrize("free", [2, 3])  # a segment takes two at each end: its own and the one that mmap keeps
def test_a_receiver_that_can_open_no_file_says_so(ends, room, free):
    with room(free), pytest.raises(WorkerError, match=r"^a segment of \d+ bytes .*: Too many open files; raise .* now \d+ open files"):
        through(ends, torch.ones(BIG))


def test_a_forked_child_of_the_receiver_does_not_give_memory_back(ends):
    kept = [through(ends, torch.ones(BIG))]
    pid = os.fork()
    if not pid:
        kept.clear()
        gc.collect()
        os._exit(0)
    os.waitpid(pid, 0)
    assert ends[0].lent[0].memory[0] == 1
    kept.clear()
    assert ends[0].lent[0].memory[0] == 0


def joined(_, message):
    head, block = join(pack(message))
    return unpack(split(head, memoryview(block)))


@pytest.mark.parametrize("carry", [through, joined])
@pytest.mark.parametrize("size", [3, 200], ids=["pipe", "shared"])
def test_a_share_arrives_as_its_own_samples(ends, carry, size):
    batch = random_batch(size).with_extras(pair=torch.rand(size, 3), flag=torch.arange(size))
    batch = batch.replace(scores=batch.extras.empty().update({"a": torch.rand(size)}), records=[{"row": i} for i in range(size)])
    short = int(batch.lengths.argsort()[1])
    for bins in ([[2, 0], [1]], [[short], []], [[], []]):
        share = microbatch.share(batch, bins)
        wanted, (got,) = batch[share.samples].trim(), carry(ends, [share])
        assert got.samples is None and got.sizes == [len(b) for b in bins] and got.batch.tokens.shape == wanted.tokens.shape
        for name, value in wanted.items():
            if isinstance(value, torch.Tensor):
                same(getattr(got.batch, name), value)
        for name, value in wanted.extras.items():
            same(got.batch.extras[name], value)
        same(got.batch.scores["a"], wanted.scores["a"])
        assert [dict(r) for r in got.batch.records] == [dict(r) for r in wanted.records]
        for one, other in zip(microbatch.cut(got, torch.device("cpu")), microbatch.cut(share, torch.device("cpu")), strict=True):
            same(one.tokens, other.tokens)


def sample(index, length):
    tokens = np.arange(length, dtype=np.int64) + index
    return Sample(7, index, tokens, -tokens.astype(np.float32), np.full(length, index, np.int32), "stop")


@pytest.mark.parametrize("carry", [through, joined])
@pytest.mark.parametrize("lengths", [[5, 0, 3], [5000, 1, 9000], []], ids=["pipe", "shared", "none"])
def test_samples_travel_as_a_bundle(ends, carry, lengths):
    sent = Bundle(sample(i, n) for i, n in enumerate(lengths))
    got = carry(ends, sent)
    assert [(s.request_id, s.index, s.finish_reason) for s in got] == [(7, i, "stop") for i in range(len(lengths))]
    for one, other in zip(got, sent, strict=True):
        for name in ("tokens", "log_probs", "versions"):
            a, b = getattr(one, name), getattr(other, name)
            assert a.dtype == b.dtype and np.array_equal(a, b)


@pytest.mark.parametrize("odd", ["a", Sample(1, 2, [3], [-0.5], [0], "stop")], ids=["no sample", "lists"])
def test_a_bundle_of_other_things_is_a_list(ends, odd):
    got = through(ends, Bundle([sample(0, 2), odd]))
    assert got[1] == odd and got[0].tokens.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("values", "kind"),
    [([], "q"), ([], "f"), ([1, -(2**62)], "q"), ([7, 0], "i"), ([-0.1, -0.0, 1 / 3, float("-inf"), float("nan")], "f"), ((1, 2), "q")],
)
def test_an_engines_lists_become_the_arrays_that_numpy_makes_of_them(values, kind):
    got, wanted = as_array(values, kind), np.asarray(values, kind)
    assert got.dtype == wanted.dtype and got.tobytes() == wanted.tobytes() and got.flags.writeable


def test_no_item_of_a_stream_waits_for_the_next():
    """The engine is busy for as long as it takes until what it has given so far has arrived."""
    arrived, waited = [], []

    def items():
        yield from range(3)
        start = time.monotonic()
        while len(arrived) < 3 and time.monotonic() - start < 20:
            time.sleep(0.001)
        waited.append(time.monotonic() - start)
        yield 3

    _stream(items(), arrived.extend)
    assert arrived == [0, 1, 2, 3] and waited[0] < 10 + FLUSH_SECONDS
    assert not [t for t in threading.enumerate() if t.name == "stream"]


def test_items_that_come_together_travel_together():
    found = []
    _stream(range(10 * FLUSH_ITEMS), lambda bundle: found.append(list(bundle)))
    assert [i for b in found for i in b] == list(range(10 * FLUSH_ITEMS)) and len(found) < 30
    assert [i for b in bundles(range(100)) for i in b] == list(range(100))


def test_what_goes_wrong_in_a_stream_is_raised():
    def broken(bundle):
        raise ValueError("cannot travel")

    def slowly():
        yield 1
        time.sleep(3 * FLUSH_SECONDS)

    def raises():
        yield 1
        raise KeyError("engine")

    with pytest.raises(ValueError, match="cannot travel"):
        _stream(slowly(), broken)
    with pytest.raises(KeyError, match="engine"):
        _stream(raises(), lambda bundle: None)


def mapped():
    return Path("/proc/self/maps").read_text().count("memfd:jackfield")


def test_a_killed_worker_leaves_nothing_behind(fake):
    gc.collect()
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    launcher = fork.ForkLauncher(fork.ForkLauncher.Config(workers=2, device="cpu"))
    group = launcher.start(fake(), ["policy"])["policy"]
    try:
        group.call("setup", "policy")
        with pytest.raises(WorkerError):  # the worker has no such method: what matters is that the message was large
            group.call("nothing", torch.ones(BIG))
        assert mapped() > before
        os.kill(group.processes[1].pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match=r"policy worker 1 of 2 \(pid \d+\) was killed by signal 9"):
            group.call("setup", "policy")
    finally:
        launcher.stop()
    assert mapped() == before
    del group, launcher
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= files + 1  # the zygote's, if this was the first run
    assert not [name for name in os.listdir("/dev/shm") if "jackfield" in name]

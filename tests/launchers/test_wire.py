"""Messages arrive as they were sent."""

import gc
import pickle
import weakref
from multiprocessing import Pipe

import pytest
import torch

from jackfield.batch import Batch, Prompt, Trajectory
from jackfield.components import LossSums, OutputRequest, Outputs
from jackfield.microbatch import share
from jackfield_workers.channel import Channel
from jackfield_workers.wire import pack, unpack


def a_batch():
    items = [
        Trajectory(
            Prompt(7, {}), [1, 2, 3, 4], 2, [False, False, True, True], [0, 0, -0.5, -0.25], [0, 0, 3, 3], "stop", {"response": "ab"}
        ),
        Trajectory(Prompt(8, {}), [1, 2, 3], 2, [False, False, True], [0, 0, -1.0], [0, 0, 3], "length", {"response": "c", "n": [1]}),
    ]
    batch = Batch.from_trajectories(items, group_size=1).with_extras(entropy=torch.rand(2, 4))
    return batch.replace(scores=batch.extras.empty().update({"a": torch.ones(2)}), rewards=torch.tensor([1.0, 2.0]))


def same(a, b):
    assert (a is None) == (b is None)
    assert a is None or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))


def test_a_batch_arrives_whole():
    batch = a_batch()
    (got,) = unpack(pack([batch]))
    assert type(got) is Batch and len(got) == 2
    for name in ("tokens", "lengths", "response_mask", "rollout_log_probs", "versions", "finish_reasons", "rewards", "advantages"):
        same(getattr(batch, name), getattr(got, name))
    same(batch.extras["entropy"], got.extras["entropy"])
    same(batch.scores["a"], got.scores["a"])
    assert [dict(r) for r in got.records] == [dict(r) for r in batch.records]
    same(got.trim().clean().tokens, batch.tokens)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.rand(3, 5).T,
        torch.rand(2, 3, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.empty(0, 4),
        torch.tensor(3.5, dtype=torch.float64),
        torch.arange(10)[::3],
        torch.nn.Parameter(torch.ones(2)),
    ],
    ids=["transposed", "bfloat16", "bool", "empty", "scalar", "strided", "parameter"],
)
def test_tensors_of_every_kind(tensor):
    got = unpack(pack({"x": (tensor, tensor)}))["x"]
    same(got[0], tensor.detach())
    same(got[1], tensor.detach())
    assert not got[0].requires_grad


def test_what_arrives_can_be_written_to():
    got = unpack(pack(torch.zeros(3)))
    got += 1
    assert got.tolist() == [1, 1, 1]


def test_the_contracts_other_types():
    message = (Outputs(log_probs=torch.ones(1, 2)), LossSums({"loss": torch.tensor(1.0)}), OutputRequest(top_k=3))
    outputs, sums, request = unpack(pack(message))
    same(outputs.log_probs, torch.ones(1, 2))
    assert outputs.values is None and float(sums.sums["loss"]) == 1.0 and request == message[2]


def test_through_a_pipe_in_order():
    ours, theirs = (Channel(end) for end in Pipe())
    for n in (0, 5):
        ours.send(pack(torch.arange(n)))
    assert [len(unpack(theirs.receive())) for _ in range(2)] == [0, 5]
    ours.connection.close()
    with pytest.raises(EOFError):
        theirs.receive()


def test_what_cannot_travel_says_so():
    with pytest.raises((pickle.PicklingError, AttributeError, TypeError)):
        pack(lambda: None)


def test_a_sent_batch_is_gone_with_its_last_name():
    """Not when the garbage collector comes by: steps of large batches would be held meanwhile."""
    batch = a_batch()
    gone = weakref.ref(batch)
    gc.disable()
    try:
        pack((share(batch, [[0], [1]]), batch))
        del batch
        assert gone() is None
    finally:
        gc.enable()

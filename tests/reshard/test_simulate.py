"""The simulator's arithmetic on plans small enough to do by hand."""

import pytest

from jackfield_reshard.classes import between
from jackfield_reshard.families import Tensor
from jackfield_reshard.layout import Layout
from jackfield_reshard.plan import plan
from jackfield_reshard.simulate import gather_everything, simulate
from jackfield_reshard.topology import Topology

TABLE = [Tensor("model.layers.{}.mlp.up_proj.weight", (1024, 1024), "rows", layers=(0, 1, 2, 3))]
MODEL = 4 * 1024 * 1024 * 2
"""Bytes in bfloat16."""


@pytest.mark.parametrize(("per_node", "rate"), [(8, 2e9), (1, 1e9)])
def test_half_the_model_over_the_link(per_node, rate):
    """TP 2 to two whole replicas: each GPU has half and receives half, inside a node or between nodes."""
    topology = Topology.colocated(2, nvlink=2e9, network=1e9, memory=1e15, latency=0.0, gpus_per_node=per_node)
    made = plan(between(TABLE, Layout("megatron", tp=2), Layout("vllm", dp=2)), topology, "identity")
    assert simulate(made).total == pytest.approx(MODEL / 2 / rate)


def test_a_copy_moves_each_byte_twice():
    topology = Topology.colocated(1, memory=1e9, latency=0.0)
    made = plan(between(TABLE, Layout("torch"), Layout("vllm")), topology, "identity")
    assert simulate(made).total == simulate(made).copy == pytest.approx(2 * MODEL / 1e9)
    assert simulate(made, alias=True).total == 0


def test_latency_counts_for_every_bucket():
    topology = Topology.colocated(2, nvlink=1e15, memory=1e18, latency=1.0)
    made = plan(between(TABLE, Layout("megatron", tp=2), Layout("vllm", dp=2)), topology, "identity")
    assert simulate(made, bucket_bytes=4 * MODEL // 4).total == pytest.approx(1 + 2)


def test_gathering_everything():
    """All but its own share over the link, then three copies of the model and one of the engine's part."""
    topology = Topology.colocated(4, nvlink=2e9, memory=1e9)
    assert gather_everything(8e9, 4, 1e9, topology).total == pytest.approx(6 / 2 + 2 * (3 * 8 + 1))
    apart = Topology.separate(4, 4, nvlink=2e9, network=1e9, memory=1e9)
    assert gather_everything(8e9, 4, 1e9, apart, 4).total == pytest.approx(6 / 2 + 8 / 1 + 2 * (3 * 8 + 1)), "and once more to the engines"

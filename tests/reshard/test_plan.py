"""The plan's promises over random models and layouts: coverage, bit equality, the lower bound, balance, placement."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from jackfield.errors import ConfigError
from jackfield_reshard.classes import TensorClass, between, of
from jackfield_reshard.families import tensors
from jackfield_reshard.flows import fill
from jackfield_reshard.layout import Layout
from jackfield_reshard.plan import plan
from jackfield_reshard.sides import Holding, shards
from jackfield_reshard.topology import Topology

settings.register_profile("plan", deadline=None, max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("plan")

POWERS = st.sampled_from([1, 2, 4, 8])


@st.composite
def models(draw, scale=1):
    """A model of any family: grouped queries, experts, ties, biases, buffers."""
    groups = draw(st.sampled_from([1, 2, 4, 8]))
    config = {
        "model_type": draw(st.sampled_from(["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v3"])),
        "vocab_size": draw(st.integers(9, 40)) * scale,
        "hidden_size": 16 * scale,
        "intermediate_size": 16 * scale,
        "num_hidden_layers": draw(st.integers(1, 6)),
        "num_attention_heads": 8,
        "num_key_value_heads": groups,
        "head_dim": 2 * scale,
        "tie_word_embeddings": draw(st.booleans()),
    }
    experts = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts", "deepseek_v3": "n_routed_experts"}
    if config["model_type"] in experts:
        config |= {experts[config["model_type"]]: 8, "moe_intermediate_size": 8 * scale, "first_k_dense_replace": draw(st.integers(0, 1))}
        config |= {
            "q_lora_rank": 8,
            "kv_lora_rank": 4,
            "qk_nope_head_dim": 2,
            "qk_rope_head_dim": 2,
            "v_head_dim": 2,
            "n_shared_experts": 1,
        }
    return config


@st.composite
def layouts(draw, kinds, depth, most=64):
    """Any layout up to `most` ranks."""
    kind = draw(st.sampled_from(kinds))
    if kind == "fsdp":
        return Layout("fsdp", dp=draw(st.integers(1, most)))
    tp, dp, cp = draw(POWERS), draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([1, 1, 2])) if kind == "megatron" else 1
    pp = draw(st.integers(1, min(4, depth))) if kind == "megatron" else 1
    vpp = 2 if pp > 1 and depth >= 2 * pp and draw(st.booleans()) else 1
    ep = draw(st.sampled_from([e for e in (1, 2, 4, 8) if tp * dp * cp % e == 0]))
    assume(tp * pp * dp * cp <= most)
    chunks = ()
    if pp > 1 and depth > pp * vpp and draw(st.booleans()):  # uneven stages
        sizes = [1] * (pp * vpp)
        for _ in range(depth - pp * vpp):
            sizes[draw(st.integers(0, pp * vpp - 1))] += 1
        chunks = tuple(sizes)
    multiple = draw(st.sampled_from([1, 4, 64]))
    return Layout(kind, tp=tp, pp=pp, dp=dp, cp=cp, ep=ep, vpp=vpp, chunks=chunks, vocabulary_multiple=multiple)


def place(draw, source, destination):
    per_node = draw(st.sampled_from([1, 2, 4, 8, 64]))
    if draw(st.booleans()):
        return Topology.separate(source.world, destination.world, gpus_per_node=per_node)
    return Topology.colocated(source.world, destination.world, gpus_per_node=per_node)


def cut(array, box):
    return array[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


def execute(made):
    """Carry the plan out on arrays; returns what each (destination rank, tensor) holds, and how often each element was written."""
    held, got, count = {}, {}, {}
    for tensor_class in made.classes:
        truth = np.arange(np.prod(tensor_class.shape)).reshape(tensor_class.shape)
        for name in tensor_class.names:
            for rank, *box in zip(tensor_class.source.ranks, tensor_class.source.offset, tensor_class.source.size, strict=True):
                mine = held.setdefault((int(rank), name), np.full(tensor_class.shape, -1))
                cut(mine, box)[...] = cut(truth, box)
            for rank in np.unique(tensor_class.destination.ranks):
                got[int(rank), name] = np.full(tensor_class.shape, -1)
                count[int(rank), name] = np.zeros(tensor_class.shape, int)
    for move in made.moves():
        cut(got[move.destination, move.name], move.box)[...] = cut(held[move.source, move.name], move.box)
        cut(count[move.destination, move.name], move.box)[...] += 1
    return got, count


def check(made):
    got, count = execute(made)
    for tensor_class in made.classes:
        truth = np.arange(np.prod(tensor_class.shape)).reshape(tensor_class.shape)
        for name in tensor_class.names:
            wanted = {}
            need = tensor_class.destination
            for rank, *box in zip(need.ranks, need.offset, need.size, strict=True):
                cut(wanted.setdefault(int(rank), np.zeros(tensor_class.shape, int)), box)[...] = 1
            for rank, mask in wanted.items():
                assert (count[rank, name] == mask).all(), "every element that is needed is written once, and no other"
                assert (got[rank, name][mask == 1] == truth[mask == 1]).all()


@given(st.data(), models())
def test_any_model_between_any_layouts(data, config):
    table = tensors(config)
    depth = config["num_hidden_layers"]
    source = data.draw(layouts(["fsdp", "megatron"], depth))
    destination = data.draw(layouts(["vllm", "megatron"], depth))
    topology = place(data.draw, source, destination)
    made = plan(between(table, source, destination), topology, data.draw(st.sampled_from(["identity", "overlap"])), split_bytes=0)
    proof = made.prove()
    assert proof.errors == ()
    assert (proof.received == proof.bound).all()
    check(made)


@settings(max_examples=25)
@given(st.data(), models())
def test_shards_and_closed_form_plan_the_same(data, config):
    """The tables' metadata shards, gathered and aligned as the transports do it, give the bytes of the closed form."""
    table = tensors(config)
    depth = config["num_hidden_layers"]
    source, destination = data.draw(layouts(["fsdp", "megatron"], depth, 16)), data.draw(layouts(["vllm"], depth, 16))
    topology = Topology.colocated(source.world, destination.world)
    closed = plan(between(table, source, destination), topology)
    classes, _, _ = of(
        [shards(table, source, rank) for rank in range(source.world)],
        [shards(table, destination, rank) for rank in range(destination.world)],
    )
    listed = plan(classes, topology)
    assert listed.prove().errors == ()
    assert (closed.prove().received == listed.prove().received).all()
    assert closed.bytes_local == listed.bytes_local


@given(st.data(), models(scale=64))
def test_senders_are_balanced_as_far_as_the_layout_allows(data, config):
    table = tensors(config | {"num_hidden_layers": 4, "vocab_size": 4096})
    source = data.draw(layouts(["megatron", "fsdp"], 4))
    destination = data.draw(layouts(["vllm"], 4))
    topology = place(data.draw, source, destination)
    proof = plan(between(table, source, destination), topology, split_bytes=0).prove()
    assert proof.imbalance <= 1.05 * proof.least_imbalance


@pytest.mark.parametrize("tp,pp,serve", [(8, 8, 8), (8, 4, 2), (4, 2, 2), (8, 1, 2), (2, 8, 2), (4, 4, 1)])
def test_hybridflow_bound(tp, pp, serve):
    """arXiv 2409.19256, table 2: a GPU receives (t p - tg)/(tg t p) of the model; senders balance within 5%.

    It supposes that a GPU's training shard lies in its generation shard (tg divides t) and that stages are equal (a small vocabulary).
    """
    config = {
        "model_type": "llama",
        "vocab_size": 1024,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
    }
    table = tensors(config)
    ranks = tp * pp
    classes = between(table, Layout("megatron", tp=tp, pp=pp), Layout("vllm", tp=serve, dp=ranks // serve))
    made = plan(classes, Topology.colocated(ranks, gpus_per_node=ranks), "overlap")
    model = sum(np.prod(t.shape) * len(t.layers) * 2 for t in table)
    share = made.prove().received.mean() / model
    assert share == pytest.approx((ranks - serve) / (serve * ranks), rel=1e-3)
    assert made.imbalance < 1.05


def test_placing_engine_ranks_finds_the_best_permutation():
    """Training tp 4, engine tp 2: ranks 0 and 1 hold the first half, so both should serve it."""
    table = tensors({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})
    classes = between(table, Layout("megatron", tp=4), Layout("vllm", tp=2, dp=2))
    topology = Topology.colocated(4)
    placed = plan(classes, topology, "overlap")
    best = min(plan(classes, Topology(np.arange(4), np.array(p))).bytes_sent for p in permutations(range(4)))
    assert placed.bytes_sent == best < plan(classes, topology).bytes_sent
    assert sorted(placed.assignment) == [0, 1, 2, 3]


def test_near_holders_are_preferred():
    """Two nodes of two GPUs, data parallel training over the nodes: nothing crosses."""
    table = tensors({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})
    made = plan(between(table, Layout("megatron", tp=2, dp=2), Layout("vllm", dp=4)), Topology.colocated(4, gpus_per_node=2))
    assert made.received[2].sum() == 0 < made.received[1].sum()


def test_overlapping_holders_of_different_extent():
    """One rank holds all rows, another the first half: cells are cut so that each element still comes once."""
    have = Holding(np.array([0, 1]), np.array([[0], [0]]), np.array([[8], [4]]))
    need = Holding(np.array([0, 1, 2]), np.array([[0], [0], [2]]), np.array([[8], [8], [6]]))
    made = plan([TensorClass(("a",), (8,), "float32", "float32", have, need)], Topology.colocated(3))
    assert made.prove().errors == ()
    check(made)
    assert made.received[1:].sum(axis=0).tolist() == [0, 16, 24]


def test_a_hole_is_an_error():
    have = Holding(np.array([0]), np.array([[0]]), np.array([[6]]))
    need = Holding(np.array([0]), np.array([[4]]), np.array([[4]]))
    with pytest.raises(ConfigError, match=r"weight a: no source shard covers all of offset \[4\] size \[4\] of \[8\] \(2 of 4 elements"):
        plan([TensorClass(("a",), (8,), "float32", "float32", have, need)], Topology.colocated(1))


def test_a_broken_plan_fails_its_proof():
    table = tensors({"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4})
    made = plan(between(table, Layout("megatron", tp=4), Layout("vllm", tp=2, dp=2)), Topology.colocated(4))
    made.flows.pop()
    made.__post_init__()
    assert any("is written" in error for error in made.prove().errors)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 60), st.integers(1, 7))
def test_fill_levels_loads(load, units, weight):
    counts = fill(np.array(load), units, weight)
    assert counts.sum() == units and (counts >= 0).all()
    after = np.array(load) + counts * weight
    used = counts > 0
    if used.any():
        assert after[used].max() <= after.min() + weight, "no unit could move to a sender that would stay below"


def test_layout_ranks_and_coordinates():
    megatron = Layout("megatron", tp=2, cp=2, dp=3, pp=2)
    assert megatron.coordinates(13) == {"tp": 1, "cp": 0, "dp": 0, "pp": 1}
    vllm = Layout("vllm", tp=2, pp=2, dp=2)
    assert vllm.coordinates(5) == {"tp": 1, "cp": 0, "pp": 0, "dp": 1}
    for layout in (megatron, vllm, Layout("megatron", tp=2, dp=4, ep=4, pp=2)):
        for expert in (False, True):
            assert [layout.rank(expert, **layout.coordinates(r, expert)) for r in range(layout.world)] == list(range(layout.world))
    assert Layout("megatron", pp=2, vpp=2).stage_layers(8) == [(0, 1, 4, 5), (2, 3, 6, 7)]
    assert Layout("megatron", pp=2).stage_layers(7) == [(0, 1, 2, 3), (4, 5, 6)]
    with pytest.raises(ConfigError, match="must divide the 4 ranks"):
        Layout("megatron", tp=4, ep=3)

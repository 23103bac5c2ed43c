"""Box arithmetic against numpy: every operation on boxes is checked on the elements themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.errors import ConfigError
from jackfield.shard import Shard
from jackfield_reshard.boxes import intersect, recut, refine, split, subtract
from jackfield_reshard.canonical import align
from jackfield_reshard.checksum import checksum

settings.register_profile("quick", deadline=None, max_examples=60, derandomize=True)
settings.load_profile("quick")


def cut(array, box):
    return array[tuple(slice(o, o + n) for o, n in zip(*box, strict=True))]


@st.composite
def boxes_in(draw, shape):
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return offset, tuple(draw(st.integers(1, n - o)) for o, n in zip(offset, shape, strict=True))


SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple)


@given(st.data(), SHAPES)
def test_subtract_and_intersect_partition_a_box(data, shape):
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    common = intersect(a, b)
    count = np.zeros(shape, int)
    for part in [common, *subtract(a, common)] if common else [a]:
        cut(count, part)[...] += 1
    expected = np.zeros(shape, int)
    cut(expected, a)[...] = 1
    assert (count == expected).all()
    other = np.zeros(shape, int)
    cut(other, b)[...] = 1
    assert (common is None) == (not (expected & other).any())


@given(st.data(), st.lists(st.integers(1, 4), min_size=2, max_size=4).map(tuple))
def test_recut_keeps_elements(data, fine):
    """Merge neighbouring dimensions, draw a box of the merged shape, cut it to the fine one: the same elements, each once."""
    joins = data.draw(st.lists(st.booleans(), min_size=len(fine) - 1, max_size=len(fine) - 1))
    coarse = [fine[0]]
    for n, join in zip(fine[1:], joins, strict=True):
        if join:
            coarse[-1] *= n
        else:
            coarse.append(n)
    coarse = tuple(coarse)
    assert refine(coarse, fine) is not None
    box = data.draw(boxes_in(coarse))
    flat = np.arange(np.prod(fine))
    found = []
    for part, finer in recut(box, coarse, fine):
        elements = cut(flat.reshape(fine), finer).reshape(-1)
        assert (cut(flat.reshape(coarse), part).reshape(-1) == elements).all(), "the same elements in the same order"
        found.append(elements)
    assert sorted(np.concatenate(found)) == sorted(cut(flat.reshape(coarse), box).reshape(-1))


def test_refine():
    assert refine((8, 6), (2, 4, 6)) == (2, 4, 6)
    assert refine((48,), (8, 6)) == (8, 6)
    assert refine((4, 12), (16, 3)) == (4, 4, 3)
    assert refine((6, 4), (4, 6)) is None
    assert refine((2, 6), (3, 5)) is None


@given(SHAPES, st.integers(1, 40))
def test_split_covers_in_order(size, limit):
    flat = np.arange(np.prod(size)).reshape(size)
    parts = [cut(flat, box).reshape(-1) for box in split(size, limit)]
    assert all(len(part) <= limit for part in parts)
    assert (np.concatenate(parts) == flat.reshape(-1)).all()


def test_owners_that_write_experts_differently_agree():
    """Stacked and fused, stacked, and one by one under Mixtral's names: one canonical form, and views of the right elements."""
    experts, width, hidden = 3, 4, 2
    fused = torch.arange(experts * 2 * width * hidden).view(experts, 2 * width, hidden)
    stacked = Shard("model.layers.0.mlp.experts.gate_up_proj", tuple(fused.shape), (0, 0, 0), tuple(fused.shape), "int64", fused)
    single = [
        Shard(f"model.layers.0.block_sparse_moe.experts.{e}.{w}.weight", (width, hidden), (0, 0), (width, hidden), "int64")
        for e in range(experts)
        for w in ("w1", "w3")
    ]
    (mine,), (theirs,) = align([[stacked]], [single])
    assert {p.name for p in mine} == {p.name for p in theirs} == {f"model.layers.0.mlp.experts.{n}_proj.weight" for n in ("gate", "up")}
    gate, up = (p.view(fused) for p in mine)
    assert torch.equal(gate, fused[:, :width]) and torch.equal(up, fused[:, width:])
    assert sorted(p.offset[0] for p in theirs if "gate" in p.name) == [0, 1, 2]


def test_shapes_that_do_not_fit_are_an_error():
    def side(shape):
        return [[Shard("a.weight", shape, (0,) * len(shape), shape, "float32")]]

    with pytest.raises(ConfigError, match=r"a\.weight: one side has logical shape \[4, 6\], the other \[6, 4\]"):
        align(side((4, 6)), side((6, 4)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.int64])
def test_checksum_notices_every_change(dtype):
    """Also beyond one chunk of 2^20 elements."""
    values = torch.randint(0, 100, (6, 5), generator=torch.Generator().manual_seed(0)).to(dtype)
    total = checksum(values)
    assert total == checksum(values.t().contiguous().t()), "strides do not matter"
    swapped = values.clone()
    swapped[[0, 1]] = values[[1, 0]]
    assert checksum(swapped) != total
    for i in range(values.numel()):
        changed = values.clone()
        changed.view(-1)[i] += 1
        assert checksum(changed) != total
    long = torch.zeros((1 << 20) + 2, dtype=dtype)
    sums = []
    for i in (0, (1 << 20) - 1, 1 << 20, (1 << 20) + 1):
        long.zero_()[i] = 1
        sums.append(checksum(long))
    assert len(set(sums)) == 4

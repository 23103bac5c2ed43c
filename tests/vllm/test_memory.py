"""The memory's arithmetic, without vLLM."""

import itertools

import pytest

from jackfield.errors import ConfigError
from jackfield_vllm.arguments import capture_sizes
from jackfield_vllm.memory import GIB, Need, kv_budget

NEED = Need(weights=14 * GIB, token=128 * 1024, reserve=2 * GIB, max_model_len=8192)


def test_the_rest_is_for_the_cache():
    assert kv_budget(0.5, 80 * GIB, 60 * GIB, NEED) == 24 * GIB


def test_what_is_not_free_cannot_be_given():
    with pytest.raises(
        ConfigError, match=r"memory 0.9 x 80.00 GiB = 72.00 GiB, but 60.00 GiB are free \(others hold 20.00 GiB\).*most 0.75"
    ):
        kv_budget(0.9, 80 * GIB, 60 * GIB, NEED)


def test_one_sequence_must_fit():
    with pytest.raises(
        ConfigError,
        match=r"14.00 GiB \+ activations 2.00 GiB \+ one sequence of 8192 tokens x 128.0 KiB = 17.00 GiB; .*max_model_len to 4096",
    ):
        kv_budget(16.5 / 80, 80 * GIB, 60 * GIB, NEED)
    with pytest.raises(ConfigError, match=r"at least 0.22, or use more tensor parallelism"):
        kv_budget(0.1, 80 * GIB, 60 * GIB, NEED)


@pytest.mark.parametrize("most", [1, 7, 64, 256, 1000, 1024, 4096])
def test_captured_sizes_reach_the_most_and_pad_little(most):
    sizes = capture_sizes(most)
    assert sizes[-1] == most
    assert sizes == sorted(set(sizes))
    assert all(high <= low * 1.25 or high - low <= 8 for low, high in itertools.pairwise(sizes))

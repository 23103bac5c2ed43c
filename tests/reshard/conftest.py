"""Ranks for tests: processes forked from one import of torch, joined by gloo. `reshard_fakes.py` is imported from beside the tests."""

import sys
from pathlib import Path

import pytest

from jackfield.testing.ranks import run_ranks

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def ranks():
    """`ranks(world, body)`: run `body(rank, world)` in that many processes and return the results by rank."""

    def run(world, body, timeout=100.0):
        return run_ranks(world, lambda rank: body(rank, world), timeout=timeout)

    return run

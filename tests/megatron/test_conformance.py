"""Backend `megatron` under the public conformance kit (laws 1, 2, 4 to 8, 13, 15, 16, 24, 27, 29), in layouts that take different paths."""

from __future__ import annotations

import importlib.util
import multiprocessing
import tempfile
from collections.abc import Iterator

import megatron_reference as R
import pytest
import torch

from jackfield.testing.backend import BackendConformance
from jackfield.testing.processes import Ranks, _serve

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)
pytestmark = pytest.mark.megatron


class ForkedRanks(Ranks):
    """Ranks forked from this process, one as well as several: Megatron is imported once, and no process group is left here."""

    def __init__(self, world_size: int) -> None:
        R.import_everything()
        self.world_size, self.local = world_size, None
        context = multiprocessing.get_context("fork")
        store = tempfile.mktemp(prefix="jackfield-ranks-")
        self.pipes, self.processes = [], []
        for rank in range(world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, world_size, store, theirs), daemon=True)
            process.start()
            self.pipes.append(mine)
            self.processes.append(process)


class Conformance(BackendConformance):
    component = "megatron"

    @pytest.fixture(scope="class")
    @classmethod
    def ranks(cls) -> Iterator[Ranks]:
        """Forked instead of spawned."""
        ranks = ForkedRanks(cls.world_size)
        yield ranks
        ranks.close()


class TestOnePacked(Conformance):
    options = {"packing": True}
    model_options = {"tied": True}


class TestTensorAndPipeline(Conformance):
    options = {"tp": 2, "pp": 2}
    world_size = 4
    family = "qwen3"


class TestOverlappedDataParallel(Conformance):
    options = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    world_size = 2
    family = "qwen2"


class TestExperts(Conformance):
    options = {"ep": 2}
    world_size = 2
    family = "qwen3_moe"
    same_names = False


class TestContext(Conformance):
    options = {"cp": 2}
    world_size = 2


class TestBfloat16(Conformance):
    """Without AVX-512 other kernels round more often: a critic's norm is 0.0012 to 0.0024 off float32's, and 0.0012 between splits."""

    options = {"dtype": "bfloat16", "tp": 2}
    world_size = 2
    rtol = 1e-3 if torch.cpu._is_avx512_supported() else 2e-3


del Conformance

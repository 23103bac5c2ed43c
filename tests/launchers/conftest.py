import os
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent


@pytest.fixture
def fake(tmp_path):
    """A run of the fakes with overrides; the folder is the test's own."""
    from jackfield import load_config

    def config(*overrides, folder="run"):
        base = HERE.parent / "core" / "fake.yaml"
        return load_config(base, [f"dir={tmp_path / folder}", "steps=3", "trackers=[]", *overrides])

    return config


@pytest.fixture
def misbehave():
    """Overrides that make rank 1 of the policy go wrong."""

    def overrides(what, name="Misbehaving", **more):
        options = [f"policy.backend.{k}={v}" for k, v in {"what": what, **more}.items()] if name == "Misbehaving" else []
        return [f"policy.backend.name={HERE / 'misbehave.py'}:{name}", *options]

    return overrides

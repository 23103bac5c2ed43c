"""Laws 1 to 3 and 20 for training backends over several GPUs or processes: the public conformance kit, in the layouts of BENCH_LAYOUTS.

Run by bench/laws.py as `pytest bench/laws_backends.py`; BENCH_DEVICE says where.
"""

import os

import pytest
from laws import COMPONENTS, LAWS, LAYOUTS

from jackfield.testing.backend import BackendConformance

DEVICE = os.environ.get("BENCH_DEVICE", "cpu")
if DEVICE == "cpu":  # once, for all processes that are forked
    from jackfield_megatron import shim

    with shim.scope():
        import jackfield_megatron.model
        import jackfield_megatron.update  # noqa: F401


def _case(name: str) -> type:
    backend, ranks, options, family = LAYOUTS[name]
    component = COMPONENTS[backend]
    made: type = type(name, (BackendConformance,), {"component": component, "options": options, "family": family})
    made.world_size, made.device, made.__test__ = ranks, DEVICE, True
    for method in [m for m in dir(BackendConformance) if m.startswith("test_") and m not in LAWS]:
        setattr(made, method, None)
    made.pytestmark = [pytest.mark.timeout(240)]
    return made


for _name in os.environ.get("BENCH_LAYOUTS", " ".join(LAYOUTS)).split():
    globals()["Test" + _name.title().replace("-", "")] = _case(_name)

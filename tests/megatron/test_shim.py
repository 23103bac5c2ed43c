"""The CPU shim: each patch is needed by this Megatron-Core, matches it, and is gone outside the scope."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys

import pytest
import torch

if importlib.util.find_spec("megatron") is None:
    pytest.skip("needs megatron-core", allow_module_level=True)
pytestmark = [pytest.mark.megatron, pytest.mark.skipif(torch.cuda.is_available(), reason="the shim does nothing where there is CUDA")]


def _patches() -> list:
    from jackfield_megatron.shim import PATCHES

    return list(PATCHES)


@pytest.mark.parametrize("patch", _patches(), ids=lambda p: f"{p.module}.{p.name}")
def test_patch_is_still_needed(patch) -> None:
    """The name exists where it is patched, and Megatron-Core's source still uses it."""
    from jackfield_megatron import shim

    shim.import_megatron()
    assert hasattr(importlib.import_module(patch.module), patch.name)
    module, text = patch.used_by
    assert text in inspect.getsource(importlib.import_module(module)), f"{module} lacks {text!r}: drop the patch of {patch.name}"


def test_scope_takes_everything_back() -> None:
    """Inside, names are replaced and "cuda" means the CPU; outside, also after an exception, all is as before."""
    from jackfield_megatron import shim

    shim.import_megatron()
    before = [getattr(importlib.import_module(p.module), p.name) for p in shim.PATCHES]
    with pytest.raises(KeyError), shim.scope(), shim.scope():
        assert torch.zeros(1, device="cuda", pin_memory=True).device.type == "cpu"
        assert torch.zeros(1).cuda().device.type == "cpu"
        assert torch.zeros(1).type() == "torch.cuda.FloatTensor"
        assert torch.cuda.current_device() == torch.device("cpu")
        raise KeyError
    assert [getattr(importlib.import_module(p.module), p.name) for p in shim.PATCHES] == before
    assert torch.zeros(1).type() == "torch.FloatTensor"
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_imports_leave_nothing_behind() -> None:
    """torch.compile is itself again, and nobody else finds a triton that is not there."""
    from jackfield_megatron import shim

    shim.import_megatron()
    assert torch.compile.__module__ == "torch"
    assert ("triton" in sys.modules) <= (importlib.util.find_spec("triton") is not None)


def test_layouts_of_several_roles_do_not_mix() -> None:
    """Process groups are installed by each call: a policy and a critic of one process may differ."""
    from jackfield.testing.ranks import run_ranks

    run_ranks(2, _two_layouts)


def _two_layouts(rank: int) -> None:
    from jackfield_megatron.config import Layout
    from jackfield_megatron.groups import Groups

    device = torch.device("cpu")
    one = Groups(Layout(2, 2, 1, 1, 1, 1, 1, False, False), device)
    two = Groups(Layout(2, 1, 2, 1, 1, 1, 1, False, False), device)
    again = Groups(Layout(2, 2, 1, 1, 1, 1, 1, False, False), device)
    from megatron.core import parallel_state

    for groups, tp, pp in ((one, 2, 1), (two, 1, 2), (again, 2, 1)):
        with groups.installed():
            assert parallel_state.get_tensor_model_parallel_world_size() == tp
            assert parallel_state.get_pipeline_model_parallel_world_size() == pp
    with one.installed():
        first = parallel_state.get_tensor_model_parallel_group()
    with again.installed():
        assert parallel_state.get_tensor_model_parallel_group() is first

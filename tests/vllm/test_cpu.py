"""Linears and the gated activation that the engine gives vLLM's model on a CPU, against plain PyTorch's."""

import pytest
import torch
from torch.nn import functional as F

from jackfield_vllm import cpu


@pytest.mark.parametrize("rows", [1, 5, 64, 128, 129, 256, 257])
@pytest.mark.parametrize("biased", [False, True])
def test_a_product_from_either_side_is_the_same(rows, biased):
    generator = torch.Generator().manual_seed(rows)
    x, weight, bias = (torch.randn(shape, generator=generator).bfloat16() for shape in ((rows, 96), (160, 96), (160,)))
    bias = bias if biased else None
    want = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    for function in (cpu.linear, cpu.linear_by_column):
        out = function(x, weight, bias)
        assert (out.dtype, out.shape) == (torch.bfloat16, (rows, 160))
        # products are added up in float32 and rounded once: half a unit of bfloat16's eight bits
        torch.testing.assert_close(out.double(), want, rtol=2**-8, atol=1e-5)
    assert cpu.linear(x, weight, bias).is_contiguous()
    assert cpu.linear_by_column(x, weight, bias).t().is_contiguous() == (rows <= 256)


def test_float32_and_batches_of_matrices_are_multiplied_as_pytorch_does():
    x, weight = torch.randn(2, 3, 8), torch.randn(4, 8)
    assert torch.equal(cpu.linear(x, weight), F.linear(x, weight))
    assert torch.equal(cpu.linear(x.bfloat16(), weight.bfloat16()), F.linear(x.bfloat16(), weight.bfloat16()))
    assert torch.equal(cpu.linear_by_column(x[0], weight), F.linear(x[0], weight))


def test_the_gated_activation_is_vllms_in_either_layout():
    x = torch.randn(5, 64).bfloat16()
    want = F.silu(x[:, :32]) * x[:, 32:]
    before = x.clone()
    assert torch.equal(cpu._silu_and_mul(x), want)
    by_column = cpu._silu_and_mul(x.t().contiguous().t())
    assert torch.equal(by_column, want)
    assert by_column.t().is_contiguous()
    assert torch.equal(x, before)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.parametrize("amx", [True, False])
def test_the_engine_multiplies_by_shared_weights_from_the_left(amx, small, build, trainer, connect, tmp_path, monkeypatch):
    """In bfloat16, with the instructions for which it pays: no packed copy, log-probs are the trainer's."""
    monkeypatch.setattr(cpu, "_pays", lambda: amx)  # vLLM goes on to see the true CPU
    from jackfield.testing.samples import gap, generate, prompts, requests

    folder = small(tmp_path)
    engine, backend = build(folder, dtype="bfloat16"), trainer(folder, dtype="bfloat16")
    connect(backend, engine).sync(0)
    layers = [m for m in engine.core.model.modules() if hasattr(m, "cpu_linear")]
    assert {m.cpu_linear for m in layers} == ({cpu.linear, cpu.linear_by_column} if amx else {F.linear})
    assert not engine.core.model.jackfield.repacked
    asked = requests(prompts(2, length=40), group=4, max_new_tokens=12, ignore_eos=True)
    assert gap(backend, asked, generate(engine, asked)).mean() < 0.02


@pytest.mark.vllm
@pytest.mark.parametrize("rounds", [True, False])
def test_kernels_that_cut_bfloat16_off_are_not_used(rounds, monkeypatch):
    """Those for CPUs without AVX-512 do: each norm makes every number smaller, and the log-probs of 30 layers drift."""
    from types import SimpleNamespace

    import vllm._custom_ops  # noqa: F401

    def add(x, residual, weight, epsilon):
        total = residual.float() + x.float()
        residual.copy_(total if rounds else (total.view(torch.int32) & -(2**16)).view(torch.float32))

    monkeypatch.setattr(torch.ops, "_C", SimpleNamespace(fused_add_rms_norm=add))
    cpu.kernels_round.cache_clear()
    assert cpu.kernels_round() == rounds
    cpu.kernels_round.cache_clear()

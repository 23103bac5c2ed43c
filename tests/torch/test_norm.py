"""RMS norms by hand, against transformers' own and against the formula in float64."""

import pytest
import torch
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from jackfield.components import WorkerContext
from jackfield.config import ModelConfig, OptimizerConfig
from jackfield.testing.models import random_batch, tiny_model
from jackfield.testing.processes import SimpleLoss
from jackfield_torch.backend import TorchBackend, TorchConfig
from jackfield_torch.norm import RMSNorm, replace_norms

EPSILON = 1e-5


def formula(x, weight):
    return weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


def inputs(dtype):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 7, 48, generator=generator)
    x[0, 1] *= 1e-3  # where epsilon counts
    weight, grad = torch.randn(48, generator=generator), torch.randn(2, 7, 48, generator=generator)
    return [t.to(dtype) for t in (x, weight, grad)]


def gradients(function, x, weight, grad):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    out = function(x, weight)
    return out.detach(), *torch.autograd.grad(out, [x, weight], grad)


def test_values_and_gradients_are_the_formulas():
    given = inputs(torch.float32)
    before = given[0].clone()
    got = gradients(lambda x, w: RMSNorm.apply(x, w, EPSILON), *given)
    want = gradients(formula, *(t.double() for t in given))
    for one, two in zip(got, want, strict=True):
        torch.testing.assert_close(one.double(), two, rtol=1e-5, atol=1e-5)
    assert torch.equal(given[0], before)


def test_in_bfloat16_values_are_transformers_and_gradients_are_no_further_from_the_truth():
    given = inputs(torch.bfloat16)

    def theirs(x, weight):
        norm = LlamaRMSNorm(48, EPSILON)
        del norm.weight
        norm.weight = weight
        return norm(x)

    exact = gradients(formula, *(t.double() for t in given))
    ours, other = gradients(lambda x, w: RMSNorm.apply(x, w, EPSILON), *given), gradients(theirs, *given)
    assert torch.equal(ours[0], other[0])
    for one, two, want in zip(ours[1:], other[1:], exact[1:], strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one.double() - want).norm()) <= 1.1 * float((two.double() - want).norm())


def test_a_weight_that_is_not_trained_gets_no_gradient():
    x, weight, grad = inputs(torch.bfloat16)
    x.requires_grad_()
    RMSNorm.apply(x, weight, EPSILON).backward(grad)
    assert x.grad is not None
    assert weight.grad is None


def test_only_rms_norms_are_replaced():
    """Gemma's weight is an offset from 1; a LayerNorm takes the mean off."""
    model = torch.nn.Sequential(LlamaRMSNorm(8), GemmaRMSNorm(8), torch.nn.LayerNorm(8))
    model[1].variance_epsilon, model[1].weight.data[:] = model[1].eps, 0.3
    model[2].variance_epsilon = model[2].eps
    assert replace_norms(model) == 1
    x = torch.randn(3, 8)
    assert torch.equal(model[0](x), LlamaRMSNorm(8)(x))  # in float32 it is transformers' own


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_the_backend_trains_through_them(tmp_path, family, monkeypatch):
    """In bfloat16 on a CPU; gradients are those of the same weights in float32, whose norms are transformers' own."""
    tiny_model(tmp_path, family, layers=1)
    used, original = [], RMSNorm.apply
    narrow, wide = (TorchBackend(TorchConfig(dtype=dtype)) for dtype in ("bfloat16", "float32"))
    for backend in (narrow, wide):
        backend.setup(ModelConfig(path=str(tmp_path)), OptimizerConfig(), WorkerContext("policy", torch.device("cpu"), 0))
    monkeypatch.setattr(RMSNorm, "apply", lambda *given: used.append(1) or original(*given))
    for name, parameter in wide.model.named_parameters():
        parameter.data.copy_(narrow.model.get_parameter(name))
    batch = random_batch(8, group_size=4)
    narrow.forward_backward([batch], SimpleLoss())
    assert len(used) == (5 if family == "qwen3" else 3)
    wide.forward_backward([batch], SimpleLoss())
    assert len(used) == (5 if family == "qwen3" else 3)
    for name, parameter in wide.model.named_parameters():
        got = narrow.optimizer.masters[name].grad
        assert float((got - parameter.grad).norm()) < 0.03 * float(parameter.grad.norm()), name

"""jackfield_logits against a straightforward reference, and its memory (laws 11 and 28)."""

import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jackfield_logits as L
from jackfield.components import OutputRequest


def reference(logits, labels, request):
    """One row at a time, as the definitions say: temperature, top-k, top-p of what is left, the label kept, softmax."""
    rows = []
    for row, label in zip(logits.float() / request.temperature, labels.tolist(), strict=True):
        order = sorted(range(len(row)), key=lambda i: -float(row[i].detach()))
        if request.top_k:
            order = order[: request.top_k]
        p = torch.softmax(row.detach()[order], 0)
        kept, mass = [], 0.0
        for i, share in zip(order, p.tolist(), strict=True):
            if mass >= request.top_p:
                break
            kept.append(i)
            mass += share
        mask = torch.full_like(row, -math.inf)
        mask[[*kept, label]] = 0
        log_p = torch.log_softmax(row + mask, 0)
        p = log_p.exp()
        rows.append(torch.stack([log_p[label], -(p * log_p.masked_fill(p == 0, 0)).sum(), p.square().sum()]))
    return torch.stack(rows, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_one_pass_over_a_chunk_equals_the_steps_apart(dtype, more, temperature, monkeypatch):
    """What a GPU compiles, here as it is: values, and gradients of hidden states, head and bias, and of logits that are given."""
    monkeypatch.setitem(L._CHUNK_BYTES, "cpu", 4 * 50 * 3)
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*n, generator=generator).to(dtype).requires_grad_() for n in ((20, 8), (50, 8), (50,)))
    labels, weights = torch.randint(0, 50, (20,), generator=generator), torch.randn(3, 20, generator=generator)
    logits = (hidden @ weight.T + bias).detach().requires_grad_()
    request = OutputRequest(True, more, more, temperature)

    def run():
        found = L.log_probs_from_hidden(hidden, weight, labels, request, bias), L.token_stats(logits, labels, request)
        values = [torch.stack([v for v in vars(out).values() if v is not None]) for out in found]
        loss = sum((v * weights[: len(v)]).sum() for v in values)
        return [*values, *torch.autograd.grad(loss, [hidden, weight, bias, logits])]

    apart = run()
    monkeypatch.setattr(L, "_fused", lambda x, request: True)
    together = run()
    close = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-6}
    for got, want in zip(together, apart, strict=True):
        torch.testing.assert_close(got, want, **close)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(0, 10**6),
    st.sampled_from([0.5, 1.0, 1.3]),
    st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    st.sampled_from([0, 1, 5, 300]),
    st.sampled_from([7, 300]),
)
def test_values_and_gradients_equal_the_definition(seed, temperature, top_p, top_k, vocabulary):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(9, 4, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 4, generator=generator, requires_grad=True)
    labels = torch.randint(0, vocabulary, (9,), generator=generator)
    weights = torch.randn(3, 9, generator=generator)
    request = OutputRequest(True, True, True, temperature, top_p, min(top_k, vocabulary))
    want = reference(hidden @ weight.T, labels, request)
    want_grads = torch.autograd.grad((want * weights).sum(), [hidden, weight])
    out = L.log_probs_from_hidden(hidden, weight, labels, request)
    got = torch.stack([out.log_probs, out.entropy, out.sum_pi_squared])
    grads = torch.autograd.grad((got * weights).sum(), [hidden, weight])
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(grads, want_grads, rtol=1e-4, atol=1e-5)
    logits = (hidden @ weight.T).detach().requires_grad_()
    out = L.token_stats(logits, labels, request)
    torch.testing.assert_close(torch.stack([out.log_probs, out.entropy, out.sum_pi_squared]), want, rtol=1e-5, atol=1e-5)
    (grad,) = torch.autograd.grad((out.log_probs * weights[0]).sum(), logits)
    direct = logits.detach().requires_grad_()
    (want_grad,) = torch.autograd.grad((reference(direct, labels, request)[0] * weights[0]).sum(), direct)
    torch.testing.assert_close(grad, want_grad, rtol=1e-4, atol=1e-5)


def test_the_sampled_token_is_kept_and_the_law_has_its_number():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    label = torch.tensor([1])
    assert float(L.token_stats(logits, label, OutputRequest(temperature=0.5)).log_probs) == pytest.approx(-2.1429, abs=1e-4)
    for request in (OutputRequest(top_k=1), OutputRequest(top_p=0.1), OutputRequest(top_p=0.1, top_k=2)):
        assert float(L.token_stats(logits, torch.tensor([2]), request).log_probs) == pytest.approx(math.log(1 / (1 + math.e**2)), abs=1e-5)


def test_chunks_do_not_show(monkeypatch):
    hidden, weight = torch.randn(50, 8, requires_grad=True), torch.randn(33, 8, requires_grad=True)
    bias = torch.randn(33, requires_grad=True)
    labels, request = torch.randint(0, 33, (50,)), OutputRequest(True, True, True, 1.3, 0.9)
    results = []
    for size, kept, block in (
        (1 << 30, 1 << 30, 0),
        (4 * 33 * 7, 0, 0),
        (4 * 33 * 7, 1 << 30, 0),
        (4 * 33 * 7, 0, 4 * 33 * 21),
        (4 * 33, 0, 1 << 30),
    ):
        monkeypatch.setattr(L, "_CHUNK_BYTES", {"cpu": size})
        monkeypatch.setattr(L, "_KEEP_BYTES", {"cpu": kept})
        monkeypatch.setattr(L, "_BLOCK_BYTES", {"cpu": block})
        out = L.log_probs_from_hidden(hidden, weight, labels, request, bias)
        loss = (out.log_probs * 2 + out.entropy - out.sum_pi_squared).sum()
        results.append([loss, *torch.autograd.grad(loss, [hidden, weight, bias])])
    for other in (1, 3, 4):
        torch.testing.assert_close(results[0], results[other], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(results[1], results[2], rtol=0, atol=0)


def test_a_wide_nucleus_is_found_by_sorting():
    logits = torch.randn(3, 2000) * 0.01
    labels = torch.zeros(3, dtype=torch.int64)
    kept = L.truncate(logits, 0.9, 0).isfinite().sum(-1)
    want = (logits.softmax(-1).sort(descending=True).values.cumsum(-1) < 0.9).sum(-1) + 1
    assert kept.tolist() == want.tolist()
    assert L.token_stats(logits, labels, OutputRequest(top_p=0.9)).log_probs.isfinite().all()


def test_bfloat16_is_computed_in_float32():
    hidden, weight = torch.randn(20, 16, dtype=torch.bfloat16), torch.randn(500, 16, dtype=torch.bfloat16)
    labels = torch.randint(0, 500, (20,))
    out = L.log_probs_from_hidden(hidden, weight, labels, OutputRequest())
    want = (hidden @ weight.T).float().log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    assert out.log_probs.dtype == torch.float32
    torch.testing.assert_close(out.log_probs, want)


PEAK = """
import resource, torch
from jackfield.components import OutputRequest
from jackfield_logits import log_probs_from_hidden
tokens, vocabulary = 2048, 151936
hidden = torch.randn(tokens, 8, requires_grad=True)
weight = torch.randn(vocabulary, 8, requires_grad=True)
labels = torch.randint(0, vocabulary, (tokens,))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
out = log_probs_from_hidden(hidden, weight, labels, OutputRequest())
out.log_probs.sum().backward()
assert hidden.grad.isfinite().all()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before)
"""


@pytest.mark.slow
def test_memory_stays_under_one_copy_of_the_logits():
    done = subprocess.run([sys.executable, "-c", PEAK], capture_output=True, text=True, check=True, timeout=300)
    assert int(done.stdout) < 2048 * 151936 * 4 / 2  # flat in tokens: T = 8192 stays under an eighth of its copy


@pytest.mark.parametrize("entropy", [False, True])
def test_one_block_of_a_narrow_type_is_its_own_sum(monkeypatch, entropy):
    """Bit for bit: the head's gradient of a single block is what adding it to zeros in float32 and narrowing the sum gives."""
    generator = torch.Generator().manual_seed(2)
    hidden, weight = (torch.randn(shape, generator=generator).bfloat16().requires_grad_() for shape in ((12, 8), (33, 8)))
    labels = torch.randint(0, 33, (12,), generator=generator)
    added = []
    original = torch.Tensor.add_
    monkeypatch.setattr(torch.Tensor, "add_", lambda self, *given, **more: added.append(self.shape) or original(self, *given, **more))
    results = []
    for keep in (0, 1 << 20):
        monkeypatch.setattr(L, "_KEEP_BYTES", {"cpu": keep})
        out = L.log_probs_from_hidden(hidden, weight, labels, OutputRequest(entropy=entropy))
        loss = out.log_probs.sum() + (out.entropy.sum() if entropy else 0)
        results.append(torch.autograd.grad(loss, [hidden, weight]))
    assert weight.shape not in added
    for kept, computed in zip(*results, strict=True):
        assert kept.dtype == torch.bfloat16
        assert torch.equal(kept, computed)
    wide = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    log_pi = (wide[0] @ wide[1].t()).log_softmax(-1)
    loss = log_pi.gather(1, labels[:, None]).sum() - ((log_pi.exp() * log_pi).sum() if entropy else 0)
    for got, want in zip(results[0], torch.autograd.grad(loss, wide), strict=True):
        assert float((got.double() - want).norm()) < 0.02 * float(want.norm())

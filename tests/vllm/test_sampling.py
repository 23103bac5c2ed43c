"""Drawing tokens, without vLLM."""

import numpy as np
import pytest
import torch

from jackfield_vllm.sampling import choose, draw, draw_mixed, uniforms


def test_uniforms_are_uniform_and_a_function_of_seed_and_position_alone():
    seeds, positions = np.repeat(np.arange(100, dtype=np.uint64), 200), np.tile(np.arange(200), 100)
    u = uniforms(seeds, positions)
    assert u.min() >= 0
    assert u.max() < 1
    assert len(np.unique(u)) == len(u)
    histogram = np.histogram(u, bins=20, range=(0, 1))[0]
    assert ((histogram - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    order = np.random.default_rng(0).permutation(len(u))
    assert (uniforms(seeds[order], positions[order]) == u[order]).all()
    lag = np.corrcoef(u.reshape(100, 200)[:, :-1].ravel(), u.reshape(100, 200)[:, 1:].ravel())[0, 1]
    assert abs(lag) < 0.025


@pytest.mark.parametrize("vocab", [3, 500, 512, 1187, 49152])
def test_frequencies_are_the_weights(vocab):
    generator = torch.Generator().manual_seed(0)
    weights = torch.rand(vocab, generator=generator) ** 8
    weights[::3] = 0
    rows = 20000 if vocab < 2000 else 500
    u = (torch.arange(rows, dtype=torch.float64) + 0.5) / rows
    found = torch.cat([choose(weights.expand(len(part), -1), part)[0] for part in u.split(500)])
    assert (weights[found] > 0).all()
    assert (found.diff() >= 0).all()
    expected = torch.searchsorted(weights.double().cumsum(0) / weights.double().sum(), u, right=True)
    assert (found == expected).float().mean() > 0.999


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-53])
def test_the_ends_of_the_interval_choose_the_ends_of_the_support(u):
    weights = torch.zeros(2, 700)
    weights[0, [5, 90, 300]] = torch.tensor([1e-30, 1.0, 1e-30])
    weights[1, [0, 699]] = 1.0
    found = choose(weights, torch.full((2,), u, dtype=torch.float64))[0].tolist()
    assert found[0] in (5, 90, 300)
    assert found[1] == (0 if u == 0 else 699)


def test_law_11_the_worked_example():
    logits = torch.tensor([[2.0, 1.0, 0.0]])
    for u in (0.1, 0.9, 0.99):
        tokens, log_probs = draw(logits, (0.5, 1.0, 0), torch.tensor([u], dtype=torch.float64))
        assert log_probs[0] == pytest.approx((logits / 0.5).log_softmax(-1)[0, tokens[0]].item(), abs=1e-6)
    tokens, log_probs = draw(logits, (0.5, 1.0, 0), torch.tensor([0.9], dtype=torch.float64))
    assert tokens.tolist() == [1]
    assert log_probs[0] == pytest.approx(-2.1429, abs=1e-4)


def test_rows_with_settings_of_their_own_are_as_if_alone():
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 64, generator=generator) * 3
    kinds = [(1.0, 1.0, 0), (0.0, 1.0, 0), (0.7, 0.8, 0), (1.3, 1.0, 4), (0.0, 1.0, 0), (0.7, 0.8, 0)]
    u = torch.rand(6, generator=generator, dtype=torch.float64)
    tokens, log_probs = draw_mixed(logits, kinds, u)
    for row, kind in enumerate(kinds):
        alone = draw(logits[row : row + 1], kind, u[row : row + 1])
        assert (tokens[row], log_probs[row]) == (alone[0][0], alone[1][0])
    assert tokens[1] == logits[1].argmax()
    allowed = logits[3].topk(4).indices.tolist()
    assert tokens[3] in allowed

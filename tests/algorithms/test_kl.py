"""Law 12: every KL estimator has the value and the gradient that docs/algorithms/kl.md states."""

import pytest
import torch

from jackfield import functional as F
from jackfield.algorithm import KLConfig
from jackfield.schedule import Ramp, at


def expected_gradient(estimator, old_logits=None):
    """Gradient of the estimate over the logits, exact expectation over samples of the policy (or, weighted, of an old one)."""
    logits = torch.tensor([0.2, -0.3], dtype=torch.float64, requires_grad=True)
    log_probs = logits.log_softmax(0)
    old = log_probs.detach() if old_logits is None else torch.tensor(old_logits, dtype=torch.float64).log_softmax(0)
    reference = torch.full((2,), 0.5, dtype=torch.float64).log()
    estimate = F.kl_estimate(log_probs, reference, estimator, old)
    (old.exp() * estimate).sum().backward()
    return estimate.detach() @ old.exp(), logits.grad


def test_k3_derivative():
    log_prob = torch.tensor([-1.0], requires_grad=True)
    F.kl_estimate(log_prob, torch.tensor([-1.5]), "k3").backward()
    assert float(log_prob.grad) == pytest.approx(0.3935, abs=1e-4)


@pytest.mark.parametrize(
    ("estimator", "gradient"),
    [("k1", 0.0), ("k2", 0.11750), ("k3", 0.12246), ("k1+", 0.11750), ("k3+", 0.11750), ("unbiased", 0.11750)],
)
def test_expected_gradient(estimator, gradient):
    _, found = expected_gradient(estimator)
    torch.testing.assert_close(found, torch.tensor([gradient, -gradient], dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("estimator", ["k1", "k3", "k1+", "k3+", "unbiased"])
def test_value_is_the_kl(estimator):
    value, _ = expected_gradient(estimator)
    pi = torch.tensor([0.2, -0.3], dtype=torch.float64).softmax(0)
    assert float(value) == pytest.approx(float((pi * (pi / 0.5).log()).sum()), abs=1e-9)


def test_only_unbiased_is_right_off_policy():
    """After an optimizer step the samples are the old policy's: the importance weight keeps value and gradient exact."""
    value, found = expected_gradient("unbiased", old_logits=[-0.5, 0.4])
    exact, wanted = expected_gradient("unbiased")
    assert float(value) == pytest.approx(float(exact), abs=1e-9)
    torch.testing.assert_close(found, wanted)
    assert abs(float(expected_gradient("k2", old_logits=[-0.5, 0.4])[1][0]) - float(wanted[0])) > 0.01


def test_unknown_estimator():
    with pytest.raises(ValueError, match="choose k1"):
        F.kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


def test_schedules():
    ramp = Ramp(start=0.2, end=0.1, steps=10)
    assert [round(at(ramp, step), 3) for step in (0, 5, 10, 50)] == [0.2, 0.15, 0.1, 0.1]
    cosine = Ramp(start=1.0, end=0.0, steps=4, shape="cosine")
    assert [round(at(cosine, step), 3) for step in range(5)] == [1.0, 0.854, 0.5, 0.146, 0.0]
    assert at(KLConfig(coef={"start": 0.0, "end": 1.0, "steps": 2}).coef, 1) == 0.5
    with pytest.raises(ValueError, match="greater than 0"):
        Ramp(start=0.0, end=1.0, steps=0)

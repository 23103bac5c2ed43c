"""Off-policy correction: weights, rejection and metrics, alone and around an algorithm's advantage."""

from types import SimpleNamespace

import pluggy
import pytest
import torch
from pydantic import ValidationError

from jackfield.errors import ConfigError
from jackfield.hookspecs import Hooks
from jackfield.testing.algorithm import Case
from jackfield_grpo.grpo import GRPO
from jackfield_offpolicy.correction import OffPolicyCorrection, accepted, importance_ratio

MASK = torch.tensor([[False, True, True, True], [False, True, True, False], [False, False, False, False]])
LOG_RATIO = torch.tensor([[9.0, 1.0, -1.0, 0.3], [9.0, -0.5, -0.7, 9.0], [9.0, 9.0, 9.0, 9.0]])


def plugin(**settings):
    return OffPolicyCorrection(OffPolicyCorrection.Config(**settings))


def batch(garbage=0):
    algorithm = GRPO(GRPO.Config(old_log_probs="recompute"))
    return Case([4, 3, 4], 9, 5, garbage=garbage).build(algorithm.needs, algorithm.config).clean()


def test_levels():
    token = importance_ratio(LOG_RATIO, MASK, "token")
    torch.testing.assert_close(token[0, 1:], torch.tensor([1.0, -1.0, 0.3]).exp())
    sequence = importance_ratio(LOG_RATIO, MASK, "sequence")
    torch.testing.assert_close(sequence[:, 0], torch.tensor([0.3, -1.2, 0.0]).exp())
    geometric = importance_ratio(LOG_RATIO, MASK, "geometric")
    torch.testing.assert_close(geometric[:, 0], torch.tensor([0.1, -0.6, 0.0]).exp())


def test_rejection():
    assert accepted(LOG_RATIO, MASK, "token", 0.45, 3.0)[:, 0].tolist() == [False, True, True]
    assert accepted(LOG_RATIO, MASK, "sequence", 0.5, 2.0)[:, 0].tolist() == [True, False, True]
    assert accepted(LOG_RATIO, MASK, "geometric", 0.5, 1.1)[:, 0].tolist() == [False, True, True]


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_truncation_and_icepop(level):
    data = batch()
    gap = data.old_log_probs - data.rollout_log_probs
    ratio = importance_ratio(gap, data.loss_mask, level).expand_as(gap)
    cut, _ = plugin(level=level, upper=1.1).correct(data)
    popped, metrics = plugin(level=level, lower=0.9, upper=1.1).correct(data)
    mask = data.loss_mask
    torch.testing.assert_close(cut.loss_weights, torch.where(mask, ratio.clamp(max=1.1), 0))
    inside = (ratio >= 0.9) & (ratio <= 1.1)
    torch.testing.assert_close(popped.loss_weights, torch.where(mask & inside, ratio, 0))
    assert metrics["outside"] == pytest.approx(float((~inside & mask).sum() / mask.sum()))
    assert 0 < metrics["outside"] < 1
    assert cut.loss_mask.equal(mask)


def test_nothing_behind_the_mask_is_read():
    for settings in ({"level": "token"}, {"level": "sequence", "reject": "geometric", "normalize": True}):
        (one, a), (other, b) = plugin(**settings).correct(batch()), plugin(**settings).correct(batch(garbage=3))
        assert one.loss_weights.equal(other.loss_weights)
        assert one.loss_mask.equal(other.loss_mask)
        assert a == b


def test_weights_multiply_and_normalise():
    data = batch()
    earlier = torch.full(data.loss_mask.shape, 2.0)
    weighted, _ = plugin(normalize=True).correct(data.replace(loss_weights=earlier))
    assert float(weighted.loss_weights[data.loss_mask].mean()) == pytest.approx(2.0, rel=1e-5)


def test_without_weights_only_the_gap_is_measured():
    corrected, metrics = plugin(level=None).correct(batch())
    assert corrected.loss_weights is None
    assert metrics.keys() == {"kl", "k3", "gap_mean", "gap_max", "chi2"}


def test_around_an_algorithm():
    """The wrapper sees what the algorithm returned, recomputes log-probs where there are none, and rejects after baselines are formed."""
    manager = pluggy.PluginManager("jackfield")
    manager.add_hookspecs(Hooks)
    algorithm = GRPO()
    manager.register(algorithm)
    manager.register(plugin(reject="geometric", reject_lower=0.97, reject_upper=1.03))
    data = batch()
    old, asked = data.old_log_probs, []
    policy = SimpleNamespace(log_probs=lambda b: asked.append(len(b)) or old)
    run = SimpleNamespace(step=0, seed=0, metrics={}, policy=policy, algorithm=algorithm)
    result = manager.hook.advantage(run=run, batch=data.replace(old_log_probs=None))
    assert asked == [len(data)]
    assert result.old_log_probs.equal(torch.where(data.loss_mask, old, 0))
    assert result.advantages.equal(algorithm.advantage(data).advantages)
    assert 0 < run.metrics["offpolicy/rejected"] < 1
    assert result.loss_mask.sum() < data.loss_mask.sum()


def test_settings_that_contradict():
    with pytest.raises(ValidationError, match="above its upper bound"):
        plugin(lower=3.0, upper=2.0)
    run = SimpleNamespace(algorithm=GRPO(GRPO.Config(old_log_probs="rollout")))
    with pytest.raises(ConfigError, match="recompute"):
        plugin().configure(run)


def test_an_empty_batch():
    corrected, metrics = plugin(reject="token", normalize=True).correct(batch()[:0])
    assert len(corrected) == 0
    assert all(value == 0 for value in metrics.values())

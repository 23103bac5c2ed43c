"""What is particular to single algorithms, and to the base that all share."""

from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

import jackfield_estimators as F
from jackfield.errors import ConfigError
from jackfield.testing.algorithm import VARIANTS, Case
from jackfield_grpo.covariance import first, random_order
from jackfield_grpo.dapo import DAPO, overlong_penalty
from jackfield_grpo.gdpo import GDPO
from jackfield_grpo.grpo import GRPO
from jackfield_ppo.ppo import PPO
from jackfield_reinforce.rloo import RLOO


def batch_for(algorithm, sizes=(3, 2, 3), seed=4):
    return Case(list(sizes), 8, seed).build(algorithm.needs, algorithm.config)


def whole(batch):
    """Every sample trainable."""
    mask = torch.zeros_like(batch.loss_mask)
    mask[:, 1:3] = True
    return batch.replace(loss_mask=mask, response_mask=mask)


def run_with(rewards=("task", "length"), **sampling):
    specs = [SimpleNamespace(name=name, label=None, weight=1.0 + i) for i, name in enumerate(rewards)]
    return SimpleNamespace(config=SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=8, **sampling), rewards=specs))


# ---- DAPO ---------------------------------------------------------------------------------------------------------------
def test_overlong_penalty():
    lengths = torch.tensor([1, 6, 7, 8, 9, 10, 12])
    torch.testing.assert_close(overlong_penalty(lengths, 10, 4), torch.tensor([0.0, 0.0, -0.25, -0.5, -0.75, -1.0, -1.0]))


def test_dynamic_sampling_looks_at_the_task_and_not_at_the_shaped_reward():
    algorithm = DAPO(DAPO.Config(filter_on="task"))
    batch = whole(batch_for(algorithm))
    task = torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0, torch.nan])
    batch.loss_mask[7] = False
    scores = TensorDict({"task": task, "length": torch.rand(8)}, [8])
    order = [0, 0, 0, 1, 1, 2, 2, 2]
    batch = batch.replace(scores=scores, rewards=(task + scores["length"]).nan_to_num(), group_ids=torch.tensor(order))
    assert algorithm.filter(None, batch).tolist() == [False] * 3 + [True] * 2 + [False] * 3
    by_sum = DAPO().filter(None, batch)
    assert by_sum.all()
    assert DAPO(DAPO.Config(dynamic_sampling=False)).filter(None, batch) is None


def test_overlong_punishment_comes_after_the_filter():
    algorithm = DAPO(DAPO.Config(overlong_buffer=4))
    algorithm.configure(run_with())
    assert algorithm.max_length == 8
    batch = whole(batch_for(algorithm, sizes=(2,)))
    batch.response_mask[1, 1:] = True
    batch = batch.replace(rewards=torch.ones(2))
    assert not algorithm.filter(None, batch).any()
    advantages = algorithm.advantage(batch).advantages
    assert advantages[0, 1] > 0 > advantages[1, 1]


def test_dapo_refuses_what_does_not_fit():
    with pytest.raises(ConfigError, match="the rewards are task, length"):
        DAPO(DAPO.Config(filter_on="tsak")).configure(run_with())
    with pytest.raises(ConfigError, match="longer than a response"):
        DAPO(DAPO.Config(overlong_buffer=9)).configure(run_with())


# ---- GDPO ---------------------------------------------------------------------------------------------------------------
def test_gdpo_keeps_apart_what_grpo_merges():
    """A reward that spans 10 counts no more than one that spans 1, save for its weight; in the sum it would drown the other."""
    algorithm = GDPO(GDPO.Config(batch_norm="none"))
    algorithm.configure(run_with(("a", "b")))
    assert algorithm.weights == {"a": 1.0, "b": 2.0}
    scores = {"a": torch.tensor([0.0, 1.0]), "b": torch.tensor([0.0, 10.0])}
    values = algorithm.decoupled(scores, torch.zeros(2), torch.ones(2, dtype=torch.bool))
    root = 0.5**0.5
    torch.testing.assert_close(values, torch.tensor([-3 * root, 3 * root]), rtol=1e-4, atol=0)


def test_gdpo_normalises_over_samples():
    algorithm = GDPO()
    batch = whole(batch_for(algorithm, sizes=(4, 4)))
    values = algorithm.advantage(batch).advantages[:, 1]
    assert float(values.mean()) == pytest.approx(0, abs=1e-5)
    assert float(values.std()) == pytest.approx(1, abs=1e-3)


# ---- Clip-Cov and KL-Cov -------------------------------------------------------------------------------------------------
def test_the_random_order_belongs_to_the_sample():
    order = random_order(torch.tensor([5, 9, 2]), 64, seed=1)
    assert order.flatten().unique().numel() == 192
    assert order[[2, 0]].equal(random_order(torch.tensor([2, 5]), 64, seed=1))
    assert not order.equal(random_order(torch.tensor([5, 9, 2]), 64, seed=2))
    chosen = first(torch.ones(3, 64, dtype=torch.bool), order, 48)
    assert int(chosen.sum()) == 48
    assert all(4 < int(count) < 30 for count in chosen.sum(1))


# ---- shared -------------------------------------------------------------------------------------------------------------
def test_whitening_equal_values_gives_exactly_nothing():
    """Law 14: eight rewards of 0.9 have a mean that is one ulp off."""
    mask = torch.ones(8, 3, dtype=torch.bool)
    assert not F.masked_whiten(torch.full((8, 3), 0.9), mask).any()
    torch.testing.assert_close(F.masked_whiten(torch.full((8, 3), 0.9), mask, shift=False), torch.full((8, 3), 0.9))
    one = torch.zeros(8, 3, dtype=torch.bool)
    one[2, 1] = True
    assert F.masked_whiten(torch.full((8, 3), 5.0), one)[2, 1] == 5


def test_groups_of_eight_equal_rewards():
    """Law 14: with a small eps the naive formula gives -59.6 here."""
    rewards, groups, valid = torch.full((8,), 0.9), torch.zeros(8), torch.ones(8, dtype=torch.bool)
    assert not F.group_center(rewards, groups, valid, std=True, eps=1e-9).any()
    assert not F.leave_one_out(rewards, groups, valid).any()


def test_kl_in_reward_reaches_the_advantage():
    algorithm = PPO(PPO.Config(kl={"coef": 0.5, "place": "reward", "estimator": "k1"}, lam=1.0, whiten=False))
    assert algorithm.needs.reference
    assert algorithm.needs.old_log_probs
    batch = batch_for(algorithm).clean()
    done = algorithm._advantage(run=SimpleNamespace(step=0), batch=batch)
    kl = torch.where(batch.loss_mask, batch.old_log_probs - batch.ref_log_probs, 0)
    total = torch.where(batch.loss_mask.any(-1), batch.rewards, 0) - 0.5 * kl.sum(-1)
    first_token = batch.loss_mask.int().argmax(-1)
    returns = done.returns.gather(1, first_token[:, None])[:, 0]
    torch.testing.assert_close(returns[batch.loss_mask.any(-1)], total[batch.loss_mask.any(-1)])
    assert not torch.equal(batch.token_rewards if batch.token_rewards is not None else torch.zeros(1), done.token_rewards)


def test_needs_follow_the_settings():
    assert not GRPO().needs.reference
    assert not GRPO().needs.old_log_probs
    assert GRPO(GRPO.Config(mini_batches=2)).needs.old_log_probs
    assert GRPO(GRPO.Config(kl={"coef": 0.1})).needs.reference
    assert GRPO().needs.min_group_size == 2
    assert PPO().needs.values
    assert RLOO.Config().reduction == "seq-mean-token-sum"
    assert VARIANTS[0] == {}


def test_clip_schedule_reaches_the_loss():
    algorithm = GRPO(GRPO.Config(clip_high={"start": 0.2, "end": 0.4, "steps": 10}))
    algorithm.load_state_dict({"step": 5, "kl_coef": 0.0})
    assert algorithm.now(algorithm.config.clip_high) == pytest.approx(0.3)

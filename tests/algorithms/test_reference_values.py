"""Published formulas against values computed elsewhere (tests/reference/): values and gradients to 1e-5.

The file was made with verl 0.9.1 in float32. Where our convention differs on purpose a test here says so and why.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

import jackfield_estimators as F
from jackfield.batch import Batch
from jackfield.loss import reduction_scale
from jackfield_grpo.cispo import cispo_loss
from jackfield_grpo.clip_cov import clip_cov_tokens
from jackfield_grpo.dppo import dppo_loss
from jackfield_grpo.dro import dro_loss
from jackfield_grpo.gmpo import gmpo_loss
from jackfield_grpo.gspo import gspo_loss
from jackfield_grpo.kl_cov import kl_cov_loss, kl_cov_tokens
from jackfield_grpo.passk_grpo import best_of_k_advantages
from jackfield_grpo.sapo import sapo_loss
from jackfield_offpolicy.correction import gap_metrics, icepop_weights, importance_ratio, truncated_weights
from jackfield_reinforce.gpg import gpg_advantages
from jackfield_reinforce.opo import opo_advantages
from jackfield_reinforce.otb import otb_advantages

REFERENCE = json.loads((Path(__file__).parent.parent / "reference" / "policy_gradient_values.json").read_text())
INPUTS = REFERENCE["inputs"]
MASK = torch.tensor(INPUTS["response_mask"]).bool()
GROUPS = torch.tensor([ord(u) for u in INPUTS["uid"]])
GROUPS4 = torch.tensor([ord(u) for u in INPUTS["uid4"]])
OUTCOME = torch.tensor(INPUTS["outcome"])
VALID = torch.ones(8, dtype=torch.bool)
ALONE = torch.tensor([INPUTS["uid"].count(u) == 1 for u in INPUTS["uid"]])


def given(name):
    return torch.tensor(INPUTS[name])


def expected(name, field="advantages"):
    return torch.tensor(REFERENCE["advantages"][name][field])


def close(actual, wanted):
    torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


def on_tokens(values):
    return F.spread(values, MASK)


def batch_of(**fields):
    size, width = MASK.shape
    return Batch(
        tokens=torch.zeros(size, width, dtype=torch.int64),
        lengths=torch.full((size,), width),
        prompt_lengths=torch.zeros(size, dtype=torch.int64),
        response_mask=MASK,
        loss_mask=MASK,
        rollout_log_probs=given("rollout_log_prob"),
        versions=torch.zeros(size, width, dtype=torch.int32),
        group_ids=GROUPS,
        sample_ids=torch.arange(size),
        finish_reasons=torch.zeros(size, dtype=torch.int8),
        records=[{}] * size,
        extras=TensorDict({}, [size]),
        batch_size=[size],
        **fields,
    )


# ---- advantages ---------------------------------------------------------------------------------------------------------
def test_gae():
    rewards = given("token_level_rewards_dense")
    advantages, returns = F.gae(rewards, given("values"), MASK, gamma=1.0, lam=1.0)
    close(F.masked_whiten(advantages, MASK), torch.where(MASK, expected("gae_dense_gamma1.0_lam1.0"), 0))
    close(returns, torch.where(MASK, expected("gae_dense_gamma1.0_lam1.0", "returns"), 0))


def test_gae_leaves_nothing_behind_the_mask_where_the_reference_does():
    """On purpose: ours is 0 there (law 5); the reference keeps the value carried over a masked token, and its whitening shifts it."""
    advantages, returns = F.gae(given("token_level_rewards_dense"), given("values"), MASK, gamma=1.0, lam=1.0)
    assert not advantages[~MASK].any()
    assert not returns[~MASK].any()
    assert expected("gae_dense_gamma1.0_lam1.0")[~MASK].any()


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0), (0.0, 0.5), (1.0, 0.0)])
@pytest.mark.parametrize("width", [1, 2, 6, 50, 257])
def test_gae_equals_the_loop_of_the_paper(gamma, lam, width):
    generator = torch.Generator().manual_seed(width)
    rewards, values = torch.randn(2, 5, width, generator=generator)
    mask = torch.rand(5, width, generator=generator) < 0.7
    mask[0], mask[1] = True, False
    wanted, targets = torch.zeros(5, width), torch.zeros(5, width)
    for b in range(5):
        following = last = 0.0
        for t in reversed(range(width)):
            if mask[b, t]:
                last = float(rewards[b, t]) + gamma * following - float(values[b, t]) + gamma * lam * last
                following = float(values[b, t])
                wanted[b, t], targets[b, t] = last, last + following
    junk = torch.where(mask, 0, torch.nan)
    advantages, returns = F.gae(rewards + junk, values + junk, mask, gamma=gamma, lam=lam)
    close(advantages, wanted)
    close(returns, targets)


@pytest.mark.parametrize("gamma", [1.0, 0.9, 0.0])
def test_returns_equal_the_loop(gamma):
    generator = torch.Generator().manual_seed(0)
    rewards, mask = torch.randn(7, 40, generator=generator), torch.rand(7, 40, generator=generator) < 0.6
    wanted = torch.zeros(7, 40)
    for b in range(7):
        total = 0.0
        for t in reversed(range(40)):
            if mask[b, t]:
                total = float(rewards[b, t]) + gamma * total
                wanted[b, t] = total
    close(F.discounted_returns(torch.where(mask, rewards, torch.nan), mask, gamma=gamma), wanted)


@pytest.mark.parametrize("std", [True, False])
def test_grpo(std):
    ours = on_tokens(F.group_center(OUTCOME, GROUPS, VALID, std=std, eps=1e-6))
    close(ours[~ALONE], expected(f"grpo_std{std}")[~ALONE])


def test_rloo():
    close(on_tokens(F.leave_one_out(OUTCOME, GROUPS, VALID))[~ALONE], expected("rloo")[~ALONE])


def test_opo():
    close(on_tokens(opo_advantages(OUTCOME, MASK.sum(-1), GROUPS, VALID))[~ALONE], expected("opo")[~ALONE])


def test_gpg():
    """On purpose: alpha counts the samples of groups that say something, as the paper derives; the reference counts non-zero rewards
    (7 of 8 here). Group b is flat and c and d are alone, so ours is 8 / 3."""
    ours = gpg_advantages(OUTCOME, GROUPS, VALID)
    assert ours[0] == pytest.approx(8 / 3 * 0.5)
    close(on_tokens(ours)[~ALONE] * (8 / 7) / (8 / 3), expected("gpg")[~ALONE])


def test_reinforce_pp():
    returns = F.discounted_returns(given("token_level_rewards_dense"), MASK)
    close(F.masked_whiten(returns, MASK), expected("reinforce_plus_plus_gamma1.0"))
    close(returns, torch.where(MASK, expected("reinforce_plus_plus_gamma1.0", "returns"), 0))


def test_reinforce_pp_baseline():
    """The whitening is the reference's; the centring of a lone sample is not (see below), so its reward is put in by hand."""
    centered = torch.where(ALONE, OUTCOME, F.group_center(OUTCOME, GROUPS, VALID))
    close(F.masked_whiten(on_tokens(centered), MASK), expected("reinforce_plus_plus_baseline"))


def test_remax():
    returns = F.discounted_returns(given("token_level_rewards_dense"), MASK)
    close(returns - on_tokens(given("reward_baselines")), torch.where(MASK, expected("remax"), 0))


def test_pass_at_k():
    close(on_tokens(best_of_k_advantages(OUTCOME, GROUPS4, VALID)), expected("grpo_passk_nostd_uid4"))
    lead = best_of_k_advantages(torch.tensor([0.2, 0.9, 0.5, 0.1]), torch.zeros(4), torch.ones(4, dtype=torch.bool))
    close(lead, torch.tensor([0.0, 0.4, 0.0, 0.0]))


@pytest.mark.parametrize("k", [2, 3, 4, 5])
def test_pass_at_k_is_the_mean_over_subsets(k):
    from itertools import combinations

    rewards = torch.tensor([0.3, 1.0, 0.3, -0.5, 0.7])
    wanted = []
    for i in range(5):
        sets = [s for s in combinations(range(5), k) if i in s]
        wanted.append(sum(max(rewards[list(s)]) - max(rewards[[j for j in s if j != i]]) for s in sets) / len(sets))
    close(best_of_k_advantages(rewards, torch.zeros(5), torch.ones(5, dtype=torch.bool), k), torch.tensor(wanted))


def test_optimal_token_baseline():
    returns = F.discounted_returns(given("token_level_rewards_dense"), MASK)
    ours = otb_advantages(returns, given("old_log_prob"), given("sum_pi_squared"), MASK, GROUPS)
    close(ours, expected("optimal_token_baseline"))


def test_a_lone_sample_says_nothing():
    """On purpose: the reference gives a group of one its own reward as advantage (baseline 0, deviation 1): a push whose size depends on
    whether other samples failed. Ours is 0, as for every group without a difference (law 14); the core refuses group_size 1."""
    for ours, name in [
        (F.group_center(OUTCOME, GROUPS, VALID, std=True), "grpo_stdTrue"),
        (F.group_center(OUTCOME, GROUPS, VALID), "grpo_stdFalse"),
        (F.leave_one_out(OUTCOME, GROUPS, VALID), "rloo"),
        (opo_advantages(OUTCOME, MASK.sum(-1), GROUPS, VALID), "opo"),
        (gpg_advantages(OUTCOME, GROUPS, VALID), "gpg"),
    ]:
        assert not ours[ALONE].any()
        assert expected(name)[ALONE].any()


def test_a_reward_behind_the_mask_is_not_counted():
    """On purpose: the reference sums a sample's token rewards without the mask; ours never reads behind it (law 5)."""
    token_rewards = torch.where(MASK, 0.25, 100.0)
    batch = batch_of(rewards=OUTCOME, token_rewards=token_rewards)
    close(F.outcomes(batch), OUTCOME + 0.25 * MASK.sum(-1))
    placed = F.placed_rewards(batch)
    close(placed.sum(-1), OUTCOME + 0.25 * MASK.sum(-1))
    assert not placed[~MASK].any()


# ---- policy losses ------------------------------------------------------------------------------------------------------
def ppo(lp, old, adv, dual=3.0):
    return F.clipped_surrogate(F.log_ratio(lp, old).exp(), adv, 0.2, 0.2, dual)[0]


def clip_cov(lp, old, adv):
    """The reference draws by torch.randperm among the tokens that PPO's clip leaves alone, from the running policy's log-probs."""
    ratio = (lp - old).exp()
    loss, clipped, _ = F.clipped_surrogate(ratio, adv, 0.2, 0.2)
    skip = clipped.bool() & MASK
    every = torch.zeros(MASK.shape, dtype=torch.int64)
    candidates = clip_cov_tokens(lp, adv, MASK, every, ratio=1.0, cov_low=1.0, cov_high=5.0, skip=skip)
    order = torch.full(MASK.shape, 1000)
    order[candidates] = torch.randperm(int(candidates.sum()), generator=torch.Generator().manual_seed(0)).argsort()
    chosen = clip_cov_tokens(lp, adv, MASK, order, ratio=2e-4, cov_low=1.0, cov_high=5.0, skip=skip)
    return torch.where(chosen, 0, loss)


def kl_cov(lp, old, adv):
    return kl_cov_loss(lp, old, adv, kl_cov_tokens(lp, adv, MASK, ratio=2e-4), beta=0.1)


LOSSES = {
    "vanilla_token-mean": ("token-mean", ppo),
    "vanilla_seq-mean-token-sum": ("seq-mean-token-sum", ppo),
    "vanilla_seq-mean-token-mean": ("seq-mean-token-mean", ppo),
    "vanilla_isw": ("token-mean", lambda lp, old, adv: ppo(lp, old, adv) * given("rollout_is_weights")),
    "gspo_paper_clip": ("seq-mean-token-mean", lambda lp, old, adv: gspo_loss(lp, old, adv, MASK, low=3e-4, high=4e-4)[0]),
    "sapo": ("seq-mean-token-mean", lambda lp, old, adv: sapo_loss(lp, old, adv, tau_pos=1.0, tau_neg=1.05)),
    "cispo": ("token-mean", lambda lp, old, adv: cispo_loss(lp, old, adv, low=0.2, high=0.2)[0]),
    "geo_mean": ("seq-mean-token-mean", lambda lp, old, adv: gmpo_loss(lp, old, adv, MASK, low=0.4, high=0.4)[0]),
    "clip_cov_default_seed0": ("token-mean", clip_cov),
    "kl_cov_default": ("token-mean", kl_cov),
    "dppo_tv": ("token-mean", lambda lp, old, adv: dppo_loss(lp, old, adv, low=0.2, high=0.2, ratio_max=3.0)[0]),
    "dro_beta0.5": ("token-mean", lambda lp, old, adv: dro_loss(lp, old, adv, beta=0.5)),
}


def test_every_policy_loss_of_the_reference_is_here():
    assert set(LOSSES) == set(REFERENCE["policy_losses"])


@pytest.mark.parametrize("name", LOSSES)
def test_policy_loss(name):
    case = REFERENCE["policy_losses"][name]
    reduction, loss = LOSSES[name]
    log_probs = given("log_prob").requires_grad_()
    value = (
        torch.where(MASK, loss(log_probs, given("old_log_prob"), given(case["advantages"])), 0) * reduction_scale(MASK, reduction, 6)
    ).sum()
    value.backward()
    close(value.detach(), torch.tensor(case["loss"]))
    close(torch.where(MASK, log_probs.grad, 0), torch.tensor(case["grad_log_prob"]))


def test_clip_fractions():
    metrics = REFERENCE["policy_losses"]["vanilla_token-mean"]["metrics"]
    log_ratio = F.log_ratio(given("log_prob"), given("old_log_prob"))
    _, clipped, bounded = F.clipped_surrogate(log_ratio.exp(), given("advantages"), 0.2, 0.2, 3.0)
    assert float(F.masked_mean(clipped, MASK)) == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-5)
    assert float(F.masked_mean(bounded, MASK)) == pytest.approx(metrics["actor/pg_clipfrac_lower"], abs=1e-5)
    assert float(F.masked_mean(-log_ratio, MASK)) == pytest.approx(metrics["actor/ppo_kl"], abs=1e-5)


# ---- reductions ---------------------------------------------------------------------------------------------------------
REDUCTIONS = ("token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", ["", "_emptyrow"])
def test_reduction(reduction, rows):
    mask = given("response_mask_with_empty_row").bool() if rows else MASK
    ours = (given("loss_mat") * reduction_scale(mask, reduction, 6)).sum()
    assert float(ours) == pytest.approx(REFERENCE["agg_loss"]["values"][reduction + rows], abs=1e-5)


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("rows", ["", "_emptyrow"])
def test_reduction_with_other_ranks(reduction, rows):
    """On purpose: the reference multiplies by the number of ranks (4), for back ends that average gradients over them; ours sum.
    Its fixed length is 12 in these cases."""
    mask = given("response_mask_with_empty_row").bool() if rows else MASK
    others = 16 - int(mask.any(-1).sum())
    tokens = 100 - int(mask.sum())
    rest = torch.zeros(others, tokens, dtype=torch.bool)
    rest[:, 0] = True
    rest[0, : tokens - others + 1] = True
    whole = torch.zeros(len(mask) + others, max(tokens, 6), dtype=torch.bool)
    whole[: len(mask), :6], whole[len(mask) :, :tokens] = mask, rest
    assert int(whole.sum()) == 100
    assert int(whole.any(-1).sum()) == 16
    ours = (given("loss_mat") * reduction_scale(whole, reduction, 12)[: len(mask), :6]).sum()
    wanted = REFERENCE["agg_loss"]["values"][f"{reduction}{rows}_dp4_tok100_gbs16"]
    assert float(ours) * 4 == pytest.approx(wanted, abs=1e-5)


# ---- critic, KL, primitives ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize("clip", [0.2, 0.5])
@pytest.mark.parametrize("reduction", ["token-mean", "seq-mean-token-mean"])
def test_value_loss(clip, reduction):
    loss, clipped = F.clipped_value_loss(given("vpreds"), given("values"), given("returns"), clip)
    value, fraction = REFERENCE["value_loss"]["cases"][f"clip{clip}_{reduction}"]
    assert float((loss * reduction_scale(MASK, reduction, 6)).sum()) == pytest.approx(value, abs=1e-5)
    assert float(F.masked_mean(clipped, MASK)) == pytest.approx(fraction, abs=1e-5)


NAMES = {"kl": "k1", "mse": "k2", "low_var_kl": "k3", "low_var_kl+": "k3+", "k2+": "k2", "mse+": "k2"}
KL = [name for name, case in REFERENCE["kl_penalty"]["values"].items() if "value" in case]


@pytest.mark.parametrize("name", KL)
def test_kl_estimators(name):
    case = REFERENCE["kl_penalty"]["values"][name]
    log_probs = given("log_prob").requires_grad_()
    value = F.kl_estimate(log_probs, given("ref_log_prob"), NAMES.get(name, name))
    value.sum().backward()
    close(value.detach(), torch.tensor(case["value"]))
    close(log_probs.grad, torch.tensor(case["grad"]))


@pytest.mark.parametrize("name", KL)
def test_kl_estimators_far_out(name):
    """On purpose: the reference caps k3 at 10, and with it k3's gradient at 0, just where the policy is furthest away; ours bounds only the
    exponent (at 20), so that k3 of log-probs -0.1 and -30 is 28.9 with gradient 1."""
    case = REFERENCE["kl_penalty"]["values"][name]["extreme"]
    log_probs = torch.tensor(case["logp"]).requires_grad_()
    ours = NAMES.get(name, name)
    value = F.kl_estimate(log_probs, torch.tensor(case["ref"]), ours)
    value.sum().backward()
    wanted, gradient = torch.tensor(case["value"]), torch.tensor(case["grad"])
    if ours.startswith("k3"):
        close(value[0, :2].detach(), torch.tensor([28.9, math.exp(20) - 21]))
        value, wanted = value[:, 2:], wanted[:, 2:]
    if ours == "k3":
        close(log_probs.grad[0, 0], torch.tensor(1.0))
        log_probs.grad, gradient = log_probs.grad.clone(), gradient.clone()
        log_probs.grad[:, :2] = gradient[:, :2] = 0
    close(value.detach(), wanted)
    close(log_probs.grad, gradient)


def test_kl_controller():
    case = REFERENCE["kl_controllers"]["values"]["adaptive"]
    coef = case["init"]
    for kl, after in zip(case["kl_seq"], case["value_after"], strict=True):
        coef *= F.adaptive_kl_multiplier(kl, case["target"], case["n_steps"], case["horizon"])
        assert coef == pytest.approx(after, rel=1e-9)


def test_masked_statistics():
    primitives = REFERENCE["primitives"]
    values = given("advantages")
    assert float(F.masked_mean(values, MASK)) == pytest.approx(primitives["masked_mean"], abs=1e-5)
    for name, shift in (("masked_whiten", True), ("masked_whiten_noshift", False)):
        close(F.masked_whiten(values, MASK, shift=shift), torch.where(MASK, torch.tensor(primitives[name]), 0))


def test_kl_in_reward():
    batch = batch_of(rewards=OUTCOME, token_rewards=-0.1 * F.kl_estimate(given("old_log_prob"), given("ref_log_prob"), "k1"))
    wanted = torch.tensor(REFERENCE["primitives"]["compute_rewards_kl0.1"])
    close(F.placed_rewards(batch), torch.where(MASK, wanted, 0))


# ---- off-policy correction ----------------------------------------------------------------------------------------------
def test_rollout_correction():
    log_ratio = given("old_log_prob") - given("rollout_log_prob")
    ratio = importance_ratio(log_ratio, MASK, "token")
    cases = REFERENCE["rollout_correction"]
    close(truncated_weights(ratio, MASK, 2.0), torch.tensor(cases["token_tis2"]["weights"]))
    close(icepop_weights(ratio, MASK, 0.5, 5.0), torch.tensor(cases["token_icepop"]["weights"]))
    ours, wanted = gap_metrics(log_ratio, MASK), cases["token_tis2"]["metrics"]
    assert ours["kl"] == pytest.approx(wanted["rollout_corr/kl"], abs=1e-5)
    assert ours["k3"] == pytest.approx(wanted["rollout_corr/k3_kl"], abs=1e-5)
    assert ours["chi2"] == pytest.approx(wanted["rollout_corr/chi2_token"], abs=1e-5)

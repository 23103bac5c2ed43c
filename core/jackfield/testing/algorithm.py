"""Conformance of algorithms: subclass `AlgorithmConformance`, name yours, and get the laws as property tests (docs/laws.md).

    class TestMine(AlgorithmConformance):
        algorithm = "mine"  # or the class, or "path/to/file.py:Mine"

Needs pytest and hypothesis. Batches go the core's own way: `Algorithm`'s hooks, `Role.update` (reduction, split over ranks and
micro-batches), `BoundLoss`; only the model is a table with one log-prob, entropy and value for each sample and token, so that a gradient
shows token by token.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from jackfield import functional as F
from jackfield import microbatch, registry
from jackfield.algorithm import Algorithm
from jackfield.batch import Batch
from jackfield.components import LossSums, OutputRequest, Outputs, Position
from jackfield.config import RunConfig
from jackfield.loss import BoundLoss, reduction_scale
from jackfield.roles import Role
from jackfield.testing.laws import says_which_law

laws = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
"""How many batches each law is tried on."""

ROWS, WIDTH = 32, 16
"""Size of the table: sample ids and positions it knows."""


@dataclass
class Table:
    """A model that knows ROWS samples of WIDTH tokens; also the workers of its role (jackfield.launcher.WorkerGroup)."""

    algorithm: Algorithm
    ranks: int = 1
    joint: bool = False
    """One backward pass of the summed loss instead of one for each micro-batch."""
    gradients: list[Tensor] = field(default_factory=list)
    """One [ROWS, WIDTH] an optimizer step."""

    def __post_init__(self) -> None:
        self.size = self.ranks
        self.weights = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()

    def outputs(self, batch: Batch, request: OutputRequest) -> Outputs:
        """Everything an algorithm can ask for, differentiable; garbage outside the loss mask, as a real model leaves there."""
        x = self.weights[batch.sample_ids, : batch.tokens.shape[1]]
        junk = torch.where(batch.loss_mask, 0, torch.nan)
        softplus = torch.nn.functional.softplus
        return Outputs(
            log_probs=-softplus(x) + junk,
            entropy=softplus(x / 2) + junk if request.entropy else None,
            sum_pi_squared=torch.sigmoid(x) + junk if request.sum_pi_squared else None,
            values=x + junk,
        )

    def call(self, method: str, *args: Any) -> list[Any]:
        """`setup` alone: where each rank stands."""
        return [Position(rank, self.ranks) for rank in range(self.ranks)]

    def scatter(self, method: str, role: str | None, shares: Sequence[Any], *args: Any) -> list[Any]:
        """`update` alone: gradients of all ranks, added up and kept instead of applied."""
        request, state = args
        self.algorithm.load_state_dict(json.loads(json.dumps(state)))
        loss, results, total = BoundLoss(self.algorithm, str(role), request), list[Any](), torch.zeros(())
        for share in shares:
            sums = LossSums()
            for micro_batch in microbatch.cut(share, torch.device("cpu")):
                value, part = loss(self.outputs(micro_batch, loss.request), micro_batch)
                sums.add(part)
                if self.joint:
                    total = total + value
                elif value.requires_grad:
                    value.backward()  # type: ignore[no-untyped-call]
                    self.outputs(micro_batch, loss.request)
            results.append((sums, {}))
        if self.joint:
            total.backward()  # type: ignore[no-untyped-call]
        assert self.weights.grad is not None
        self.gradients.append(self.weights.grad)
        self.weights.grad = None
        return results

    def stream(self, method: str, shares: Sequence[Any]) -> Any:
        """Nothing is generated here."""
        raise NotImplementedError


@dataclass
class Result:
    """What one training step did."""

    batch: Batch
    """The batch that the `advantage` hook returned."""
    gradients: list[Tensor]
    """The policy's, then the critic's; one [ROWS, WIDTH] an optimizer step."""
    metrics: dict[str, float]


@dataclass
class Case:
    """The make-up of a random batch."""

    sizes: list[int]
    """Samples of each group."""
    width: int
    seed: int
    flat: bool = False
    """All rewards equal."""
    garbage: int = 0
    """0: zeros behind the masks; otherwise a seed of NaN, infinities and large numbers."""

    def build(self, needs: Any, config: Any) -> Batch:
        """The batch as the runner hands it to the `advantage` hook of an algorithm with these needs."""
        rng, noise = torch.Generator().manual_seed(self.seed), torch.Generator().manual_seed(self.garbage)
        size, width = sum(self.sizes), self.width
        groups = torch.repeat_interleave(torch.randperm(50, generator=rng)[: len(self.sizes)], torch.tensor(self.sizes, dtype=torch.int64))
        prompts = torch.randint(1, width, (50,), generator=rng)[groups]
        ends = prompts + (torch.rand(size, generator=rng) * (width - prompts + 1)).long()
        place = torch.arange(width)
        response = (place >= prompts[:, None]) & (place < ends[:, None]) & (torch.rand(size, width, generator=rng) < 0.9)
        mask = response & (torch.rand(size, 1, generator=rng) < 0.9)

        def floats(scale: float = 1.0, shift: float = 0.0) -> Tensor:
            values = torch.randn(size, width, generator=rng) * scale + shift
            junk = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e30])[torch.randint(0, 4, (size, width), generator=noise)]
            return torch.where(mask, values, junk if self.garbage else 0)

        def scores() -> Tensor:
            pick = torch.randint(0, 4, (size,), generator=rng)
            drawn = torch.stack([torch.zeros(size), torch.ones(size), torch.full((size,), 0.5), torch.randn(size, generator=rng)])
            drawn = drawn.gather(0, pick[None])[0]
            return torch.full((size,), 0.9) if self.flat else torch.where(mask.any(-1), drawn, torch.nan if self.garbage else 0.0)

        named = {"task": scores(), "style": scores()}
        ids = torch.randperm(ROWS, generator=rng)[:size]
        old = -torch.nn.functional.softplus(Table(None).weights.detach()[ids, :width]) + floats(0.3)  # type: ignore[arg-type]
        rollout = torch.where(mask, old, 0) + floats(0.2)
        optional = {"greedy_rewards": (needs.greedy_baseline, named["task"].flip(0).nan_to_num())}
        optional |= {"entropy": (needs.entropy, floats().abs()), "sum_pi_squared": (needs.sum_pi_squared, floats().sigmoid())}
        reference, values = floats(0.5, -1.0), floats()
        kept = rollout if config.old_log_probs == "rollout" else old if needs.old_log_probs else None
        return Batch(
            tokens=torch.randint(0, 64, (size, width), generator=rng),
            lengths=ends,
            prompt_lengths=prompts,
            response_mask=response,
            loss_mask=mask,
            rollout_log_probs=rollout,
            versions=torch.zeros(size, width, dtype=torch.int32),
            group_ids=groups,
            sample_ids=ids,
            finish_reasons=torch.zeros(size, dtype=torch.int8),
            records=[{} for _ in range(size)],
            extras=TensorDict({n: v for n, (wanted, v) in optional.items() if wanted}, [size]),
            rewards=(named["task"] + 0.5 * named["style"]).nan_to_num(),
            scores=TensorDict(named, [size]),
            ref_log_probs=reference if needs.reference else None,
            critic_values=values if needs.values else None,
            old_log_probs=kept,
            batch_size=[size],
        )


@st.composite
def cases(draw: Any, least: int = 2) -> Case:
    """Ragged batches: groups of unequal size, empty responses, masked samples, holes in responses.

    Sizes come from the drawn seed, not from hypothesis itself, whose first dozen examples would all be nearly empty.
    """
    seed = draw(st.integers(0, 2**32))
    rng = random.Random(seed)
    return Case([rng.randint(1, 5) for _ in range(draw(st.integers(least, 5)))], rng.randint(3, 12), seed)


VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"mini_batches": 2, "kl": {"coef": 0.1}},
    {"old_log_probs": "recompute", "entropy_coef": 0.01, "kl": {"coef": 0.05, "estimator": "unbiased"}},
    {"epochs": 2, "kl": {"coef": 0.1, "place": "reward", "estimator": "k1", "target": 0.1}},
)
"""Settings that every algorithm has and each law is tried under."""


@functools.cache
def _load(name: str) -> Any:
    return registry.load("algorithm", name)


@says_which_law
class AlgorithmConformance:
    """The laws that an algorithm can break. Set `algorithm`, and `config` where yours needs settings."""

    algorithm: str | type[Algorithm]
    """Name, `file.py:Class` or class."""
    config: dict[str, Any] = {}
    """Settings of its own, under each of VARIANTS."""

    def make(self, variant: dict[str, Any]) -> Algorithm:
        """The algorithm under a variant of its settings."""
        found: Any = _load(self.algorithm) if isinstance(self.algorithm, str) else self.algorithm
        algorithm: Algorithm = found(found.Config(**{**self.config, **variant}))
        return algorithm

    def batch(self, case: Case, variant: dict[str, Any]) -> Batch:
        """The case's batch with what the algorithm needs."""
        algorithm = self.make(variant)
        return case.build(algorithm.needs, algorithm.config)

    def step(self, batch: Batch, variant: dict[str, Any], *, budget: int = 10**6, ranks: int = 1, joint: bool = False) -> Result:
        """One training step through the core: `advantage`, then `update` with micro-batches of at most `budget` tokens on `ranks` ranks."""
        algorithm = self.make(variant)
        config = RunConfig(
            policy={"model": "none", "micro_batch_tokens": budget},  # type: ignore[arg-type]
            critic={"micro_batch_tokens": budget},  # type: ignore[arg-type]
            algorithm="none",  # type: ignore[arg-type]
            dataset="none",  # type: ignore[arg-type]
            rewards=["task", {"name": "style", "weight": 0.5}],  # type: ignore[list-item]
            sampling={"max_new_tokens": WIDTH},  # type: ignore[arg-type]
        )
        policy, critic = Table(algorithm, ranks, joint), Table(algorithm, ranks, joint)
        roles = {"policy": Role("policy", policy, config), "critic": Role("critic", critic, config)}
        run = SimpleNamespace(step=3, seed=0, config=config, metrics={}, **roles)
        if hasattr(algorithm, "configure"):
            algorithm.configure(run=run)
        done = algorithm._advantage(run=run, batch=batch.clean())
        metrics = algorithm._update(run=run, batch=done)
        return Result(done, policy.gradients + critic.gradients, metrics)

    def same(self, one: Result, other: Result, *, exact: bool = False) -> None:
        """Gradients and metrics agree, to rtol 1e-5 in float32 or bit for bit."""
        rtol, atol = (0.0, 0.0) if exact else (1e-5, 1e-6)
        assert len(one.gradients) == len(other.gradients)
        for a, b in zip(one.gradients, other.gradients, strict=True):
            torch.testing.assert_close(a, b, rtol=rtol, atol=atol)
        assert one.metrics.keys() == other.metrics.keys()
        for name, value in one.metrics.items():
            assert abs(value - other.metrics[name]) <= atol + rtol * abs(value), (name, value, other.metrics[name])

    # ---- normalisation and reduction ----------------------------------------------------------------------------------
    @laws
    @given(cases(), st.sampled_from(VARIANTS), st.sampled_from([1, 9, 20]), st.integers(1, 3))
    def test_split(self, case: Case, variant: dict[str, Any], budget: int, ranks: int) -> None:
        """Laws 1, 2, 7: gradient and metrics do not depend on micro-batches and data parallelism."""
        batch = self.batch(case, variant)
        self.same(self.step(batch, variant), self.step(batch, variant, budget=budget, ranks=ranks))

    @laws
    @given(cases(), st.sampled_from(VARIANTS))
    def test_order(self, case: Case, variant: dict[str, Any]) -> None:
        """Law 1: nor on the order of samples, nor on how far the batch is padded."""
        batch = self.batch(case, variant)
        order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(case.seed))
        self.same(self.step(batch, variant), self.step(batch[order].pad_to(WIDTH), variant))

    @laws
    @given(cases(), st.sampled_from(VARIANTS))
    def test_masked_samples_are_absent(self, case: Case, variant: dict[str, Any]) -> None:
        """Law 4: a sample without a trainable token changes nothing, its group's baseline included."""
        batch = self.batch(case, variant)
        keep = torch.rand(len(batch), generator=torch.Generator().manual_seed(case.seed)) < 0.6
        masked = batch.replace(loss_mask=batch.loss_mask & keep[:, None])
        self.same(self.step(masked, variant), self.step(batch[keep], variant))

    @laws
    @given(cases(), st.sampled_from(VARIANTS), st.integers(1, 99))
    def test_behind_masks(self, case: Case, variant: dict[str, Any], garbage: int) -> None:
        """Laws 5 and 15: NaN, infinities and large numbers in every masked place change no bit."""
        case.garbage = 0
        clean = self.step(self.batch(case, variant), variant)
        case.garbage = garbage
        spoiled = self.step(self.batch(case, variant), variant)
        self.same(clean, spoiled, exact=True)
        assert all(g.isfinite().all() for g in spoiled.gradients)

    @laws
    @given(cases(), st.sampled_from(VARIANTS))
    def test_partial_backward(self, case: Case, variant: dict[str, Any]) -> None:
        """Law 6: backward by micro-batch, with other forward passes between, equals backward of the sum."""
        batch = self.batch(case, variant)
        self.same(self.step(batch, variant, budget=1), self.step(batch, variant, budget=1, joint=True))

    # ---- KL -----------------------------------------------------------------------------------------------------------
    @laws
    @given(cases(), st.sampled_from(["k1", "k2", "k3", "k1+", "k3+", "unbiased"]))
    def test_kl_gradient(self, case: Case, estimator: str) -> None:
        """Law 12: a KL in the loss adds coefficient x scale x the documented derivative, token by token."""
        with_kl = {"old_log_probs": "recompute", "kl": {"coef": 0.5, "place": "loss", "estimator": estimator}}
        algorithm, batch = self.make(with_kl), self.batch(case, with_kl)
        one = self.step(batch, with_kl)
        other = self.step(batch.replace(ref_log_probs=None), {"old_log_probs": "recompute", "kl": {"coef": 0.0}})
        mask, rows = batch.loss_mask, (batch.sample_ids, slice(0, batch.tokens.shape[1]))
        wanted = torch.zeros(ROWS, WIDTH)
        if mask.any():
            table = Table(algorithm).weights.detach()[rows]
            log_probs = -torch.nn.functional.softplus(table)
            clean = batch.clean()
            assert clean.ref_log_probs is not None
            assert clean.old_log_probs is not None
            d = log_probs - clean.ref_log_probs
            slopes = {"k1": torch.ones_like(d), "k3": 1 - (-d).exp(), "unbiased": d * (log_probs - clean.old_log_probs).exp()}
            scale = reduction_scale(mask, algorithm.config.reduction, algorithm.config.fixed_length or WIDTH)
            wanted[rows] = torch.where(mask, 0.5 * scale * slopes.get(estimator, d) * -table.sigmoid(), 0)
            torch.testing.assert_close(one.gradients[0] - other.gradients[0], wanted, rtol=1e-4, atol=1e-5)

    # ---- degenerate batches -------------------------------------------------------------------------------------------
    @laws
    @given(cases(), st.sampled_from([{}, {"mini_batches": 2}]))
    def test_equal_rewards(self, case: Case, variant: dict[str, Any]) -> None:
        """Law 14: where a group has a baseline and its rewards are equal the advantage is exactly 0; elsewhere it is finite."""
        case.flat = True
        done = self.step(self.batch(case, variant), variant).batch
        assert done.advantages is not None
        assert done.advantages.isfinite().all()
        if self.make(variant).needs.min_group_size > 1:
            assert not done.advantages.any()

    @laws
    @given(cases(), st.sampled_from(VARIANTS), st.integers(0, 99))
    def test_one_token(self, case: Case, variant: dict[str, Any], pick: int) -> None:
        """Law 14: one trainable token is too little to whiten or compare; nothing explodes."""
        batch = self.batch(case, variant)
        places = batch.loss_mask.nonzero()
        if len(places):
            row, column = places[pick % len(places)]
            mask = torch.zeros_like(batch.loss_mask)
            mask[row, column] = True
            result = self.step(batch.replace(loss_mask=mask), variant)
            assert result.batch.advantages is not None
            assert result.batch.advantages.abs().max() < 100
            assert all(g.isfinite().all() for g in result.gradients)

    @laws
    @given(cases(least=0), st.sampled_from(VARIANTS))
    def test_nothing_to_train(self, case: Case, variant: dict[str, Any]) -> None:
        """Law 16: no trainable token, or no sample at all: the step ends, nothing moves, and a metric says so."""
        batch = self.batch(case, variant)
        for empty in (batch.replace(loss_mask=torch.zeros_like(batch.loss_mask)), batch[:0]):
            result = self.step(empty, variant)
            assert not result.gradients
            assert result.metrics["skipped"] == 1

    @laws
    @given(cases(), st.sampled_from(VARIANTS), st.sampled_from([-90.0, 90.0]))
    def test_far_from_the_old_policy(self, case: Case, variant: dict[str, Any], shift: float) -> None:
        """Ratios beyond float32's range give finite gradients."""
        batch = self.batch(case, variant)
        moved = {n: getattr(batch, n) + shift for n in ("old_log_probs", "rollout_log_probs") if getattr(batch, n) is not None}
        assert all(g.isfinite().all() for g in self.step(batch.replace(**moved), variant).gradients)

    # ---- contract -----------------------------------------------------------------------------------------------------
    @laws
    @given(cases(), st.sampled_from(VARIANTS))
    def test_contract(self, case: Case, variant: dict[str, Any]) -> None:
        """`advantage` fills float32 [B, T] and leaves the batch that it was given as it was; the state survives JSON."""
        batch = self.batch(case, variant).clean()
        before = batch.clone()
        done = self.step(batch, variant).batch
        for name in ("advantages", *(["returns"] if self.make(variant).needs.values else [])):
            values = getattr(done, name)
            assert values.dtype == torch.float32
            assert values.shape == batch.tokens.shape
        for name, value in before.items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(getattr(batch, name), value, rtol=0, atol=0, equal_nan=True)
        state = self.make(variant).state_dict()
        algorithm = self.make(variant)
        algorithm.load_state_dict(json.loads(json.dumps(state)))
        assert algorithm.state_dict() == state
        assert F.trained(done).shape == (len(batch),)

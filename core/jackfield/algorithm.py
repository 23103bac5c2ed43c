"""The base of every algorithm: subclass it, write `advantage` and `loss`, and the core does the rest."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field
from torch import Tensor

from jackfield import functional as F
from jackfield.components import Component, ComponentConfig, OutputRequest, Outputs
from jackfield.hookspecs import hookimpl
from jackfield.schedule import NonNegative, Schedule, at

if TYPE_CHECKING:
    from jackfield.batch import Batch

Reduction = Literal["token-mean", "token-sum", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
"""How per-token losses become one number. Denominators are global: all tokens or samples of the mini-batch on all ranks."""


class KLConfig(ComponentConfig):
    """Penalty for leaving the reference policy (docs/algorithms/kl.md)."""

    coef: NonNegative = 0.0
    """Coefficient beta; 0 needs no reference policy."""
    place: Literal["loss", "reward"] = "loss"
    """Add it to the per-token loss, or subtract it from the reward of each token."""
    estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+", "abs+", "unbiased"] = "k3"
    """k1, k2, k3 as in Schulman's note, abs = |k1|; a `+` keeps the value and takes k2's gradient; `unbiased` has the exact value and
    gradient of KL(pi || ref) in expectation, importance weight included."""
    target: float | None = Field(default=None, gt=0)
    """Adapt the coefficient towards this KL (the controller of arXiv 1909.08593); None keeps it fixed."""
    horizon: int = Field(default=10000, gt=0)
    """Samples over which the adaptive coefficient changes."""


class AlgorithmConfig(ComponentConfig):
    """Settings that every algorithm has."""

    epochs: int = Field(default=1, ge=1)
    """Passes over each batch."""
    mini_batches: int = Field(default=1, ge=1)
    """Optimizer steps in one pass; groups are kept together."""
    reduction: Reduction = "token-mean"
    """How per-token losses become one number."""
    fixed_length: int | None = Field(default=None, gt=0)
    """Divisor of `seq-mean-token-sum-norm`, in tokens; default: the batch's longest sequence allowed (`sampling.max_new_tokens`)."""
    kl: KLConfig = KLConfig()
    """Penalty against the reference policy."""
    entropy_coef: Schedule = 0.0
    """Coefficient of the entropy bonus, subtracted from the loss."""
    old_log_probs: Literal["auto", "recompute", "rollout"] = "auto"
    """The denominators of the ratio: recomputed by the trainer before the update; the engine's own; auto: recomputed only where a
    batch takes more than one optimizer step, otherwise the update's own log-probs, detached."""


@dataclass(frozen=True)
class Needs:
    """What an algorithm needs the runner to compute before `advantage`."""

    reference: bool = False
    """Log-probs under the reference policy."""
    old_log_probs: bool = False
    """Log-probs under the current policy, before the update."""
    entropy: bool = False
    """Entropy of each token's distribution, in `extras["entropy"]`."""
    sum_pi_squared: bool = False
    """Sum of squared probabilities of each token's distribution, in `extras["sum_pi_squared"]`."""
    values: bool = False
    """A critic and its values."""
    greedy_baseline: bool = False
    """One greedy rollout a prompt, scored: its reward in `extras["greedy_rewards"]` [B]."""
    min_group_size: int = 1
    """Smallest group that the advantage is defined for."""


@dataclass
class LossOutput:
    """Unreduced results of a loss function."""

    loss: Tensor
    """float32 [b, T]: each token's loss; anything may stand outside the mask."""
    stats: dict[str, Tensor] = field(default_factory=dict)
    """[b, T] each: reported as means over the trainable tokens of the whole batch."""
    maxima: dict[str, Tensor] = field(default_factory=dict)
    """[b, T] each: reported as the largest value over the trainable tokens."""


class Algorithm(Component):
    """Advantages on the controller, per-token losses on the workers. Never reduce: the core owns masks and denominators."""

    kind = "algorithm"
    Config: type[ComponentConfig] = AlgorithmConfig
    config: Any

    def __init__(self, config: Any = None) -> None:
        super().__init__(config)
        self.step = 0
        self.kl_coef = at(self.config.kl.coef, 0)

    @property
    def needs(self) -> Needs:
        """What the runner must compute first; extend with `dataclasses.replace(super().needs, ...)`."""
        kl = self.config.kl
        many = self.config.epochs * self.config.mini_batches > 1
        use_kl = kl.coef != 0.0 or kl.target is not None
        choice = self.config.old_log_probs
        old = choice == "recompute" or (choice == "auto" and (many or (use_kl and kl.place == "reward")))
        return Needs(reference=use_kl, old_log_probs=old)

    @abstractmethod
    def advantage(self, batch: Batch) -> Batch:
        """The batch with `advantages` [B, T] (and `returns` for a critic). Fields are clean: 0 outside `loss_mask`."""

    @abstractmethod
    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """Per-token policy loss of a micro-batch; `batch.old_log_probs` is always there. Runs on workers, with gradients."""

    def critic_loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """Per-token loss of the critic, for algorithms whose `needs.values` is true."""
        raise NotImplementedError(f"{type(self).__name__} declares needs.values but no critic_loss")

    def now(self, schedule: Schedule) -> float:
        """A schedule's value at the step under way; on the workers too."""
        return at(schedule, self.step)

    def prepare(self, batch: Batch) -> Batch:
        """Called on the controller for each whole mini-batch before it is split: the place for statistics over all its tokens."""
        return batch

    def policy_loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """`loss`, weighted by `loss_weights`, with the KL penalty and the entropy bonus."""
        out = self.loss(outputs, batch)
        if not isinstance(out, LossOutput):
            raise TypeError(f"loss returned a {type(out).__name__}; return LossOutput(per-token loss)")
        assert outputs.log_probs is not None
        loss = out.loss if batch.loss_weights is None else out.loss * batch.loss_weights
        stats = dict(out.stats)
        kl = self.config.kl
        if batch.ref_log_probs is not None:
            stats["kl"] = F.kl_estimate(outputs.log_probs.detach(), batch.ref_log_probs, "k3")
            if kl.place == "loss" and self.kl_coef:
                estimate = F.kl_estimate(outputs.log_probs, batch.ref_log_probs, kl.estimator, batch.old_log_probs)
                loss = loss + self.kl_coef * estimate
        coef = self.now(self.config.entropy_coef)
        if outputs.entropy is not None:
            stats["entropy"] = outputs.entropy.detach()
            if coef:
                loss = loss - coef * outputs.entropy
        return LossOutput(loss, stats, out.maxima)

    def request(self, sampling: Any) -> OutputRequest:
        """Outputs that the update's forward pass must give."""
        s = sampling
        return OutputRequest(entropy=self.config.entropy_coef != 0.0, temperature=s.temperature or 1.0, top_p=s.top_p, top_k=s.top_k)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able state; sent to the workers with each update and kept in checkpoints."""
        return {"step": self.step, "kl_coef": self.kl_coef}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        self.step, self.kl_coef = state["step"], state["kl_coef"]

    @hookimpl(specname="advantage")
    def _advantage(self, run: Any, batch: Batch) -> Batch:
        self.step = run.step
        if self.config.kl.target is None:
            self.kl_coef = at(self.config.kl.coef, run.step)
        if self.needs.reference and self.config.kl.place == "reward":
            assert batch.old_log_probs is not None and batch.ref_log_probs is not None
            penalty = self.kl_coef * F.kl_estimate(batch.old_log_probs, batch.ref_log_probs, self.config.kl.estimator)
            batch = batch.replace(token_rewards=-penalty if batch.token_rewards is None else batch.token_rewards - penalty)
        return self.advantage(batch)

    @hookimpl(specname="update")
    def _update(self, run: Any, batch: Batch) -> dict[str, float]:
        batch = batch.keep(F.trained(batch))
        totals: dict[str, list[float]] = {}
        for epoch in range(self.config.epochs):
            for mini in F.split_groups(batch, self.config.mini_batches, seed=hash((run.seed, run.step, epoch)) % 2**31):
                metrics = run.policy.update(self, self.prepare(mini))
                if self.needs.values:
                    metrics |= run.critic.update(self, mini)
                for name, value in metrics.items():
                    totals.setdefault(name, []).append(value)
        result = {name: sum(values) / len(values) for name, values in totals.items()}
        if self.config.kl.target is not None and "kl" in result:
            step = F.adaptive_kl_multiplier(result["kl"], self.config.kl.target, len(batch), self.config.kl.horizon)
            self.kl_coef *= step
        if self.needs.reference:
            result["kl_coef"] = self.kl_coef
        return result

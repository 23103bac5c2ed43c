"""Correction for samples that came from another policy than the one that is trained: hook plugin `offpolicy`, for every algorithm.

rho[t] = pi_old[t] / mu[t], with pi_old the policy before the update, recomputed by the trainer, and mu the engine's own log-probs: they
differ by numerics (kernels, precision, quantisation) and, in asynchronous runs, by staleness. Weights multiply the policy's loss.

    truncated importance sampling      w = min(rho, upper)                      https://fengyao.notion.site/off-policy-rl
    IcePop                             w = rho within [lower, upper], else 0    https://ringtech.notion.site/icepop
    level token, sequence (product over the sample) or geometric (its per-token mean): arXiv 2507.18071 for the latter
    rejection                          samples whose measure leaves [reject_lower, reject_upper] are not trained on at all

Baselines are formed before a sample is rejected: its reward is as informative as any other's.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

import jackfield_estimators as F
from jackfield import Batch, Component, ComponentConfig, hookimpl
from jackfield.errors import ConfigError

Level = Literal["token", "sequence", "geometric"]


def importance_ratio(log_ratio: Tensor, mask: Tensor, level: str) -> Tensor:
    """rho by token [B, T]; for `sequence` and `geometric` the same on all of a sample's tokens, [B, 1]."""
    if level == "sequence":
        log_ratio = torch.where(mask, log_ratio, 0).sum(-1, keepdim=True)
    elif level == "geometric":
        log_ratio = F.sequence_mean(log_ratio, mask)
    return log_ratio.clamp(-F.LOG_RATIO_LIMIT, F.LOG_RATIO_LIMIT).exp()


def truncated_weights(ratio: Tensor, mask: Tensor, upper: float) -> Tensor:
    """min(rho, upper), [B, T]; 0 outside the mask."""
    return torch.where(mask, ratio.clamp(max=upper), 0)


def icepop_weights(ratio: Tensor, mask: Tensor, lower: float, upper: float) -> Tensor:
    """rho where it is within [lower, upper], 0 elsewhere; [B, T]."""
    return torch.where(mask & (ratio >= lower) & (ratio <= upper), ratio, 0)


def accepted(log_ratio: Tensor, mask: Tensor, measure: str, lower: float, upper: float) -> Tensor:
    """bool [B, 1]: samples whose rho (product, geometric mean or, for `token`, every single one) lies within [lower, upper]."""
    ratio = importance_ratio(log_ratio, mask, measure)
    inside = (ratio >= lower) & (ratio <= upper)
    return (inside | ~mask).all(-1, keepdim=True) if measure == "token" else inside


class OffPolicyCorrection(Component):
    """Importance weights and rejection between sampling and training."""

    kind = "hooks"

    class Config(ComponentConfig):
        """Settings of the correction."""

        level: Level | None = "token"
        """What rho is of: each token, the whole sample, or the sample's geometric mean by token; None: no weights, metrics only."""
        upper: float = Field(default=2.0, gt=0)
        """Largest weight."""
        lower: float | None = Field(default=None, ge=0)
        """Set: IcePop, a weight outside [lower, upper] becomes 0. None: truncation at `upper`."""
        reject: Level | None = None
        """Drop samples by this measure of rho (`token`: by their worst token); None: keep all."""
        reject_lower: float = Field(default=0.5, ge=0)
        """Smallest rho of a sample that is kept."""
        reject_upper: float = Field(default=2.0, gt=0)
        """Largest rho of a sample that is kept."""
        normalize: bool = False
        """Divide the weights by their mean over the batch's tokens."""

        @model_validator(mode="after")
        def _ordered(self) -> Any:
            for low, high, name in ((self.lower, self.upper, "lower"), (self.reject_lower, self.reject_upper, "reject_lower")):
                if low is not None and low > high:
                    raise ValueError(f"{name} is {low}, above its upper bound {high}")
            return self

    config: Config

    @hookimpl
    def configure(self, run: Any) -> None:
        """Refuse the combination that corrects nothing."""
        if run.algorithm.config.old_log_probs == "rollout":
            raise ConfigError(
                "offpolicy: with algorithm.old_log_probs 'rollout' the loss's own ratio starts from the engine already; "
                "set it to auto or recompute, or drop the plugin"
            )

    @hookimpl(wrapper=True)
    def advantage(self, run: Any, batch: Batch) -> Generator[None, Batch, Batch]:
        """Weight the batch that the algorithm returns; compute the log-probs before the update where it did not need them."""
        result = yield
        if result.old_log_probs is None:
            result = result.replace(old_log_probs=run.policy.log_probs(result)).clean()
        corrected, metrics = self.correct(result)
        run.metrics.update({f"offpolicy/{name}": value for name, value in metrics.items()})
        return corrected

    def correct(self, batch: Batch) -> tuple[Batch, dict[str, float]]:
        """The batch with `loss_weights` and a smaller `loss_mask`, and the metrics of the gap."""
        assert batch.old_log_probs is not None
        config, mask = self.config, batch.loss_mask
        log_ratio = torch.where(mask, batch.old_log_probs - batch.rollout_log_probs, 0)
        metrics = gap_metrics(log_ratio, mask)
        weights = batch.loss_weights
        if config.level is not None:
            ratio = importance_ratio(log_ratio, mask, config.level).expand_as(log_ratio)
            if config.lower is None:
                own = truncated_weights(ratio, mask, config.upper)
            else:
                own = icepop_weights(ratio, mask, config.lower, config.upper)
            outside = (ratio > config.upper) | (ratio < (config.lower or 0.0))
            mean = F.masked_mean(own, mask)
            metrics |= {
                "weight_mean": float(mean),
                "weight_max": float(own.max()) if own.numel() else 0.0,
                "weight_ess": float(mean.square() / F.masked_mean(own.square(), mask).clamp(min=1e-12)),
                "outside": float(F.masked_mean(outside.float(), mask)),
            }
            own = own / mean.clamp(min=1e-8) if config.normalize else own
            weights = own if weights is None else own * weights
        if config.reject is not None:
            keep = accepted(log_ratio, mask, config.reject, config.reject_lower, config.reject_upper)
            metrics["rejected"] = float((mask.any(-1) & ~keep[:, 0]).sum() / mask.any(-1).sum().clamp(min=1))
            batch = batch.replace(loss_mask=mask & keep)
        return batch.replace(loss_weights=weights), metrics


def gap_metrics(log_ratio: Tensor, mask: Tensor) -> dict[str, float]:
    """How far training and rollout log-probs are apart over the mask: k1 and k3 of KL(mu || pi_old), chi-squared, and the largest gap."""
    ratio = log_ratio.clamp(-F.LOG_RATIO_LIMIT, F.LOG_RATIO_LIMIT).exp()
    values = {"kl": -log_ratio, "k3": ratio - 1 - log_ratio, "gap_mean": log_ratio.abs(), "chi2": ratio.square() - 1}
    metrics = {name: float(F.masked_mean(value, mask)) for name, value in values.items()}
    return metrics | {"gap_max": float(torch.where(mask, log_ratio, 0).abs().max()) if mask.numel() else 0.0}

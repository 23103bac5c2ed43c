"""Reduction: the one place where per-token losses become a scalar, with denominators computed once over the whole mini-batch."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from jackfield import results
from jackfield.algorithm import Algorithm, LossOutput, Reduction
from jackfield.batch import Batch
from jackfield.components import LossSums, OutputRequest, Outputs


def reduction_scale(loss_mask: Tensor, reduction: Reduction, fixed_length: int) -> Tensor:
    """The reduction as one factor a token: sum(loss * scale) is the reduced loss.

    Call it with the whole mini-batch, all ranks' samples together; the result is then split with the batch, and the gradient is the
    same for every split. `loss_mask`: bool [B, T]. Returns float32 [B, T], 0 outside the mask. Samples without a trainable token
    do not count as sequences, so that a masked sample equals an absent one (law 4).
    """
    lengths = loss_mask.view(torch.uint8).sum(-1, keepdim=True, dtype=torch.int32)  # bytes: torch is slow to sum bools
    sequences = (lengths > 0).sum().clamp(min=1)
    one = torch.ones((), device=lengths.device)
    factors = {
        "token-mean": one / lengths.sum().clamp(min=1),
        "token-sum": one,
        "seq-mean-token-sum": one / sequences,
        "seq-mean-token-mean": one / lengths.clamp(min=1) / sequences,
        "seq-mean-token-sum-norm": one / fixed_length / sequences,
    }
    return torch.where(loss_mask, factors[reduction], 0)


class BoundLoss:
    """An algorithm's loss for one role as `Backend.forward_backward` calls it."""

    def __init__(self, algorithm: Algorithm, role: str, request: OutputRequest) -> None:
        self.algorithm, self.role = algorithm, role
        self.request = request if role == "policy" else dataclasses.replace(request, log_probs=False, entropy=False)

    def __call__(self, outputs: Outputs, micro_batch: Batch) -> tuple[Tensor, LossSums]:
        """The micro-batch's share of the loss and the sums of its statistics. `micro_batch` needs `loss_scale`."""
        mask, scale = micro_batch.loss_mask, micro_batch.loss_scale
        assert scale is not None
        results.outputs(f"the {self.role}'s backend", [outputs], [micro_batch])
        outputs = Outputs(**{n: None if v is None else torch.where(mask, v, 0) for n, v in vars(outputs).items()})
        if self.role == "policy":
            assert outputs.log_probs is not None
            if micro_batch.old_log_probs is None:
                micro_batch = micro_batch.replace(old_log_probs=outputs.log_probs.detach())
            out = self.algorithm.policy_loss(outputs, micro_batch)
            recomputed = self.algorithm.config.old_log_probs != "rollout"
            now = micro_batch.old_log_probs if recomputed else outputs.log_probs.detach()
            assert now is not None
            out = _with_rollout_gap(out, now, micro_batch)
        else:
            out = self.algorithm.critic_loss(outputs, micro_batch)
        for name, value in {"loss": out.loss, **out.stats, **out.maxima}.items():
            results.same(f"{type(self.algorithm).__name__} returned {name}", value, mask.shape)
        per_token = torch.where(mask, out.loss, 0)
        loss = (per_token * scale).sum()
        sums = {n: torch.where(mask, v.detach(), 0).sum() for n, v in out.stats.items()}
        sums |= {"loss": loss.detach(), "tokens": mask.sum()}
        maxima = {n: torch.where(mask, v.detach(), -torch.inf).amax() for n, v in out.maxima.items()} if mask.numel() else {}
        return loss, LossSums(sums, maxima)


def _with_rollout_gap(out: LossOutput, log_probs: Tensor, batch: Batch) -> LossOutput:
    """Add the gap between what the engine said and what the trainer computes with the same weights (law 11); its KL by k3."""
    gap = log_probs - batch.rollout_log_probs
    ratio = gap.exp()
    stats = {"rollout_gap/mean": gap.abs(), "rollout_gap/kl": ratio - 1 - gap, "rollout_gap/ratio": ratio}
    return LossOutput(out.loss, out.stats | stats, out.maxima | {"rollout_gap/max": gap.abs()})


def finish(parts: list[LossSums]) -> dict[str, float]:
    """Metrics from the sums of all DP ranks: means over trainable tokens, except `loss`, which is reduced already, and `tokens`."""
    total = LossSums()
    for part in parts:
        total.add(part)
    tokens = max(float(total.sums.get("tokens", 0)), 1.0)
    metrics = {n: float(v) if n in ("loss", "tokens") else float(v) / tokens for n, v in total.sums.items()}
    return metrics | {n: float(v) for n, v in total.maxima.items()}

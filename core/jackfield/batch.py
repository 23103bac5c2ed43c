"""The data that flows through one step: right-padded tensors [B, T] with one documented meaning each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, cast

import numpy as np
import torch
from tensordict import NonTensorData, NonTensorStack, TensorClass, TensorDict
from torch import Tensor

FINISH_REASONS = ("stop", "length", "abort")
"""Finish reasons by their code in `Batch.finish_reasons`."""


def any_token(mask: Tensor) -> Tensor:
    """bool [B]: samples with at least one token in the mask, bool [B, T]. torch's own `any` takes thirty times as long over bool."""
    return mask.view(torch.uint8).any(-1).bool()


@dataclass
class Prompt:
    """One prompt as the rollout receives it."""

    id: int
    """Position in the run's stream of prompts: unique in a run, the same after a resume."""
    record: dict[str, Any]
    """The dataset's row: `prompt` (text, or chat messages) and whatever its rewards need."""


@dataclass
class Trajectory:
    """One finished sample before it is padded into a batch.

    Sequences are lists or, far quicker, numpy arrays. `tokens` runs over prompt and response; the others may as well, or start later:
    they then belong to the last tokens.
    """

    prompt: Prompt
    tokens: Any
    """Token ids of the whole conversation, prompt first."""
    prompt_length: int
    """Number of leading tokens that belong to the prompt."""
    sampled: Any
    """True exactly where the engine sampled the token; a tool's output is False."""
    log_probs: Any
    """Log-prob of each sampled token under the sampling distribution; ignored elsewhere."""
    versions: Any
    """Policy version that produced each sampled token; ignored elsewhere."""
    finish_reason: str
    """One of FINISH_REASONS."""
    record: dict[str, Any] = field(default_factory=dict)
    """What rewards read: `prompt`, `response` (texts) beside the dataset's own fields."""


class Batch(TensorClass):
    """B samples of at most T tokens, prompt and response together, right-padded.

    A value at [b, t] belongs to token t itself: its log-prob is log p(token t | tokens before t), so column 0 of every
    log-prob is 0. Anything outside `loss_mask` is never read (docs/laws.md, law 5). Optional fields are None until a stage fills them.
    """

    tokens: Tensor
    """int64 [B, T]: token ids; padding holds any id."""
    lengths: Tensor
    """int64 [B]: tokens that are not padding."""
    prompt_lengths: Tensor
    """int64 [B]: leading tokens that belong to the prompt."""
    response_mask: Tensor
    """bool [B, T]: true exactly where the engine sampled the token, the end token included."""
    loss_mask: Tensor
    """bool [B, T]: tokens to train on: `response_mask` less the samples and tokens that scoring or a filter rejected."""
    rollout_log_probs: Tensor
    """float32 [B, T]: log-prob under the sampling distribution, as the engine reported it."""
    versions: Tensor
    """int32 [B, T]: policy version that sampled the token, -1 elsewhere."""
    group_ids: Tensor
    """int64 [B]: samples of one prompt share an id."""
    sample_ids: Tensor
    """int64 [B]: unique in a run, the same after a resume."""
    finish_reasons: Tensor
    """int8 [B]: index into FINISH_REASONS."""
    records: Any
    """list of B dicts: the dataset's row with `prompt` and `response` as text."""
    extras: TensorDict
    """Plugins' own tensors by name, [B, ...]; a float tensor [B, T] is cleaned behind the mask like the fields here."""
    rewards: Tensor | None = None
    """float32 [B]: weighted sum of the scores, with whatever a plugin shaped into it."""
    scores: TensorDict | None = None
    """float32 [B] by reward name: unweighted; NaN where that reward failed on the sample."""
    token_rewards: Tensor | None = None
    """float32 [B, T]: per-token additions to the reward (KL in reward); 0 where there is none."""
    ref_log_probs: Tensor | None = None
    """float32 [B, T]: log-prob under the reference policy."""
    old_log_probs: Tensor | None = None
    """float32 [B, T]: log-prob under the policy as it was at the start of this step's update."""
    critic_values: Tensor | None = None
    """float32 [B, T]: the critic's value of the state before the token, as it was before this step's update."""
    advantages: Tensor | None = None
    """float32 [B, T]"""
    returns: Tensor | None = None
    """float32 [B, T]: targets of the critic."""
    loss_weights: Tensor | None = None
    """float32 [B, T]: factor on each token's policy loss (importance weights); 1 where None."""
    loss_scale: Tensor | None = None
    """float32 [B, T]: the reduction as one factor a token (jackfield.loss.reduction_scale): the loss is their dot product."""

    @property
    def attention_mask(self) -> Tensor:
        """bool [B, T]: true where a token is not padding."""
        return torch.arange(self.tokens.shape[1], device=self.tokens.device) < self.lengths[:, None]

    @property
    def response_lengths(self) -> Tensor:
        """int64 [B]: sampled tokens of each sample."""
        return self.response_mask.view(torch.uint8).sum(-1, dtype=torch.int32).long()  # in half the time of bools

    def replace(self, **fields: Any) -> Batch:
        """A shallow copy with some fields replaced; the original, which others may hold, stays as it is."""
        # A new dictionary over the same values: clone(recurse=False) would clone each record, 30 ms for 1,024 samples.
        new: Batch = Batch.from_tensordict(TensorDict(dict(self.items()), batch_size=self.batch_size))
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    def keep(self, mask: Tensor) -> Batch:
        """The samples of a bool mask [B]; where that is all of them the batch itself, without a copy."""
        return self if bool(mask.all()) else self[mask]

    def with_extras(self, **tensors: Tensor) -> Batch:
        """A shallow copy with more extras."""
        return self.replace(extras=self.extras.clone(recurse=False).update(tensors))

    def _map(self, change: Callable[[str, Tensor], Tensor]) -> Batch:
        """A shallow copy with every tensor [B, T, ...], extras among them, as `change` of its name and itself gives it."""
        full = self.tokens.shape
        own, extras = ([(n, v) for n, v in x.items() if isinstance(v, Tensor) and v.shape[:2] == full] for x in (self, self.extras))
        return self.replace(**{n: change(n, v) for n, v in own}).with_extras(**{n: change(n, v) for n, v in extras})

    def clean(self) -> Batch:
        """A shallow copy whose float [B, T] fields hold 0 outside `loss_mask`, so that what stands there, NaN included, cannot matter."""
        mask = self.loss_mask
        return self._map(lambda _, v: torch.where(mask, v, 0) if v.is_floating_point() and v.shape == mask.shape else v)

    def trim(self) -> Batch:
        """The same samples without the columns that are padding in all of them."""
        width = int(self.lengths.max()) if len(self) else 0
        return self if width == self.tokens.shape[1] else self._map(lambda _, v: v[:, :width])

    def pad_to(self, width: int) -> Batch:
        """The same samples with padding columns up to `width` (zeros, False; version -1)."""
        extra = width - self.tokens.shape[1]

        def padded(name: str, value: Tensor) -> Tensor:
            columns = value.new_full((len(value), extra, *value.shape[2:]), -1 if name == "versions" else 0)
            return torch.cat([value, columns], dim=1)

        return self if extra <= 0 else self._map(padded)

    @staticmethod
    def concat(parts: Sequence[Batch]) -> Batch:
        """Join batches of any widths, empty ones among them; the result is as wide as the widest."""
        parts = [part for part in parts if len(part)] or parts[:1]
        width = max(part.tokens.shape[1] for part in parts)
        return parts[0] if len(parts) == 1 else cast(Batch, torch.cat([part.pad_to(width) for part in parts]))  # type: ignore[misc]

    @staticmethod
    def from_trajectories(items: Sequence[Trajectory], *, group_size: int) -> Batch:
        """Pad finished samples into a batch. Sample ids are prompt id x `group_size` + position within the group."""
        lengths = [len(item.tokens) for item in items]

        def padded(name: str, dtype: Any) -> Tensor:
            rows = np.zeros((len(items), max(lengths, default=0)), dtype)
            for row, end, values in zip(rows, lengths, [getattr(item, name) for item in items], strict=True):
                row[end - len(values) : end] = values
            return torch.from_numpy(rows)

        position: dict[int, Iterator[int]] = defaultdict(count)
        ids = [item.prompt.id * group_size + next(position[item.prompt.id]) for item in items]
        mask = padded("sampled", np.bool_)
        return Batch(
            tokens=padded("tokens", np.int64),
            lengths=torch.tensor(lengths, dtype=torch.int64),
            prompt_lengths=torch.tensor([i.prompt_length for i in items], dtype=torch.int64),
            response_mask=mask,
            loss_mask=mask.clone(),
            rollout_log_probs=padded("log_probs", np.float32).masked_fill_(~mask, 0),
            versions=padded("versions", np.int32).masked_fill_(~mask, -1),
            group_ids=torch.tensor([i.prompt.id for i in items], dtype=torch.int64),
            sample_ids=torch.tensor(ids, dtype=torch.int64),
            finish_reasons=torch.tensor([FINISH_REASONS.index(i.finish_reason) for i in items], dtype=torch.int8),
            records=NonTensorStack(*[NonTensorData(i.record) for i in items]) if items else [],
            extras=TensorDict({}, [len(items)]),
            batch_size=[len(items)],
        )

"""What plugins give back, checked where it arrives: a wrong shape names its plugin there, not another one three stages later."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jackfield.batch import Batch
from jackfield.errors import PluginError

PER_SAMPLE = ("lengths", "prompt_lengths", "group_ids", "sample_ids", "finish_reasons", "rewards", "records")
"""Tensors of a Batch that are [B] (`records` is one where there are none); its others are [B, T]."""
WANTED: dict[str, Any] = {"rollout": Batch, "score": Mapping, "filter": Tensor, "advantage": Batch, "update": Mapping}
"""What the result of a stage hook is."""


def checked(plugin: str, hook: str, value: Any, args: Sequence[Any], *, wrapper: bool = False) -> Any:
    """A hook's result; None leaves the answer to other plugins, a wrapper of `score` or `filter` has the list of all results.

    Raises PluginError unless it is what the specification says.
    """
    if hook in WANTED:
        size = next((a.batch_size for a in args if isinstance(a, Batch)), None)
        for each in value if wrapper and isinstance(value, list) else [value]:
            if each is not None:
                _check(f"plugin {plugin!r} returned from hook {hook!r}", hook, each, size)
    return value


def _check(who: str, hook: str, value: Any, size: Sequence[int] | None) -> None:
    if not isinstance(value, WANTED[hook]):
        raise PluginError(f"{who} a {type(value).__name__}; a {WANTED[hook].__name__} is wanted")
    if hook == "advantage":
        same(f"{who} advantages", value.advantages, value.tokens.shape)
        same(f"{who} rewards", value.rewards, value.batch_size)
    if isinstance(value, Batch):
        samples, tokens = value.batch_size, value.tokens.shape  # a TensorClass's attributes are slow to come by
        for name, found in [(n, v) for n, v in value.items() if isinstance(v, Tensor)]:
            same(f"{who} {name}", found, samples if name in PER_SAMPLE else tokens)
    if hook == "filter" and size is not None:
        same(f"{who} a verdict", value, size, torch.bool)
    for name, found in value.items() if hook == "score" else ():
        same(f"{who} {name}", found, size or found.shape, torch.float32)


def answered(hook: Any, value: Any) -> Any:
    """The result of calling a stage hook. Raises PluginError where nothing came back."""
    if value is None:
        who = ", ".join(impl.plugin_name for impl in hook.get_hookimpls()) or "no plugin at all"
        raise PluginError(f"no result came back from hook {hook.name!r} of {who}: one must return it, and a wrapper what its yield gave")
    return value


def outputs(who: str, found: Sequence[Any], batches: Sequence[Batch]) -> None:
    """Raise PluginError unless `found` has an Outputs for each micro-batch, all of it [b, T]."""
    if len(found) != len(batches):
        raise PluginError(
            f"{who} returned outputs of {len(found)} micro-batches, but was given {len(batches)}; one each is wanted, in order"
        )
    for name, value, batch in ((n, v, b) for out, b in zip(found, batches, strict=True) for n, v in vars(out).items() if v is not None):
        same(f"{who} returned {name}", value, batch.tokens.shape)


def same(what: str, found: Any, shape: Sequence[int], dtype: torch.dtype | None = None) -> None:
    """Raise PluginError unless `found` is a tensor of this shape (and type)."""
    if not isinstance(found, Tensor) or found.shape != shape or dtype not in (None, found.dtype):
        got = f"of shape {list(found.shape)}, {found.dtype}" if isinstance(found, Tensor) else f"as {type(found).__name__}"
        raise PluginError(f"{what} {got}; {dtype or 'a tensor'} of shape {list(shape)} is wanted")

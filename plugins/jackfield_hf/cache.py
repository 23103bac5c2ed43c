"""Keys and values of running samples in slots of one preallocated block, and the attention that reads them.

Slots 0 to n-1 hold the n running samples, each at its own length: there is no left padding, so a sample may join or leave at any step. A
sample that finishes is replaced by the last one, which copies one slot. Prompts are right-padded while they are read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AttentionInterface
from transformers.cache_utils import Cache

NAME = "jackfield_slots"
"""Name of this attention in transformers' registry."""


class SlotCache(Cache):
    """Stands for `past_key_values`. Call `reading` or `decoding` before each forward pass of the model."""

    def __init__(self) -> None:  # not Cache's own: there are no layer objects, and shapes are learnt from the first keys
        self.layers: list[Any] = []
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.rows = self.width = 0
        self.owner: Tensor | None = None
        self._bias: dict[int | None, Tensor | None] = {}

    def reserve(self, rows: int, width: int) -> None:
        """Make room for `rows` samples of `width` tokens; a block that is large enough is kept, so that its pages stay mapped."""
        if rows > self.rows or width > self.width:
            self.clear()
            self.rows, self.width = rows, width

    def clear(self) -> int:
        """Free the block; returns its bytes."""
        freed = sum(t.nbytes for t in (*self.keys.values(), *self.values.values()))
        self.keys, self.values, self.rows, self.width = {}, {}, 0, 0
        return freed

    def reading(self, owner: Tensor, start: int) -> None:
        """Next come whole prompts; slots from `start` on take a copy of prompt `owner[i]` each."""
        self.owner, self.start, self._bias = owner, start, {}

    def decoding(self, positions: Tensor) -> None:
        """Next comes one token for each of the first slots, at these positions (int64 [n])."""
        self.owner, self.positions, self._bias = None, positions, {}
        self.slots = torch.arange(len(positions), device=positions.device)
        self.longest = int(positions.max()) + 1

    def update(self, key: Tensor, value: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Store [samples, KV heads, tokens, D] and return what attention reads."""
        if layer not in self.keys:
            shapes = ((self.rows, x.shape[1], self.width, x.shape[3]) for x in (key, value))
            # zeros: a masked place still takes part with weight 0, and 0 x NaN of fresh memory is NaN
            self.keys[layer], self.values[layer] = (torch.zeros(s, dtype=key.dtype, device=key.device) for s in shapes)
        keys, values = self.keys[layer], self.values[layer]
        if self.owner is not None:
            end, width = self.start + len(self.owner), key.shape[2]
            keys[self.start : end, :, :width] = key[self.owner]
            values[self.start : end, :, :width] = value[self.owner]
            return key, value
        keys[self.slots, :, self.positions] = key[:, :, 0]
        values[self.slots, :, self.positions] = value[:, :, 0]
        count = len(self.slots)
        return keys[:count, :, : self.longest], values[:count, :, : self.longest]

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first `length` tokens of one slot to another."""
        for block in (*self.keys.values(), *self.values.values()):
            block[target, :, :length] = block[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given, so nobody needs this."""
        return 0

    def bias(self, width: int, window: int | None, like: Tensor) -> Tensor | None:
        """What to add to scores, [n, 1, 1, width] when decoding, [width, width] when reading; None where plain causality will do."""
        window = None if window is None or window >= width else window
        if window not in self._bias:
            column = torch.arange(width, device=like.device)
            if self.owner is not None:
                distance = column[:, None] - column
                hidden = (distance < 0) | (distance >= window) if window else None
            elif window is None and bool((self.positions == width - 1).all()):
                hidden = None
            else:
                distance = self.positions[:, None, None, None] - column
                hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
            self._bias[window] = None if hidden is None else torch.zeros_like(hidden, dtype=like.dtype).masked_fill_(hidden, -torch.inf)
        return self._bias[window]


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    jackfield_cache: SlotCache | None = None,
    **unknown: Any,
) -> tuple[Tensor, None]:
    """Attention in transformers' calling convention. Raises ValueError on features it does not know (logit caps, sinks)."""
    odd = [n for n in ("softcap", "s_aux", "position_bias") if unknown.get(n) is not None]
    if odd or attention_mask is not None or jackfield_cache is None:
        raise ValueError(f"attention features {odd or 'mask or missing cache'} are not supported")
    samples, heads, tokens, size = query.shape
    groups = key.shape[1]
    bias = jackfield_cache.bias(key.shape[2], sliding_window, query)
    if jackfield_cache.owner is not None:
        out = F.scaled_dot_product_attention(
            query, key, value, bias, is_causal=bias is None and tokens > 1, scale=scaling, enable_gqa=heads != groups
        )
        return out.transpose(1, 2), None
    # one token: the query heads of a KV head stand where the query's tokens would, so that each key is read once
    out = F.scaled_dot_product_attention(query.view(samples, groups, heads // groups, size), key, value, bias, scale=scaling)
    return out.reshape(samples, 1, heads, value.shape[3]), None


AttentionInterface.register(NAME, attention)

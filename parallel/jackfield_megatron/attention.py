"""Self-attention with a layout and kernels of our own: contiguous Q, K, V rows, torch's fused attention, packing, context parallelism.

Megatron-Core's SelfAttention interleaves Q, K and V for each group of heads and computes attention unfused without Transformer
Engine. Here `linear_qkv` holds on each tensor-parallel rank the rows [q | k | v] of that rank, so that every Hugging Face tensor
is one block of rows and an engine such as vLLM can share the storage. Where TP exceeds the number of key/value heads each rank
holds a part of a head's rows (no weight is replicated) and the small K and V activations are gathered.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.tensor_parallel.mappings import all_gather_last_dim_from_tensor_parallel_region
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from jackfield_megatron.collectives import gather_sequence

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None


@dataclass
class Geometry:
    """Where each position of a micro-batch stands. It travels through Megatron's layers as `packed_seq_params`."""

    cos: Tensor
    """[s, 1, 1, head_dim]: cosines of the local positions."""
    sin: Tensor
    cu_seqlens: Tensor | None = None
    """int32 [n + 1]: where packed sequences begin; None for a padded micro-batch."""
    lengths: tuple[int, ...] = ()
    """Lengths of the packed sequences."""
    max_length: int = 0


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm (arXiv 1910.07467) whose gradient Megatron sums over TP under sequence parallelism."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.eps = eps
        device = None if config.use_cpu_initialization else torch.cuda.current_device()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., hidden]."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (arXiv 2104.09864) in the half-split form of Hugging Face models. `x` [s, b, heads, head_dim]."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos + rotated * sin


def _rotate_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return rotate(q, cos, sin), rotate(k, cos, sin)


# One kernel instead of a dozen where there is a compiler for them; the numbers are those of the plain function.
rotate_pair = torch.compile(_rotate_pair) if torch.cuda.is_available() else _rotate_pair


def attend(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
    """Causal attention on one rank: q [s, b, heads, d], k and v [s, b, groups, d]. Returns [s, b, heads x d]."""
    s, b = q.shape[:2]
    if geometry.cu_seqlens is None:
        out = _sdpa(q, k, v, is_causal=True)
    elif q.is_cuda and varlen_attn is not None and q.dtype in (torch.bfloat16, torch.float16):
        out = _varlen(q.squeeze(1), k.squeeze(1), v.squeeze(1), geometry).unsqueeze(1)
    else:
        parts = zip(*(x.split(list(geometry.lengths)) for x in (q, k, v)), strict=True)
        out = torch.cat([_sdpa(*part, is_causal=True) for part in parts])
    return out.reshape(s, b, -1)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    grouped = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped).permute(2, 0, 1, 3)


def _varlen(q: Tensor, k: Tensor, v: Tensor, geometry: Geometry) -> Tensor:
    """Packed flash attention; q [s, heads, d]. The keywords of torch's function differ between its first releases."""
    known = inspect.signature(varlen_attn).parameters
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True
    elif q.shape[1] != k.shape[1]:
        repeat = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    cu, longest = geometry.cu_seqlens, geometry.max_length
    return varlen_attn(q.contiguous(), k.contiguous(), v.contiguous(), cu, cu, longest, longest, **options)


def attend_context_parallel(q: Tensor, k: Tensor, v: Tensor, group: Any) -> Tensor:
    """Causal attention with the sequence split over `group`: keys and values are gathered, queries stay.

    The sequence is cut into 2 x size chunks and rank r holds chunks r and 2 x size - 1 - r, which balances the causal work
    (arXiv 2407.21783, section 3.3.2). Each chunk of queries sees the keys up to its own end. The backward pass of the gather
    sums every rank's share of the keys' gradient.
    """
    size, rank = group.size(), group.rank()
    s, b, heads, _ = q.shape
    chunk = s // 2
    both = gather_sequence(torch.cat((k, v), dim=2), group)
    pieces = both.split(chunk)
    order = [2 * c if c < size else 2 * (2 * size - 1 - c) + 1 for c in range(2 * size)]
    whole = torch.cat([pieces[i] for i in order])
    keys, values = whole.split((k.shape[2], v.shape[2]), dim=2)
    outs = []
    for part, c in zip(q.split(chunk), (rank, 2 * size - 1 - rank), strict=True):
        end = (c + 1) * chunk
        if q.is_cuda:
            from torch.nn.attention.bias import causal_lower_right

            mask: Any = causal_lower_right(chunk, end)
            repeat = heads // k.shape[2]
            ks, vs = (x[:end].repeat_interleave(repeat, 2) for x in (keys, values))
            outs.append(_sdpa(part, ks, vs, mask=mask))
        else:
            mask = torch.ones(chunk, end, dtype=torch.bool).tril(end - chunk)
            outs.append(_sdpa(part, keys[:end], values[:end], mask=mask))
    return torch.cat(outs).reshape(s, b, -1)


class SelfAttention(MegatronModule):
    """The layer's attention: projection, optional norms on Q and K, rotary embedding, attention, output projection."""

    def __init__(
        self, config: Any, layer_number: int, linears: Any = None, norm: Any = RMSNorm, pg_collection: Any = None, **_: Any
    ) -> None:
        super().__init__(config=config)
        column, row = linears
        self.layer_number = layer_number
        self.head_dim = config.kv_channels
        self.tp = parallel_state.get_tensor_model_parallel_world_size()
        self.q_rows = config.num_attention_heads * self.head_dim // self.tp
        self.kv_rows = config.num_query_groups * self.head_dim // self.tp
        self.share = max(1, self.tp // config.num_query_groups)
        common = {"config": config, "is_expert": False}
        self.linear_qkv = column(
            config.hidden_size,
            (self.q_rows + 2 * self.kv_rows) * self.tp,
            init_method=config.init_method,
            gather_output=False,
            bias=config.add_qkv_bias,
            skip_bias_add=False,
            tp_comm_buffer_name="qkv",
            **common,
        )
        self.linear_proj = row(
            self.q_rows * self.tp,
            config.hidden_size,
            init_method=config.output_layer_init_method,
            bias=False,
            input_is_parallel=True,
            skip_bias_add=True,
            tp_comm_buffer_name="proj",
            **common,
        )
        self.q_layernorm = self.k_layernorm = None
        if config.qk_layernorm:
            self.q_layernorm = norm(config=config, hidden_size=self.head_dim, eps=config.layernorm_epsilon)
            self.k_layernorm = norm(config=config, hidden_size=self.head_dim, eps=config.layernorm_epsilon)

    def forward(self, hidden_states: Tensor, attention_mask: Any = None, packed_seq_params: Any = None, **_: Any) -> tuple[Tensor, None]:
        """`hidden_states` [s, b, h] (s / tp under sequence parallelism); `packed_seq_params` is the micro-batch's Geometry."""
        geometry: Geometry = packed_seq_params
        mixed, _bias = self.linear_qkv(hidden_states)
        q, k, v = mixed.split((self.q_rows, self.kv_rows, self.kv_rows), dim=-1)
        if self.share > 1:
            k, v = self._whole_heads(torch.cat((k, v), dim=-1))
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k, v))
        if self.q_layernorm is not None and self.k_layernorm is not None:
            q, k = self.q_layernorm(q), self.k_layernorm(k)
        q, k = rotate_pair(q, k, geometry.cos, geometry.sin)
        if self.config.context_parallel_size > 1:
            out = attend_context_parallel(q, k, v, parallel_state.get_context_parallel_group())
        else:
            out = attend(q, k, v, geometry)
        output, bias = self.linear_proj(out)
        return output, bias

    def _whole_heads(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """TP exceeds the number of key/value heads: gather all ranks' rows and keep the head that this rank's queries use."""
        group = parallel_state.get_tensor_model_parallel_group()
        rows = all_gather_last_dim_from_tensor_parallel_region(kv, group=group).unflatten(-1, (self.tp, 2, self.kv_rows))
        first = group.rank() // self.share * self.share
        mine = rows[..., first : first + self.share, :, :]
        return mine[..., 0, :].flatten(-2), mine[..., 1, :].flatten(-2)

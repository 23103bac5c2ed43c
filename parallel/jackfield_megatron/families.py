"""What this backend knows about each Hugging Face model family: its sizes, and one table from Megatron's parameters to HF names.

A row of the table reads: Megatron parameter, how tensor parallelism splits it, and the HF tensors that lie in it from top to
bottom, each with its dimensions. The attention layout is our own (attention.py): Q, K and V are contiguous blocks of rows on every
rank, as in vLLM's fused weight, so that HF shapes describe every box and nothing interleaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jackfield.errors import ConfigError

VALUE_HEAD = "score.weight"
"""HF name of the scalar head of a critic, [1, hidden]."""


@dataclass(frozen=True)
class Piece:
    """An HF tensor (or a block of its rows) inside a Megatron parameter."""

    name: str
    """HF name; in a layer, relative to `model.layers.N.`."""
    dims: str
    """HF dimensions, named as in `Shape.sizes`."""
    first: str = ""
    """Where the block begins, for a block of rows: the name of a size; empty is row 0."""
    rows: str = ""
    """Rows of the block; empty is all."""
    file: str = ""
    """Name in checkpoint files, where it differs ({e}: expert); such files hold each expert's block as a matrix of its own."""


@dataclass(frozen=True)
class Row:
    """One Megatron parameter."""

    parameter: str
    """Name in GPTModel; in a layer, relative to `decoder.layers.N.`; {e} stands for an expert."""
    split: str
    """`rows`, `columns` (over TP), `whole`, `vocab` (rows, padded), `expert rows`, `expert columns` (over expert TP)."""
    pieces: tuple[Piece, ...]


def _row(parameter: str, split: str, *pieces: Piece) -> Row:
    return Row(parameter, split, pieces)


ENDS = (
    _row("embedding.word_embeddings.weight", "vocab", Piece("model.embed_tokens.weight", "v h")),
    _row("decoder.final_layernorm.weight", "whole", Piece("model.norm.weight", "h")),
    _row("output_layer.weight", "vocab", Piece("lm_head.weight", "v h")),
)
VALUE_END = _row("output_layer.weight", "whole", Piece(VALUE_HEAD, "1 h"))
NORMS = (
    _row("input_layernorm.weight", "whole", Piece("input_layernorm.weight", "h")),
    _row("pre_mlp_layernorm.weight", "whole", Piece("post_attention_layernorm.weight", "h")),
)
ATTENTION = (
    _row(
        "self_attention.linear_qkv.weight",
        "rows",
        Piece("self_attn.q_proj.weight", "q h"),
        Piece("self_attn.k_proj.weight", "k h"),
        Piece("self_attn.v_proj.weight", "k h"),
    ),
    _row("self_attention.linear_proj.weight", "columns", Piece("self_attn.o_proj.weight", "h q")),
)
QKV_BIAS = (
    _row(
        "self_attention.linear_qkv.bias",
        "rows",
        Piece("self_attn.q_proj.bias", "q"),
        Piece("self_attn.k_proj.bias", "k"),
        Piece("self_attn.v_proj.bias", "k"),
    ),
)
QK_NORM = (
    _row("self_attention.q_layernorm.weight", "whole", Piece("self_attn.q_norm.weight", "d")),
    _row("self_attention.k_layernorm.weight", "whole", Piece("self_attn.k_norm.weight", "d")),
)
MLP = (
    _row("mlp.linear_fc1.weight", "rows", Piece("mlp.gate_proj.weight", "f h"), Piece("mlp.up_proj.weight", "f h")),
    _row("mlp.linear_fc2.weight", "columns", Piece("mlp.down_proj.weight", "h f")),
)
_GATE_UP, _DOWN = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"


def _experts(router_file: str, gate: str, up: str, down: str) -> tuple[Row, ...]:
    return (
        _row("mlp.router.weight", "whole", Piece("mlp.gate.weight", "e h", file=router_file)),
        _row(
            "mlp.experts.local_experts.{e}.linear_fc1.weight",
            "expert rows",
            Piece(_GATE_UP, "e 2x h", rows="x", file=gate),
            Piece(_GATE_UP, "e 2x h", first="x", rows="x", file=up),
        ),
        _row("mlp.experts.local_experts.{e}.linear_fc2.weight", "expert columns", Piece(_DOWN, "e h x", file=down)),
    )


MIXTRAL_EXPERTS = _experts(
    "block_sparse_moe.gate.weight",
    "block_sparse_moe.experts.{e}.w1.weight",
    "block_sparse_moe.experts.{e}.w3.weight",
    "block_sparse_moe.experts.{e}.w2.weight",
)
QWEN_EXPERTS = _experts("", "mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight", "mlp.experts.{e}.down_proj.weight")

FAMILIES = {
    "llama": NORMS + ATTENTION + MLP,
    "qwen2": NORMS + ATTENTION + QKV_BIAS + MLP,
    "qwen3": NORMS + ATTENTION + QK_NORM + MLP,
    "mixtral": NORMS + ATTENTION + MIXTRAL_EXPERTS,
    "qwen3_moe": NORMS + ATTENTION + QK_NORM + QWEN_EXPERTS,
}
"""Rows of one layer by HF `model_type`; a layer without experts in a mixture-of-experts model has `MLP` in their place."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model, read from its HF config."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    eps: float
    tied: bool
    max_positions: int
    qkv_bias: bool
    pad_id: int | None = None
    """Token whose embedding transformers never trains as an input (`padding_idx`), even where it was sampled."""
    experts: int = 0
    """0 for a dense model."""
    expert_ffn: int = 0
    top_k: int = 0
    normalize_top_k: bool = True
    """Whether the chosen experts' weights are made to sum to 1."""
    moe_layers: tuple[bool, ...] = ()
    """For each layer whether it has experts."""

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes by the names used in the tables."""
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        x = self.expert_ffn
        return {
            "v": self.vocab,
            "h": self.hidden,
            "q": q,
            "k": k,
            "d": self.head_dim,
            "f": self.ffn,
            "e": self.experts,
            "x": x,
            "2x": 2 * x,
            "1": 1,
        }

    def layer(self, index: int) -> Iterator[Row]:
        """The table's rows for one layer."""
        dense = self.experts and not self.moe_layers[index]
        rows = FAMILIES[self.family]
        if self.family == "llama" and self.qkv_bias:
            rows += QKV_BIAS
        for row in rows:
            if not (dense and row.parameter.startswith("mlp.")):
                yield row
        if dense:
            yield from MLP


def read_shape(hf: Any) -> Shape:
    """Sizes from a transformers config. Raises ConfigError for what this backend does not compute exactly."""
    family = hf.model_type
    if family not in FAMILIES:
        raise ConfigError(
            f"backend megatron does not know model type {family!r}; it knows {', '.join(FAMILIES)}; backends torch and fsdp take any"
        )
    if hf.hidden_act not in ("silu", "swish"):
        raise ConfigError(f"backend megatron computes SwiGLU (silu) only; this {family} model has hidden_act {hf.hidden_act!r}")
    window = getattr(hf, "sliding_window", None)
    kinds = set(getattr(hf, "layer_types", None) or ())
    if "sliding_attention" in kinds or (not kinds and window and getattr(hf, "use_sliding_window", True)):
        raise ConfigError(f"backend megatron has no sliding-window attention; this model's window is {window}")
    if getattr(hf, "mlp_bias", False) or (family in ("qwen3", "qwen3_moe") and getattr(hf, "attention_bias", False)):
        raise ConfigError(f"backend megatron has no biases in the MLP or in {family}'s attention; use backend torch or fsdp")
    if family == "llama" and getattr(hf, "attention_bias", False):
        raise ConfigError(
            "backend megatron has no bias on the attention's output projection, which attention_bias asks for in a Llama model"
        )
    layers = hf.num_hidden_layers
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    moe: dict[str, Any] = {}
    if family == "mixtral":
        moe = {"experts": hf.num_local_experts, "expert_ffn": hf.intermediate_size, "top_k": hf.num_experts_per_tok}
        moe["moe_layers"] = (True,) * layers
    elif family == "qwen3_moe":
        moe = {"experts": hf.num_experts, "expert_ffn": hf.moe_intermediate_size, "top_k": hf.num_experts_per_tok}
        moe["normalize_top_k"] = bool(hf.norm_topk_prob)
        sparse = [i not in (hf.mlp_only_layers or []) and (i + 1) % hf.decoder_sparse_step == 0 for i in range(layers)]
        moe["moe_layers"] = tuple(sparse)
    return Shape(
        family=family,
        layers=layers,
        hidden=hf.hidden_size,
        heads=hf.num_attention_heads,
        kv_heads=hf.num_key_value_heads,
        head_dim=head_dim,
        ffn=hf.intermediate_size,
        vocab=hf.vocab_size,
        eps=hf.rms_norm_eps,
        tied=bool(hf.tie_word_embeddings),
        max_positions=hf.max_position_embeddings,
        qkv_bias=family == "qwen2",
        pad_id=None if hf.pad_token_id is None else hf.pad_token_id % hf.vocab_size,
        **moe,
    )

"""What tensors a model has and along which dimension each may be cut: one table a family, read from a Hugging Face config.

Names are Hugging Face's, experts stacked (`canonical`). The tables serve planning without tensors; a backend's own `shards()`
must agree with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jackfield.errors import ConfigError

Cut = Literal["none", "rows", "columns", "heads", "kv", "vocabulary"]


@dataclass(frozen=True)
class Tensor:
    """One tensor of the model, or one a layer (`{}` in the name stands for the layer's number)."""

    name: str
    shape: tuple[int, ...]
    cut: Cut = "none"
    """How tensor parallelism divides it: first dimension (rows; whole query or key-value heads; the padded vocabulary), last, or not."""
    units: int = 1
    """Indivisible parts along the cut: heads; key-value heads are replicated where the parallel size exceeds them."""
    place: Literal["layer", "first", "last", "ends"] = "layer"
    """Pipeline stage: the layer's, the first, the last, or both ends (tied embeddings)."""
    layers: tuple[int, ...] = (0,)
    expert: bool = False
    """Whether dimension 0 is experts, divided by expert parallelism."""
    buffer: bool = False
    dtype: str | None = None
    """Its own type where it differs from the model's."""
    fused: str | None = None
    """The transformers module parameter it is a part of, where experts' gate and up are one tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.name.format(layer) for layer in self.layers)


def read_config(folder: Any) -> dict[str, Any]:
    """config.json of a model folder. Raises ConfigError where there is none."""
    import json
    from pathlib import Path

    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ConfigError(f"model {folder}: no config.json in this folder; planning needs a local Hugging Face folder")
    return dict(json.loads(path.read_text()))


def tensors(config: Mapping[str, Any], head: str = "lm") -> list[Tensor]:
    """All tensors of a model, by its Hugging Face config (a mapping as in config.json).

    Raises ConfigError for a family that has no table.
    """
    family = config.get("model_type", "llama")
    if family not in FAMILIES:
        raise ConfigError(f"model type {family!r} has no table in jackfield_reshard.families; there is {', '.join(sorted(FAMILIES))}")
    vocabulary, hidden = config["vocab_size"], config["hidden_size"]
    tied = config.get("tie_word_embeddings", False) and head == "lm"
    out = [
        Tensor("model.embed_tokens.weight", (vocabulary, hidden), "vocabulary", place="ends" if tied else "first"),
        *_attention(config, family),
        *_mlp(config, family),
        Tensor("model.norm.weight", (hidden,), place="last"),
    ]
    if head == "value":
        out.append(Tensor("score.weight", (1, hidden), place="last"))
    elif not tied:
        out.append(Tensor("lm_head.weight", (vocabulary, hidden), "vocabulary", place="last"))
    return out


def _attention(config: Mapping[str, Any], family: str) -> list[Tensor]:
    layers = tuple(range(config["num_hidden_layers"]))
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    p = "model.layers.{}."
    norms = [
        Tensor(p + "input_layernorm.weight", (hidden,), layers=layers),
        Tensor(p + "post_attention_layernorm.weight", (hidden,), layers=layers),
    ]
    p += "self_attn."
    if family in ("deepseek_v2", "deepseek_v3"):
        return [*norms, *_latent_attention(config, p, layers)]
    groups = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or hidden // heads
    out = [
        Tensor(p + "q_proj.weight", (heads * size, hidden), "heads", heads, layers=layers),
        Tensor(p + "k_proj.weight", (groups * size, hidden), "kv", groups, layers=layers),
        Tensor(p + "v_proj.weight", (groups * size, hidden), "kv", groups, layers=layers),
        Tensor(p + "o_proj.weight", (hidden, heads * size), "columns", heads, layers=layers),
    ]
    if config.get("attention_bias", family == "qwen2"):
        out += [
            Tensor(p + "q_proj.bias", (heads * size,), "heads", heads, layers=layers),
            Tensor(p + "k_proj.bias", (groups * size,), "kv", groups, layers=layers),
            Tensor(p + "v_proj.bias", (groups * size,), "kv", groups, layers=layers),
        ]
        if family != "qwen2":
            out.append(Tensor(p + "o_proj.bias", (hidden,), layers=layers))
    if family in ("qwen3", "qwen3_moe"):
        out += [Tensor(p + "q_norm.weight", (size,), layers=layers), Tensor(p + "k_norm.weight", (size,), layers=layers)]
    return [*norms, *out]


def _latent_attention(config: Mapping[str, Any], p: str, layers: tuple[int, ...]) -> list[Tensor]:
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1): low-rank query and key-value, cut by heads."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank = config.get("q_lora_rank"), config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    query = heads * (nope + rope)
    out = [
        Tensor(p + "kv_a_proj_with_mqa.weight", (kv_rank + rope, hidden), layers=layers),
        Tensor(p + "kv_a_layernorm.weight", (kv_rank,), layers=layers),
        Tensor(p + "kv_b_proj.weight", (heads * (nope + value), kv_rank), "heads", heads, layers=layers),
        Tensor(p + "o_proj.weight", (hidden, heads * value), "columns", heads, layers=layers),
    ]
    if not q_rank:
        return [Tensor(p + "q_proj.weight", (query, hidden), "heads", heads, layers=layers), *out]
    return [
        Tensor(p + "q_a_proj.weight", (q_rank, hidden), layers=layers),
        Tensor(p + "q_a_layernorm.weight", (q_rank,), layers=layers),
        Tensor(p + "q_b_proj.weight", (query, q_rank), "heads", heads, layers=layers),
        *out,
    ]


def _dense(prefix: str, hidden: int, width: int, layers: tuple[int, ...], bias: bool = False) -> list[Tensor]:
    out = [
        Tensor(prefix + "gate_proj.weight", (width, hidden), "rows", layers=layers),
        Tensor(prefix + "up_proj.weight", (width, hidden), "rows", layers=layers),
        Tensor(prefix + "down_proj.weight", (hidden, width), "columns", layers=layers),
    ]
    if bias:
        out += [
            Tensor(prefix + "gate_proj.bias", (width,), "rows", layers=layers),
            Tensor(prefix + "up_proj.bias", (width,), "rows", layers=layers),
            Tensor(prefix + "down_proj.bias", (hidden,), layers=layers),
        ]
    return out


def _mlp(config: Mapping[str, Any], family: str) -> list[Tensor]:
    hidden, depth = config["hidden_size"], config["num_hidden_layers"]
    p = "model.layers.{}.mlp."
    experts = next((config[name] for name in FAMILIES[family] if config.get(name)), 0)
    if not experts:
        return _dense(p, hidden, config["intermediate_size"], tuple(range(depth)), config.get("mlp_bias", False))
    width = config["intermediate_size"] if family == "mixtral" else config["moe_intermediate_size"]
    step, first = config.get("decoder_sparse_step", 1), config.get("first_k_dense_replace", 0)
    plain = set(config.get("mlp_only_layers") or ())
    sparse = tuple(i for i in range(depth) if i >= first and (i + 1) % step == 0 and i not in plain)
    dense = tuple(i for i in range(depth) if i not in sparse)
    out = _dense(p, hidden, config["intermediate_size"], dense) if dense else []
    fused = p + "experts.gate_up_proj"
    out += [
        Tensor(p + "gate.weight", (experts, hidden), layers=sparse),
        Tensor(p + "experts.gate_proj.weight", (experts, width, hidden), "rows", layers=sparse, expert=True, fused=fused),
        Tensor(p + "experts.up_proj.weight", (experts, width, hidden), "rows", layers=sparse, expert=True, fused=fused),
        Tensor(p + "experts.down_proj.weight", (experts, hidden, width), "columns", layers=sparse, expert=True),
    ]
    if family == "deepseek_v3":
        name = p + "gate.e_score_correction_bias"
        out.append(Tensor(name, (experts,), layers=sparse, buffer=True, dtype="float32"))
    if shared := config.get("n_shared_experts"):
        out += _dense(p + "shared_experts.", hidden, width * shared, sparse)
    return out


FAMILIES: dict[str, tuple[str, ...]] = {
    "llama": (),
    "mistral": (),
    "qwen2": (),
    "qwen3": (),
    "mixtral": ("num_local_experts",),
    "qwen3_moe": ("num_experts", "num_local_experts"),
    "deepseek_v3": ("n_routed_experts", "num_local_experts"),
}
"""Model type to the config fields that may count its experts (transformers 5 writes the last); none for a dense family."""

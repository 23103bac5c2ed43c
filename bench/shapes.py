"""Shapes of published models in the form of a config.json: one table for every benchmark. Weights are random or absent everywhere.

Layer counts, widths, heads, vocabularies and tying are those of Qwen2.5 0.5B, 1.5B and 7B, SmolLM2-135M, Llama-2 7B, 13B and 70B,
Qwen3-30B-A3B and 235B-A22B, and DeepSeek-V3. `tiny` is made up, for runs on a CPU.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON = {"hidden_act": "silu", "bos_token_id": 0, "eos_token_id": 2, "initializer_range": 0.02, "torch_dtype": "bfloat16"}
_QWEN2 = _COMMON | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 32768,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
}
_LLAMA = _COMMON | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "attention_dropout": 0.0,
}


def _dense(base: dict[str, Any], hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, vocab: int, tied: bool) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers, "num_attention_heads": heads}
    return base | sizes | {"num_key_value_heads": kv_heads, "vocab_size": vocab, "tie_word_embeddings": tied}


_QWEN3_MOE = _COMMON | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _dense(_LLAMA, 128, 256, 4, 4, 2, 512, True),
    "135m": _dense(_LLAMA, 576, 1536, 30, 9, 3, 49152, True),
    "0.5b": _dense(_QWEN2, 896, 4864, 24, 14, 2, 151936, True),
    "1.5b": _dense(_QWEN2, 1536, 8960, 28, 12, 2, 151936, True),
    "7b": _dense(_QWEN2, 3584, 18944, 28, 28, 4, 152064, False),
    "llama-2-7b": _dense(_LLAMA, 4096, 11008, 32, 32, 32, 32000, False),
    "llama-2-13b": _dense(_LLAMA, 5120, 13824, 40, 40, 40, 32000, False),
    "llama-70b": _dense(_LLAMA, 8192, 28672, 80, 64, 8, 32000, False),
    "qwen3-30b": _QWEN3_MOE
    | {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3-235b": _QWEN3_MOE
    | {
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
    "deepseek-v3": _COMMON
    | {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "vocab_size": 129280,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 61,
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "n_shared_experts": 1,
        "num_experts_per_tok": 8,
        "first_k_dense_replace": 3,
        "tie_word_embeddings": False,
    },
}
"""By the name that benchmarks take on their command line."""

RUNNABLE = [name for name, shape in SHAPES.items() if shape["model_type"] in ("llama", "qwen2") and name != "llama-70b"]
"""Dense shapes that one machine of a few GPUs can hold; the others serve planning and simulation."""


def write_config(name: str, folder: Path) -> dict[str, Any]:
    """Write the shape's config.json into the folder (made if missing), and return it: no weights, no tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(SHAPES[name]))
    return SHAPES[name]

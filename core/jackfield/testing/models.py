"""Tiny Hugging Face models with a 64-token tokenizer, and ragged batches in which everything behind a mask is garbage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal

import torch
from tensordict import TensorDict
from torch import Tensor

from jackfield.batch import Batch
from jackfield.loss import reduction_scale

Family = Literal["llama", "qwen2", "qwen3", "mixtral", "qwen3_moe"]

PAD, EOS, BOS, UNK = 0, 1, 2, 3
"""Special token ids of the tiny tokenizer."""


def words(vocab: int = 64) -> list[str]:
    """The tokenizer's vocabulary by id: four special tokens, then t0, t1, ..."""
    return ["<pad>", "<eos>", "<bos>", "<unk>", *(f"t{i}" for i in range(vocab - 4))]


def tiny_model(
    folder: Path | str,
    family: Family = "llama",
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 64,
    tied: bool = False,
    dtype: str = "float32",
    seed: int = 0,
    max_positions: int = 256,
    **config: Any,
) -> Path:
    """Write a random model as a Hugging Face folder (config, safetensors, tokenizer, generation config) and return the folder.

    `config` sets or overrides fields of the model's own config (`attention_dropout=0.1`, `num_experts=4`). The weights have a
    standard deviation of 0.1 rather than 0.02, and norms and biases are drawn too, so that a forgotten or swapped weight shows.
    The tokenizer splits words ("t1 t2"); for `qwen2` AutoTokenizer insists on a class of its own, so use token ids there.
    """
    import transformers

    names = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mixtral": "Mixtral", "qwen3_moe": "Qwen3Moe"}
    settings: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": max_positions,
        "pad_token_id": PAD,
        "eos_token_id": EOS,
        "bos_token_id": BOS,
        "tie_word_embeddings": tied,
        "initializer_range": 0.1,
    }
    if family.startswith("qwen3"):
        settings["head_dim"] = hidden // heads
    if family == "mixtral":
        settings |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if family == "qwen3_moe":
        settings |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden, "norm_topk_prob": True}
    model_config = getattr(transformers, f"{names[family]}Config")(**(settings | config))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        auto: Any = transformers.AutoModelForCausalLM
        model = auto.from_config(model_config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:
                    parameter.add_(torch.randn_like(parameter), alpha=0.1)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    _save_tokenizer(Path(folder), vocab)
    return Path(folder)


def _save_tokenizer(folder: Path, vocab: int) -> None:
    """A word-level tokenizer: words are split at white space; a chat is its messages' contents one after the other."""
    vocabulary = {word: i for i, word in enumerate(words(vocab))}
    special = {"id": 0, "content": "", "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [special | {"id": i, "content": w} for i, w in enumerate(words(vocab)[:4])],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<eos>",
        "bos_token": "<bos>",
        "unk_token": "<unk>",
        "padding_side": "left",
        "clean_up_tokenization_spaces": False,
        "chat_template": "{% for m in messages %}{{ m['content'] }} {% endfor %}",
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def random_batch(
    size: int = 8, *, vocab: int = 64, max_length: int = 24, seed: int = 0, garbage: int = 0, adversarial: bool = True, group_size: int = 2
) -> Batch:
    """A ragged batch ready for `Backend.forward_backward`: masks, rollout and old log-probs, advantages, token-mean `loss_scale`.

    With `adversarial` the first samples are, in order: one with an empty response; one whose response is masked out; one with a gap
    (a tool's tokens) in its response; one that fills the width. Samples of one group share their prompt. Behind the masks stand
    random ids (padding) and NaN, inf and large numbers (floats), drawn from `garbage`, while `seed` draws what counts: two batches
    that differ in `garbage` alone must give the same results bit for bit (laws 5 and 15).
    """
    rng = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=rng))

    prompts = [torch.randint(4, vocab, (draw(1, max(2, max_length // 2)),), generator=rng) for _ in range(-(-size // group_size))]
    tokens = torch.randint(0, vocab, (size, max_length), generator=torch.Generator().manual_seed(garbage))
    lengths, prompt_lengths = torch.zeros(2, size, dtype=torch.int64)
    response = torch.zeros(size, max_length, dtype=torch.bool)
    for row in range(size):
        prompt = prompts[row // group_size]
        new = draw(1, max_length - len(prompt) + 1)
        if adversarial and row in (0, 3):
            new = 0 if row == 0 else max_length - len(prompt)
        end = len(prompt) + new
        tokens[row, : len(prompt)] = prompt
        tokens[row, len(prompt) : end] = torch.randint(4, vocab, (new,), generator=rng)
        lengths[row], prompt_lengths[row] = end, len(prompt)
        response[row, len(prompt) : end] = True
        if adversarial and row == 2 and new > 2:
            response[row, len(prompt) + 1 : len(prompt) + 1 + new // 3] = False
    loss_mask = response.clone()
    if adversarial and size > 1:
        loss_mask[1] = False

    def values(scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return torch.randn(size, max_length, generator=rng) * scale + shift

    def spoiled(value: Tensor, mask: Tensor) -> Tensor:
        noise = torch.Generator().manual_seed(garbage + 1)
        pick = torch.randint(0, 4, value.shape, generator=noise)
        junk = torch.tensor([float("nan"), float("inf"), -1e30, 7.0])[pick]
        return torch.where(mask, value, junk)

    return Batch(
        tokens=tokens,
        lengths=lengths,
        prompt_lengths=prompt_lengths,
        response_mask=response,
        loss_mask=loss_mask,
        rollout_log_probs=spoiled(values(0.3, -3), response),
        versions=torch.where(response, 0, -1).int(),
        group_ids=torch.arange(size) // group_size,
        sample_ids=torch.arange(size),
        finish_reasons=torch.zeros(size, dtype=torch.int8),
        records=[{} for _ in range(size)],
        extras=TensorDict({}, [size]),
        advantages=spoiled(values(), loss_mask),
        returns=spoiled(values(), loss_mask),
        critic_values=spoiled(values(), loss_mask),
        old_log_probs=spoiled(values(0.3, -3), loss_mask),
        loss_scale=reduction_scale(loss_mask, "token-mean", max_length),
        batch_size=[size],
    )


def plain_model(folder: Path | str) -> Any:
    """The folder's model as transformers itself makes it, in float32: what everything else is compared with."""
    import transformers

    auto: Any = transformers.AutoModelForCausalLM
    return auto.from_pretrained(folder, dtype=torch.float32)


def reference_log_probs(model: Any, batch: Batch, temperature: float = 1.0) -> Tensor:
    """float32 [B, T], differentiable: each response token's log-prob from one plain forward pass a sample, 0 elsewhere."""
    rows = []
    for tokens, length, mask in zip(batch.tokens, batch.lengths.tolist(), batch.response_mask, strict=True):
        logits = model(input_ids=tokens[None, :length]).logits[0, :-1] / temperature
        row = logits.log_softmax(-1).gather(-1, tokens[1:length, None])[:, 0]
        row = torch.nn.functional.pad(row, (1, len(tokens) - length))
        rows.append(torch.where(mask, row, 0))
    return torch.stack(rows)


def reference_gradient(folder: Path | str, batch: Batch, loss: Any) -> dict[str, Tensor]:
    """Gradient of `loss` by parameter name, from plain forward passes."""
    from jackfield.components import Outputs

    model = plain_model(folder)
    value, _ = loss(Outputs(reference_log_probs(model, batch)), batch)
    value.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}

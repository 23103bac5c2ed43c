"""Reward `reward_model`: the score of a Hugging Face sequence-classification model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from jackfield.components import ComponentConfig, Reward, WorkerContext
from jackfield.errors import ConfigError, DataError
from jackfield_rewards.chat import Remembered, conversation, template_of


class RewardModelConfig(ComponentConfig):
    """Settings of `reward_model`."""

    model: str
    """Local Hugging Face folder, or hub name, of a sequence-classification model."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the parameters."""
    output: int | None = Field(default=None, ge=0)
    """Which of the model's outputs is the score; needed where it has several."""
    template: Path | None = None
    """Jinja chat template; default: the model's own. Without either, prompt and response are joined as plain text."""
    batch_tokens: int = Field(default=16384, gt=0)
    """Most tokens, padding included, in one forward pass; a longer sample goes alone."""
    remember: int = Field(default=100_000, ge=0)
    """Most scores kept by content, so that equal samples are scored once."""


class RewardModel(Reward):
    """Batched by length. The conversation is rendered in the reward model's own template, not the policy's.

    A sample that is longer than the model's context has no score.
    """

    Config = RewardModelConfig
    config: Any

    def setup(self, context: WorkerContext) -> None:
        """See Reward. Raises DataError for an unusable folder, ConfigError for settings that do not suit the model."""
        import torch
        from transformers import AutoModelForSequenceClassification, AutoTokenizer

        path = self.config.model
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(path)
            self.model, info = AutoModelForSequenceClassification.from_pretrained(
                path, dtype=getattr(torch, self.config.dtype), output_loading_info=True
            )
        except (OSError, ValueError) as error:
            line = " ".join(str(error).split())
            raise DataError(f"reward_model {path!r} is no usable model: {line}; give a sequence-classification folder or name") from error
        if missing := sorted(info["missing_keys"]):
            raise DataError(f"reward_model {path!r} has no weights for {', '.join(missing)}: give a trained sequence-classification model")
        count = self.model.config.num_labels
        if self.config.output is None and count > 1:
            labels = ", ".join(f"{i} {label}" for i, label in self.model.config.id2label.items())
            raise ConfigError(f"reward_model {path!r} has {count} outputs ({labels}): say which one is the score with `output`")
        if (self.config.output or 0) >= count:
            raise ConfigError(f"reward_model {path!r}: output is {self.config.output}, but the model has {count}, numbered from 0")
        self.template = template_of(self.tokenizer, self.config.template)
        self.model.to(context.device).eval()
        self.device, self.memory = context.device, Remembered(self.config.remember)
        self.longest = getattr(self.model.config, "max_position_embeddings", None) or float("inf")

    def score(self, records: Sequence[dict[str, Any]]) -> list[Any]:
        """See Reward.score; None for a sample longer than the model's context."""
        return list(self.memory.through([self.text(r) for r in records], self._score))

    def text(self, record: dict[str, Any]) -> str:
        """The sample as the reward model reads it."""
        if self.template is None:
            return f"{record['prompt']}{record['response']}"
        return str(self.tokenizer.apply_chat_template(conversation(record), chat_template=self.template, tokenize=False))

    def _score(self, texts: list[str]) -> list[float | None]:
        rows = [self.tokenizer(text, add_special_tokens=self.template is None)["input_ids"] for text in texts]
        scores: list[float | None] = [None] * len(texts)
        for indices in self._batches([len(row) for row in rows]):
            for index, value in zip(indices, self._forward([rows[i] for i in indices]), strict=True):
                scores[index] = value
        return scores

    def _batches(self, lengths: Sequence[int]) -> Iterator[list[int]]:
        """Samples of like length together, within `batch_tokens`."""
        batch: list[int] = []
        for index in sorted((i for i, n in enumerate(lengths) if 0 < n <= self.longest), key=lambda i: lengths[i]):
            if batch and (len(batch) + 1) * lengths[index] > self.config.batch_tokens:
                yield batch
                batch = []
            batch.append(index)
        if batch:
            yield batch

    def _forward(self, rows: list[list[int]]) -> list[float]:
        """Decoders read the score off the last token that is no padding. Where the padding token also occurs in a sample (often it
        is the end token), that would be the wrong one, so an id that occurs nowhere in the batch pads it."""
        import torch

        used = {token for row in rows for token in row}
        pad = self.tokenizer.pad_token_id
        if pad is None or pad in used:
            pad = next(i for i in range(len(used) + 1) if i not in used)
        self.model.config.get_text_config().pad_token_id = pad
        width = max(map(len, rows))
        tokens = torch.tensor([row + [pad] * (width - len(row)) for row in rows], device=self.device)
        mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows], device=self.device)
        with torch.no_grad():
            logits = self.model(input_ids=tokens, attention_mask=mask).logits
        return [float(value) for value in logits[:, self.config.output or 0].float().cpu()]

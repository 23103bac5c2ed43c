"""A sample as a conversation in another model's template: rewards that are models have tokenizers of their own."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jackfield.errors import ConfigError


def conversation(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sample as chat messages, the response last, whatever template the policy was prompted with."""
    before = record.get("messages") or [{"role": "user", "content": record["prompt"]}]
    return [*map(dict, before), {"role": "assistant", "content": record["response"]}]


def template_of(tokenizer: Any, path: Path | None) -> str | None:
    """The chat template to use: the file's, or the tokenizer's own, or None. Raises ConfigError for a file that is not there."""
    if path is None:
        return tokenizer.chat_template
    if not path.is_file():
        raise ConfigError(f"there is no chat template {str(path)!r}; give a Jinja file, or leave `template` out to use the model's own")
    return path.read_text(encoding="utf-8")


class Remembered:
    """Scores by content, the most recently used `size` of them; 0 remembers none beyond the call."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.known: OrderedDict[bytes, float | None] = OrderedDict()
        self.hits = self.misses = 0

    def through(self, texts: Sequence[str], compute: Callable[[list[str]], Sequence[float | None]]) -> list[float | None]:
        """A score for each text; `compute` is called once, with those that are new, each once."""
        keys = [hashlib.sha256(text.encode()).digest() for text in texts]
        new = {key: text for key, text in zip(keys, texts, strict=True) if key not in self.known}
        self.hits, self.misses = self.hits + len(keys) - len(new), self.misses + len(new)
        if new:
            self.known |= zip(new, compute(list(new.values())), strict=True)
        result = []
        for key in keys:
            self.known.move_to_end(key)
            result.append(self.known[key])
        while len(self.known) > self.size:
            self.known.popitem(last=False)
        return result

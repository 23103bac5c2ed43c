"""Reward `brief`: short answers."""

from collections.abc import Sequence
from typing import Any

from jackfield import ComponentConfig, Reward


class Brief(Reward):
    """1 up to `words` words, falling to 0 at twice as many."""

    class Config(ComponentConfig):
        """What is short."""

        words: int = 8
        """Words that still earn the full reward."""

    config: Config

    def score(self, records: Sequence[dict[str, Any]]) -> list[float]:
        """One score a record, in order."""
        return [min(max(2 - len(record["response"].split()) / self.config.words, 0.0), 1.0) for record in records]

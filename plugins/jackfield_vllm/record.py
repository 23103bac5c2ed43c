"""Log-probs and versions of the samples in flight, in arrays with a row for each: a step is one write, a list is made once, at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Record:
    """A sample has a row from its first token until it ends, so memory goes by samples in flight and the longest of them."""

    def __init__(self) -> None:
        self._rows: dict[str, int] = {}
        self._free: list[int] = []
        self._counts = np.zeros(0, np.int64)
        self._log_probs = np.zeros((0, 256), np.float32)
        self._versions = np.zeros((0, 256), np.int32)

    def rows(self, keys: Sequence[str]) -> np.ndarray:
        """int64 [keys]: each sample's row, a new one for its first token."""
        if not self._rows.keys() >= set(keys):
            self._open([key for key in keys if key not in self._rows])
        return np.fromiter(map(self._rows.__getitem__, keys), np.int64, len(keys))

    def _open(self, keys: list[str]) -> None:
        if len(keys) > len(self._free):
            old, more = len(self._counts), max(len(keys), len(self._counts), 64)
            self._free += reversed(range(old, old + more))
            self._counts = np.pad(self._counts, (0, more))
            self._log_probs, self._versions = (np.pad(a, ((0, more), (0, 0))) for a in (self._log_probs, self._versions))
        for key in keys:
            row = self._rows[key] = self._free.pop()
            self._counts[row] = 0

    def write(self, rows: np.ndarray, log_probs: np.ndarray, version: int) -> None:
        """One token more for each of these rows; log_probs float32 [rows]."""
        counts = self._counts[rows]
        if counts.size and counts.max() == self._log_probs.shape[1]:
            self._log_probs, self._versions = (np.pad(a, ((0, 0), (0, a.shape[1]))) for a in (self._log_probs, self._versions))
        self._log_probs[rows, counts], self._versions[rows, counts] = log_probs, version
        self._counts[rows] = counts + 1

    def close(self, key: str) -> tuple[list[float], list[int]]:
        """Log-probs and versions of a sample's tokens, both empty where it has none; the row is free again."""
        row = self._rows.pop(key, None)
        if row is None:
            return [], []
        self._free.append(row)
        n = int(self._counts[row])
        return self._log_probs[row, :n].tolist(), self._versions[row, :n].tolist()

"""Log-probs and versions of the samples in flight, in arrays with a row for each: a step is one write, a list is made once, at the end."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jackfield_vllm.rows import Rows, rows_of


class Record:
    """A sample has a row from its first token until it ends, so memory goes by samples in flight and the longest of them."""

    def __init__(self) -> None:
        self._rows = Rows()
        self._counts = np.zeros(0, np.int64)
        self._log_probs = np.zeros((0, 256), np.float32)
        self._version = -1
        self._runs: dict[str, list[tuple[int, int]]] = {}
        """By sample: from which token on which version."""

    def rows(self, keys: Sequence[str]) -> np.ndarray:
        """int64 [keys]: each sample's row, a new one for its first token."""
        try:
            return rows_of(self._rows, keys)
        except KeyError:
            self._open([key for key in keys if key not in self._rows])
            return self.rows(keys)

    def _open(self, keys: list[str]) -> None:
        if more := self._rows.open(keys):
            self._counts, self._log_probs = np.pad(self._counts, (0, more)), np.pad(self._log_probs, ((0, more), (0, 0)))
        for key in keys:
            self._counts[self._rows[key]], self._runs[key] = 0, [(0, self._version)]

    def write(self, rows: np.ndarray, log_probs: np.ndarray, version: int) -> None:
        """One token more for each of these rows; log_probs float32 [rows]."""
        if version != self._version:
            self._version = version
            for key, row in self._rows.items():
                self._runs[key].append((int(self._counts[row]), version))
        counts = self._counts[rows]
        if counts.size and counts.max() == self._log_probs.shape[1]:
            self._log_probs = np.pad(self._log_probs, ((0, 0), (0, self._log_probs.shape[1])))
        self._log_probs[rows, counts] = log_probs
        self._counts[rows] = counts + 1

    def close(self, key: str) -> tuple[list[float], list[int]]:
        """Log-probs and versions of a sample's tokens, both empty where it has none; the row is free again."""
        row = self._rows.close(key)
        if row is None:
            return [], []
        n = int(self._counts[row])
        versions: list[int] = []
        for start, version in self._runs.pop(key):
            versions[start:] = [version] * (n - start)
        return self._log_probs[row, :n].tolist(), versions

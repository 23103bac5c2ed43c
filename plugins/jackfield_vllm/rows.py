"""Rows of arrays for keys that come and go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


def rows_of(rows: Mapping[Any, int], keys: Sequence[Any]) -> np.ndarray:
    """int64 [keys]: the row of each. Raises KeyError for one that has none."""
    return np.fromiter(map(rows.__getitem__, keys), np.int64, len(keys))


class Rows(dict[Any, int]):
    """The row of each key; the row of one that left is given to the next that comes."""

    def __init__(self) -> None:
        super().__init__()
        self._free: list[int] = []
        self._size = 0

    def open(self, keys: Sequence[Any]) -> int:
        """Give rows to keys that have none; returns by how many rows the arrays must grow for that."""
        more = max(len(keys), self._size, 64) if len(keys) > len(self._free) else 0
        self._free += reversed(range(self._size, self._size + more))
        self._size += more
        for key in keys:
            self[key] = self._free.pop()
        return more

    def close(self, key: Any) -> int | None:
        """Take a key's row back; None where it has none."""
        row = self.pop(key, None)
        if row is not None:
            self._free.append(row)
        return row

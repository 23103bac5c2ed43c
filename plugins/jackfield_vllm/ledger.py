"""What steps made by `steady` did to vLLM's requests, kept in arrays until somebody reads the requests.

A step changes each sample by one: one token computed, one token known. As attributes and lists of Python objects that costs microseconds
for each sample and step; here it is a few array operations a step. `settle` writes it to a request: tokens, counts, hashes of its full
blocks, and those blocks into the prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jackfield_vllm.rows import Rows, rows_of

TURN = 256
"""Steps after which a request is settled at the latest, a few requests each step: work of its end is spread, and rows stay short."""


class Ledger:
    """A row for each request of steps that were made; a request that ended has none."""

    def __init__(self, manager: Any, ahead: bool) -> None:
        self._manager, self._ahead = manager, ahead
        self.rows = Rows()
        self._owners: list[Any] = []
        self._serial, self._turn, self._dirty = 0, 0, False
        self._last = np.zeros(0, np.int64)
        self.serials, self._made, self._back = (np.zeros(0, np.int64) for _ in range(3))
        self._tokens = np.zeros((0, TURN), np.int32)

    def open(self, requests: Sequence[Any]) -> np.ndarray:
        """Rows of requests, int64; new ones for those that have none."""
        missing = [request for request in requests if request not in self.rows]
        if more := self.rows.open(missing):
            self._owners += [None] * more
            self.serials, self._made, self._back = (np.pad(a, (0, more)) for a in (self.serials, self._made, self._back))
            self._tokens = np.pad(self._tokens, ((0, more), (0, 0)))
        for request in missing:
            row = self.rows[request]
            self._owners[row] = request
            self._serial += 1
            self.serials[row], self._made[row], self._back[row] = self._serial, 0, 0
        return rows_of(self.rows, requests)

    def close(self, request: Any) -> None:
        """Settle a request and forget it: its row's serial is nobody's."""
        self.settle(request)
        row = self.rows.close(request)
        if row is not None:
            self._owners[row], self.serials[row] = None, 0

    def made(self, rows: np.ndarray) -> None:
        """A step of these rows was scheduled."""
        self._made[rows] += 1
        self._last, self._dirty = rows, True

    def back(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """A step came back, with one token a row."""
        counts = self._back[rows]
        self._tokens[rows, counts] = tokens
        self._back[rows] = counts + 1
        self._last, self._dirty = self._last[:0], True

    def turn(self) -> None:
        """Settle the few requests whose turn it is."""
        self._turn = (self._turn + 1) % TURN
        for request in self._owners[self._turn :: TURN]:
            if request is not None:
                self.settle(request)

    def settle_all(self) -> None:
        """Bring all requests up to date, before vLLM itself schedules or takes tokens."""
        if self._dirty:
            for request in self.rows:
                self.settle(request)
            self._dirty, self._last = False, self._last[:0]

    def settle(self, request: Any) -> None:
        """Bring one request up to date, as if vLLM had done the steps. Of samples with equal text each in blocks of its own, whose block
        a later prompt finds first may differ from vLLM's choice: they hold the same keys and values."""
        row = self.rows.get(request)
        made, back = (0, 0) if row is None else (int(self._made[row]), int(self._back[row]))
        if not made and not back:
            return
        request.num_computed_tokens += made
        if self._ahead:
            request.num_output_placeholders += made - back
        if hasattr(request, "num_in_flight_tokens"):
            request.num_in_flight_tokens += made - back
        if back:
            tokens = self._tokens[row, :back].tolist()
            request._output_token_ids.extend(tokens)
            request._all_token_ids.extend(tokens)
            request.update_block_hashes()
        # vLLM caches what is computed when tokens come back, and what is known when a step is scheduled: by one token more
        full = request.num_computed_tokens - request.num_output_placeholders
        if self._ahead and row in self._last:
            full = min(full + 1, request.num_computed_tokens, request.num_tokens)
        self._manager.cache_blocks(request, full)
        self._made[row] = self._back[row] = 0

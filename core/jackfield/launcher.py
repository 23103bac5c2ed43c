"""What a launcher hands out: the workers of a role, reached in one way wherever they run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol


class WorkerGroup(Protocol):
    """The workers of one role, whatever they run on."""

    size: int

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call `Worker.method(*args)` on every rank; results by rank. Raises WorkerError where a worker dies."""

    def scatter(self, method: str, role: str | None, shares: Sequence[Any], *args: Any) -> list[Any]:
        """Call `Worker.method([role,] shares[rank], *args)` on every rank; results by rank."""

    def stream(self, method: str, shares: Sequence[Any]) -> Iterator[Any]:
        """Call `Worker.method(shares[rank])`, which returns an iterator, on every rank; items as they come."""

"""Which source pieces cover a destination piece, each element exactly once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from jackfield_reshard.boxes import Box, intersect, subtract
from jackfield_reshard.canonical import Piece

T = TypeVar("T")


def by_name(pieces: Iterable[Piece]) -> dict[str, list[Piece]]:
    """Pieces grouped by canonical name."""
    out: dict[str, list[Piece]] = {}
    for piece in pieces:
        out.setdefault(piece.name, []).append(piece)
    return out


def cover(need: Box, held: Sequence[T], box: Callable[[T], Box]) -> tuple[list[tuple[T, Box]], list[Box]]:
    """Parts of `need` with who provides them (the first holder wins), and the boxes that nobody holds."""
    found: list[tuple[T, Box]] = []
    missing = [need]
    for holder in held:
        rest: list[Box] = []
        for want in missing:
            common = intersect(want, box(holder))
            if common is None:
                rest.append(want)
            else:
                found.append((holder, common))
                rest.extend(subtract(want, common))
        missing = rest
        if not missing:
            break
    return found, missing

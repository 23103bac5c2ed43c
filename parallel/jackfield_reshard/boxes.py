"""Arithmetic of boxes: the axis-aligned blocks of logical tensors that ranks hold and need. Pure Python, no tensors.

A box is `(offset, size)`: two tuples of the same length. A logical tensor may be viewed in several *shapes* with the same
elements in the same order, such as a query weight as `[heads x head size, hidden]` or, where a layout interleaves, as
`[groups, heads in group x head size, hidden]`. `refine` finds the coarsest shape that both views can be cut along.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from math import prod

Ints = tuple[int, ...]
Box = tuple[Ints, Ints]


def intersect(a: Box, b: Box) -> Box | None:
    """The common box of two boxes of one shape, or None where it is empty."""
    offset = tuple(max(x, y) for x, y in zip(a[0], b[0], strict=True))
    end = tuple(min(x + m, y + n) for x, m, y, n in zip(a[0], a[1], b[0], b[1], strict=True))
    size = tuple(e - o for o, e in zip(offset, end, strict=True))
    return (offset, size) if all(n > 0 for n in size) else None


def contains(outer: Box, inner: Box) -> bool:
    """Whether every element of `inner` is in `outer`."""
    return all(x <= y and y + n <= x + m for x, m, y, n in zip(outer[0], outer[1], inner[0], inner[1], strict=True))


def elements(box: Box) -> int:
    """How many elements a box has."""
    return prod(box[1])


def subtract(box: Box, hole: Box) -> Iterator[Box]:
    """Disjoint boxes that together are `box` without `hole` (which must lie inside it)."""
    offset, size = list(box[0]), list(box[1])
    for d, (o, n) in enumerate(zip(*hole, strict=True)):
        before, after = o - offset[d], offset[d] + size[d] - o - n
        if before:
            yield tuple(offset), (*size[:d], before, *size[d + 1 :])
        if after:
            yield (*offset[:d], o + n, *offset[d + 1 :]), (*size[:d], after, *size[d + 1 :])
        offset[d], size[d] = o, n


def _strides(shape: Sequence[int]) -> list[int]:
    """Element strides of a dense tensor: the suffix products of its shape."""
    out, step = [], 1
    for n in reversed(shape):
        out.append(step)
        step *= n
    return out[::-1]


def refine(a: Ints, b: Ints) -> Ints | None:
    """The coarsest shape of which both shapes are mergings of neighbouring dimensions; None where there is none.

    `refine((8, 6), (2, 4, 6)) == (2, 4, 6)`; `refine((2, 6), (3, 4))` is None, for 4 does not divide 6.
    """
    if a == b:
        return a
    if prod(a) != prod(b):
        return None
    cuts = sorted({*_strides(a), *_strides(b), prod(a)}, reverse=True)
    if any(high % low for high, low in itertools.pairwise(cuts)):
        return None
    return tuple(high // low for high, low in itertools.pairwise(cuts)) or a


def _ranges(start: int, length: int, shape: Ints) -> Iterator[Box]:
    """Boxes of `shape` that together are the flat range [start, start + length), in order."""
    if len(shape) == 1:
        yield (start,), (length,)
        return
    inner = prod(shape[1:])
    first, last = start // inner, (start + length - 1) // inner
    head = start - first * inner
    if first == last and length < inner:
        for offset, size in _ranges(head, length, shape[1:]):
            yield (first, *offset), (1, *size)
        return
    if head:
        for offset, size in _ranges(head, inner - head, shape[1:]):
            yield (first, *offset), (1, *size)
        first += 1
    full = (start + length) // inner - first
    if full:
        yield (first, *(0 for _ in shape[1:])), (full, *shape[1:])
    tail = start + length - (first + full) * inner
    if tail > 0:
        for offset, size in _ranges(0, tail, shape[1:]):
            yield (first + full, *offset), (1, *size)


def recut(box: Box, shape: Ints, finer: Ints) -> list[tuple[Box, Box]]:
    """Cut a box of `shape` into boxes of the finer shape.

    Returns pairs (part of the box in the coordinates of `shape`, the same elements as a box of `finer`).
    """
    if shape == finer:
        return [(box, box)]
    parts: list[tuple[list[int], list[int], list[int], list[int]]] = [([], [], [], [])]
    at = 0
    for n, offset, size in zip(shape, *box, strict=True):
        end, have = at, 1
        while end < len(finer) and (have < n or (end == at and n == 1 and finer[end] == 1)):
            have *= finer[end]
            end += 1
        sub = finer[at:end]
        at = end
        if not sub:  # a dimension of one element that the finer shape does not spell out
            parts = [([*o, offset], [*s, size], fo, fs) for o, s, fo, fs in parts]
            continue
        cuts = list(_ranges(offset, size, sub))
        strides = _strides(sub)
        parts = [
            (
                [*o, sum(x * k for x, k in zip(cut[0], strides, strict=True))],
                [*s, prod(cut[1])],
                [*fo, *cut[0]],
                [*fs, *cut[1]],
            )
            for o, s, fo, fs in parts
            for cut in cuts
        ]
    ones = len(finer) - at
    return [((tuple(o), tuple(s)), ((*fo, *(0,) * ones), (*fs, *(1,) * ones))) for o, s, fo, fs in parts]


def split(size: Ints, limit: int) -> list[Box]:
    """Cut a box of `size` at offset 0 into boxes of at most `limit` elements, along its first dimensions, in order."""
    if prod(size) <= limit:
        return [((0,) * len(size), size)]
    inner = prod(size[1:])
    if inner <= limit:
        rows = limit // inner
        return [((at, *(0 for _ in size[1:])), (min(rows, size[0] - at), *size[1:])) for at in range(0, size[0], rows)]
    return [((at, *o), (1, *s)) for at in range(size[0]) for o, s in split(size[1:], limit)]

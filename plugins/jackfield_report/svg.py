"""Curves and bars as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from itertools import pairwise

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 340, 150, 52, 20, 10
MOST_POINTS = 240
"""Longer curves are drawn as means of as many equal stretches."""
COLOURS = ("#2f6f9f", "#d9822b", "#6a9f4f", "#a0527f", "#7a6fb0", "#b5a33a", "#5fa5a0", "#8c8c8c")


def number(value: float) -> str:
    """A number in four digits."""
    return f"{value:.4g}"


def thin(points: Sequence[tuple[float, float]], most: int = MOST_POINTS) -> list[tuple[float, float]]:
    """At most `most` points: means over equal stretches."""
    if len(points) <= most:
        return list(points)
    edges = [round(k * len(points) / most) for k in range(most + 1)]
    parts = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(x for x, _ in p) / len(p), sum(y for _, y in p) / len(p)) for p in parts]


def smooth(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """A running mean over a tenth of the curve."""
    half = max(len(points) // 20, 1)
    result = []
    for k, (x, _) in enumerate(points):
        near = [y for _, y in points[max(0, k - half) : k + half + 1]]
        result.append((x, sum(near) / len(near)))
    return result


def curve(name: str, points: Sequence[tuple[float, float]], description: str = "") -> str:
    """One metric over steps: the values pale, their running mean strong; first, last and extreme values in words."""
    finite = [(x, y) for x, y in points if math.isfinite(y)]
    if not finite:
        return ""
    shown = thin(finite)
    (x0, x1), (y0, y1) = (_span([p[k] for p in shown]) for k in (0, 1))

    def place(x: float, y: float) -> str:
        across = LEFT + (x - x0) / (x1 - x0) * (WIDTH - LEFT - 8)
        down = TOP + (y1 - y) / (y1 - y0) * (HEIGHT - TOP - BOTTOM)
        return f"{across:.1f},{down:.1f}"

    def line(data: Sequence[tuple[float, float]], kind: str) -> str:
        return f'<polyline class="{kind}" points="{" ".join(place(x, y) for x, y in data)}"/>'

    ys = [y for _, y in finite]
    last = ys[-1]
    title = f"{name}: first {number(ys[0])}, last {number(last)}, min {number(min(ys))}, max {number(max(ys))}"
    return (
        f'<figure><figcaption><b>{escape(name)}</b> {number(last)}<span class="what">{escape(description)}</span></figcaption>'
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img"><title>{escape(title)}</title>'
        f'<path class="axis" d="M{LEFT},{TOP}V{HEIGHT - BOTTOM}H{WIDTH - 8}"/>'
        f'<text x="{LEFT - 5}" y="{TOP + 8}" class="left">{number(y1)}</text>'
        f'<text x="{LEFT - 5}" y="{HEIGHT - BOTTOM}" class="left">{number(y0)}</text>'
        f'<text x="{LEFT}" y="{HEIGHT - 5}">{number(x0)}</text><text x="{WIDTH - 8}" y="{HEIGHT - 5}" class="left">step {number(x1)}</text>'
        f"{line(shown, 'raw')}{line(smooth(shown), 'mean')}</svg></figure>"
    )


def _span(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5, high + 0.5)


def bar(parts: Sequence[tuple[str, float]]) -> str:
    """One stacked bar of (name, amount), with a legend that has the amounts (seconds) and shares."""
    total = sum(amount for _, amount in parts) or 1.0
    boxes, legend, at = [], [], 0.0
    for k, (name, amount) in enumerate(parts):
        colour, width = COLOURS[k % len(COLOURS)], 1000 * amount / total
        boxes.append(f'<rect x="{at:.1f}" y="0" width="{width:.1f}" height="30" fill="{colour}"><title>{escape(name)}</title></rect>')
        share = f"{number(amount)} s, {amount / total:.0%}"
        legend.append(f'<li><i style="background:{colour}"></i><b>{escape(name)}</b> {share}</li>')
        at += width
    return (
        f'<svg class="bar" viewBox="0 0 1000 30" preserveAspectRatio="none">{"".join(boxes)}</svg><ul class="legend">{"".join(legend)}</ul>'
    )

"""A plan as a picture: who sends what to whom, and what each engine rank finds in place, copies and receives."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from jackfield.errors import ConfigError
from jackfield_reshard.layout import Layout
from jackfield_reshard.plan import Plan

COLOURS = {"shared": "#4c956c", "copied": "#9fc490", "from its node": "#f4a259", "from other nodes": "#bc4b51"}


def _binned(pairs: np.ndarray, most: int) -> tuple[np.ndarray, int]:
    """Sum neighbouring ranks so that at most `most` rows and columns are left: (table, ranks a cell)."""
    step = -(-max(pairs.shape) // most)
    padded = np.zeros([-(-n // step) * step for n in pairs.shape])
    padded[: pairs.shape[0], : pairs.shape[1]] = pairs
    return padded.reshape(padded.shape[0] // step, step, padded.shape[1] // step, step).sum(axis=(1, 3)), step


def draw(plan: Plan, source: Layout, destination: Layout, file: Path, most: int = 64) -> None:
    """Write a PNG or SVG (by the file's suffix). Raises ConfigError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("drawing a plan needs matplotlib: pip install 'jackfield[reshard]'") from None
    table, step = _binned(plan.pair_bytes() / 1e9, most)
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1.1, 1))
    image = left.imshow(np.where(table > 0, table, np.nan), cmap="viridis", aspect="auto", interpolation="nearest")
    figure.colorbar(image, ax=left, label="GB")
    unit = f" / {step}" if step > 1 else ""
    left.set(xlabel=f"engine rank{unit} ({destination})", ylabel=f"training rank{unit} ({source})")
    for source_rank, destination_rank in np.argwhere(table > 0):
        here = plan.topology.source[min(source_rank * step, len(plan.topology.source) - 1)]
        there = plan.assignment[min(destination_rank * step, len(plan.assignment) - 1)]
        if here == there:
            left.text(destination_rank, source_rank, "=", ha="center", va="center", color="white", fontsize=7)
        elif table.size <= 256 and (amount := table[source_rank, destination_rank]) > 1e-3 * table.max():
            left.text(destination_rank, source_rank, f"{amount:.2g}", ha="center", va="center", color="white", fontsize=7)
    left.set_title("who sends what to whom (= stays on its GPU)")
    ranks = np.arange(len(plan.assignment))
    parts = [plan.aliased, plan.received[0] - plan.aliased, plan.received[1], plan.received[2]]
    floor = np.zeros(len(ranks))
    for (label, colour), part in zip(COLOURS.items(), parts, strict=True):
        right.bar(ranks, part / 1e9, bottom=floor, color=colour, label=label, width=1.0 if len(ranks) > 64 else 0.8)
        floor += part / 1e9
    right.set(xlabel="engine rank", ylabel="GB", title="where an engine rank's weights come from")
    right.set_ylim(0, 1.25 * float(floor.max()) or 1)
    right.legend(loc="upper left", ncols=4, fontsize=8)
    figure.suptitle(f"{source} ({source.world} ranks) to {destination} ({destination.world} ranks)")
    figure.savefig(file)

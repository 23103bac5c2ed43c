"""Reward curves of the examples from finished runs: docs/curves/NAME.json and NAME.svg.

    jackfield train examples/quickstart.yaml seed=0 dir=runs/q0
    jackfield train examples/quickstart.yaml seed=1 dir=runs/q1
    python bench/example_curves.py quickstart runs/q0 runs/q1

One line a run, its mean reward by step; `--width` steps are averaged in the drawing, the JSON has each step.

"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

DOCS = Path(__file__).resolve().parent.parent / "docs" / "curves"
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")
WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 560, 260, 44, 32, 12


def read(folder: Path) -> tuple[str, list[float]]:
    """(seed, mean reward of each step) of a run."""
    seed = json.loads((folder / "config.json").read_text())["seed"]
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return str(seed), [round(row["reward"], 4) for row in rows]


def svg(curves: dict[str, list[float]], width: int) -> str:
    """Rewards in [0, 1] by step."""
    steps = max(len(c) for c in curves.values())

    def place(step: float, value: float) -> tuple[float, float]:
        return LEFT + (WIDTH - LEFT - 12) * step / max(steps - 1, 1), HEIGHT - BOTTOM - (HEIGHT - BOTTOM - TOP) * value

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="11">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for tick in (0, 0.25, 0.5, 0.75, 1.0):
        _, y = place(0, tick)
        parts.append(
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - 12}" stroke="#ddd"/><text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in range(0, steps, max(steps // 7, 1)):
        x, _ = place(tick, 0)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 15}" text-anchor="middle">{tick + 1}</text>')
    for k, ((seed, values), colour) in enumerate(zip(sorted(curves.items()), COLOURS, strict=False)):
        means = [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (place(i, v) for i, v in enumerate(means)))
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.8" points="{points}"/>')
        parts.append(f'<text x="{WIDTH - 16}" y="{HEIGHT - BOTTOM - 10 - 14 * k}" text-anchor="end" fill="{colour}">seed {seed}</text>')
    what = f"step (mean reward over {width} steps)" if width > 1 else "step (mean reward)"
    return "\n".join([*parts, f'<text x="{WIDTH / 2}" y="{HEIGHT - 4}" text-anchor="middle">{what}</text></svg>']) + "\n"


def main() -> None:
    """Write the two files; print the mean reward of the last tenth of each run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name")
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--width", type=int, default=5)
    args = parser.parse_args()
    curves = dict(read(run) for run in args.runs)
    DOCS.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f'  "{seed}": {json.dumps(values)}' for seed, values in curves.items())
    (DOCS / f"{args.name}.json").write_text(f'{{"example": "{args.name}", "mean reward by step, by seed": {{\n{rows}\n}}}}\n')
    (DOCS / f"{args.name}.svg").write_text(svg(curves, args.width))
    for seed, values in curves.items():
        last = values[-max(len(values) // 10, 1) :]
        print(f"seed {seed}: {values[0]:.3f} in the first step, {sum(last) / len(last):.3f} in the last tenth of {len(values)}")


if __name__ == "__main__":
    main()

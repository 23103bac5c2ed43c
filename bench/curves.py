"""Learning curves of every algorithm on the quickstart task: docs/algorithms/curves.json and one SVG a page.

    python bench/curves.py [--algorithms grpo ppo ...] [--seeds 0 1] [--steps 120]   # train what is missing, then draw

Each run is examples/quickstart.yaml with the algorithm, the seed and the steps replaced, and SETTINGS. A finished run is kept under
`--work` and not repeated. One process, one thread: start several with different seeds to use more cores.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from jackfield import Trainer, load_config, registry

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs" / "algorithms"
CALM = ["policy.optimizer.lr=1e-3", "batch.prompts=32"]
WHITENED = [*CALM, "algorithm.entropy_coef={start: 0.1, end: 0, steps: 150}"]
SETTINGS = {"ppo": WHITENED, "reinforce_pp": WHITENED, "rloo": CALM}
"""Beside the quickstart's: its rate of 3e-3 is GRPO's, whose deviation by group evens prompts out. Whitened advantages never become 0
either, and so want something that keeps the policy open."""
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df")


def train(name: str, seed: int, steps: int, folder: Path, overrides: list[str]) -> list[float]:
    """The mean reward of each step."""
    settings = [f"dir={folder}", f"seed={seed}", f"steps={steps}", f"algorithm.name={name}", "trackers=[]", "checkpoint.resume=never"]
    Trainer(load_config(ROOT / "examples" / "quickstart.yaml", [*settings, *SETTINGS.get(name, []), *overrides])).train()
    return [json.loads(line)["reward"] for line in (folder / "metrics.jsonl").read_text().splitlines() if '"reward"' in line]


def smooth(values: list[float], width: int = 5) -> list[float]:
    """Mean over the last `width` steps."""
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def svg(name: str, curves: dict[str, list[float]], reference: dict[str, list[float]]) -> str:
    """Reward by step, one line a seed, GRPO's behind it in grey. Its own few lines of SVG: no plotting library is needed."""
    width, height, left, bottom, top = 560, 260, 44, 32, 12
    steps = max(len(c) for c in [*curves.values(), *reference.values()])

    def line(values: list[float], colour: str, stroke: float) -> str:
        points = " ".join(
            f"{left + (width - left - 12) * i / max(steps - 1, 1):.1f},{height - bottom - (height - bottom - top) * v:.1f}"
            for i, v in enumerate(smooth(values))
        )
        return f'<polyline fill="none" stroke="{colour}" stroke-width="{stroke}" points="{points}"/>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">']
    parts.append(f'<rect width="{width}" height="{height}" fill="white"/>')
    for tick in (0, 0.25, 0.5, 0.75, 1.0):
        y = height - bottom - (height - bottom - top) * tick
        parts.append(
            f'<path d="M{left} {y:.1f}H{width - 12}" stroke="#ddd"/><text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>'
        )
    for tick in range(0, steps + 1, 20):
        x = left + (width - left - 12) * tick / max(steps - 1, 1)
        if x <= width - 10:
            parts.append(f'<text x="{x:.1f}" y="{height - bottom + 15}" text-anchor="middle">{tick}</text>')
    parts += [line(values, "#bbb", 1) for values in reference.values()]
    for (seed, values), colour in zip(sorted(curves.items()), COLOURS, strict=False):
        parts.append(line(values, colour, 1.8))
        y = height - bottom - 12 - 14 * int(seed)
        parts.append(f'<text x="{width - 16}" y="{y}" text-anchor="end" fill="{colour}">{name}, seed {seed}</text>')
    parts.append(f'<text x="{width / 2}" y="{height - 4}" text-anchor="middle">step (mean reward over five steps; grey: grpo)</text></svg>')
    return "\n".join(parts) + "\n"


def collect(work: Path) -> dict[str, dict[str, list[float]]]:
    """Write the documents from the finished runs; the curves by algorithm and seed."""
    curves: dict[str, dict[str, list[float]]] = {}
    for path in sorted(work.glob("*.json")):
        name, seed = path.stem.rsplit("-", 1)
        curves.setdefault(name, {})[seed] = json.loads(path.read_text())
    DOCS.mkdir(parents=True, exist_ok=True)
    rows = ",\n".join(f'  "{n}": {json.dumps({s: [round(v, 3) for v in c] for s, c in seeds.items()})}' for n, seeds in curves.items())
    head = f'{{"command": "python bench/curves.py",\n "overrides": {json.dumps(SETTINGS)},\n'
    head += ' "mean reward by step, by algorithm and seed": {\n'
    (DOCS / "curves.json").write_text(head + rows + "\n}}\n")
    for name, seeds in curves.items():
        (DOCS / f"{name}.svg").write_text(svg(name, seeds, curves.get("grpo", {}) if name != "grpo" else {}))
    return curves


def main() -> None:
    """Train what is missing, draw, and print the mean reward of the first and the last ten steps."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [e.name for e in registry.entries("algorithm") if e.distribution == "jackfield"]
    parser.add_argument("--algorithms", nargs="*", default=names)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1])
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--work", type=Path, default=ROOT / "runs" / "curves")
    parser.add_argument("--set", nargs="*", default=[], help="further overrides, as in `jackfield train`")
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.work.mkdir(parents=True, exist_ok=True)
    for name in args.algorithms:
        for seed in args.seeds:
            done = args.work / f"{name}-{seed}.json"
            if not done.exists():
                done.write_text(json.dumps(train(name, seed, args.steps, args.work / f"{name}-{seed}", args.set)))
                values = json.loads(done.read_text())
                print(f"{name} seed {seed}: {sum(values[:10]) / 10:.2f} to {sum(values[-10:]) / 10:.2f}", flush=True)
    collect(args.work)


if __name__ == "__main__":
    main()

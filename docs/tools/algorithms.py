"""Write docs/algorithms/: one page an algorithm from its module's docstring, its settings and its measured curve, and the index.

python docs/tools/algorithms.py    # after changing an algorithm, or after bench/curves.py; a test compares the pages with the code
"""

from __future__ import annotations

import inspect
import json
import sys
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from jackfield import registry
from jackfield.algorithm import AlgorithmConfig, KLConfig
from jackfield_estimators import ClippedConfig

DOCS = Path(__file__).resolve().parent.parent / "algorithms"
Curves = dict[str, dict[str, list[float]]]


def default(value: Any) -> str:
    """A default as a config file writes it."""
    if isinstance(value, BaseModel):
        changed = {n: v for n, v in value.model_dump().items() if v != KLConfig.model_fields[n].default}
        return ", ".join(f"{n}: {v}" for n, v in changed.items()) or "off"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)


def settings(config: type[BaseModel], base: type[BaseModel] | None = None) -> str:
    """A table of the fields, those alone that differ from `base` if it is given."""
    known = base.model_fields if base is not None else {}
    rows = []
    for name, field in config.model_fields.items():
        if name not in known or known[name].default != field.default:
            meaning = (field.description or "").replace("\n", " ").replace("|", r"\|")
            rows.append(f"| `{name}` | {default(field.default)} | {meaning} |")
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows]) if rows else "None of its own."


def needs(algorithm: Any) -> str:
    """What the run has to provide."""
    wanted = algorithm.needs
    words = {
        "values": "a critic",
        "old_log_probs": "log-probs before the update",
        "sum_pi_squared": "the sum of squared probabilities of each token's distribution",
        "greedy_baseline": "one greedy answer a prompt",
    }
    found = [text for name, text in words.items() if getattr(wanted, name)]
    if wanted.min_group_size > 1:
        found.insert(0, f"at least {wanted.min_group_size} samples a prompt (`batch.group_size`)")
    return ", ".join(found) or "nothing beyond samples and rewards"


def measured(name: str, curves: Curves, command: str, overrides: list[str]) -> list[str]:
    """The section with the curve and the settings it needed beside the quickstart's; nothing where there is none."""
    if name not in curves:
        return []
    rows = ["| seed | first ten steps | last ten steps | best ten in a row |", "|---|---|---|---|"]
    for seed, values in sorted(curves[name].items()):
        means = [sum(values[i : i + 10]) / 10 for i in range(len(values) - 9)]
        rows.append(f"| {seed} | {means[0]:.2f} | {means[-1]:.2f} | {max(means):.2f} |")
    steps = max(len(values) for values in curves[name].values())
    beside = f" with {', '.join(f'`{item}`' for item in overrides)}" if overrides else ""
    said = (
        f"Mean reward on the quickstart's task{beside} (`{command} --steps {steps} --algorithms {name}`; all curves are in `curves.json`):"
    )
    return ["## Measured", said, f"![Reward by step]({name}.svg)", "\n".join(rows)]


def page(name: str, found: Any, curves: Curves, command: str, overrides: list[str]) -> str:
    """One algorithm's page."""
    title, _, body = (inspect.getdoc(inspect.getmodule(found)) or "").partition("\n")
    clipped = issubclass(found.Config, ClippedConfig)
    shared = "the [settings of every algorithm](index.md#settings-of-every-algorithm)"
    if clipped:
        shared += " and of the [clipped loss](index.md#settings-of-the-clipped-loss)"
    where = Path(inspect.getfile(found)).resolve().relative_to(DOCS.parent.parent)
    parts = [f"# {name}", title, body.strip("\n"), "## Settings"]
    parts += [settings(found.Config, ClippedConfig if clipped else AlgorithmConfig), f"Beside them: {shared}. Needs {needs(found())}."]
    parts += [f"```yaml\nalgorithm: {{name: {name}}}\n```", *measured(name, curves, command, overrides), f"Source: `{where.as_posix()}`."]
    return "\n\n".join(parts) + "\n"


def index(algorithms: dict[str, Any], curves: Curves) -> str:
    """The table of all and the settings they share, put into the prose of algorithms_index.md."""
    rows = ["| name | what it is | quickstart reward, last ten steps, by seed |", "|---|---|---|"]
    for name, found in algorithms.items():
        title = (inspect.getdoc(inspect.getmodule(found)) or "").partition("\n")[0].rstrip(".")
        last = ", ".join(f"{sum(c[-10:]) / 10:.2f}" for _, c in sorted(curves.get(name, {}).items()))
        rows.append(f"| [{name}]({name}.md) | {title} | {last} |")
    text = (Path(__file__).parent / "algorithms_index.md").read_text()
    tables = {"algorithms": "\n".join(rows), "common": settings(AlgorithmConfig), "kl": settings(KLConfig)}
    for slot, table in (tables | {"clipped": settings(ClippedConfig, AlgorithmConfig)}).items():
        text = text.replace(f"<!-- {slot} -->", table)
    return text


def pages() -> dict[str, str]:
    """Every generated page by file name."""
    path = DOCS / "curves.json"
    data = json.loads(path.read_text()) if path.exists() else {}
    curves, command = data.get("mean reward by step, by algorithm and seed", {}), data.get("command", "")
    algorithms = {e.name: e.point.load() for e in registry.entries("algorithm") if e.distribution == "jackfield"}
    special = data.get("overrides", {})
    found = {f"{n}.md": page(n, a, curves, command, special.get(n, [])) for n, a in algorithms.items()}
    return found | {"index.md": index(algorithms, curves)}


if __name__ == "__main__":
    DOCS.mkdir(parents=True, exist_ok=True)
    for file, content in pages().items():
        (DOCS / file).write_text(content)
    sys.stdout.write(f"{len(pages())} pages\n")

"""The report as one HTML page that needs nothing else: no script, no network."""

from __future__ import annotations

import json
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from jackfield_report.reading import RunRecord
from jackfield_report.svg import bar, curve, number

FIRST = {
    "reward": "weighted sum of the scores, mean over the samples trained on",
    "eval/reward": "held-out rows",
    "response/length": "tokens",
    "response/truncated": "share that reached max_new_tokens",
    "loss": "as reduced",
    "kl": "from the reference policy",
    "entropy": "nats a token",
    "grad_norm": "before clipping",
    "learning_rate": "",
    "rollout_gap/mean": "|log-prob of the engine - of the trainer|",
}
"""Curves shown on top, with what they mean; the others follow, folded away."""
STEP = "time/step"
SHOWN_SAMPLES = 40


def page(record: RunRecord) -> str:
    """The whole page."""
    names = record.names()
    own = [n for n in names if n.startswith("reward/") and not n.endswith("/failed")]
    first = [n for n in ("reward", *own, *FIRST) if n in names]
    first = list(dict.fromkeys(first))
    other = [n for n in names if n not in first and not n.startswith("time/") and len({y for _, y in record.series(n)}) > 1]
    constant = [n for n in names if n not in first and n not in other and not n.startswith("time/")]
    template = Template((Path(__file__).with_name("page.html")).read_text(encoding="utf-8"))
    return template.substitute(
        name=escape(record.name),
        summary=summary(record),
        curves="".join(curve(n, record.series(n), FIRST.get(n, "")) for n in first),
        others="".join(curve(n, record.series(n)) for n in other),
        constants=", ".join(f"{escape(n)} = {number(record.series(n)[-1][1])}" for n in constant if record.series(n)) or "none",
        time=time_spent(record),
        samples=samples(record),
        config=escape(json.dumps(record.config, indent=1)),
    )


def summary(record: RunRecord) -> str:
    """The run in a line."""
    config, rewards = record.config, [y for _, y in record.series("reward")]
    tenth = max(len(rewards) // 10, 1)
    parts = [f"{len(record.steps)} of {config.get('steps', '?')} steps"]
    if rewards:
        start, end = (sum(part) / len(part) for part in (rewards[:tenth], rewards[-tenth:]))
        parts.append(f"reward {number(start)} in the first tenth of the steps, {number(end)} in the last")
    seconds = sum(y for _, y in record.series(STEP))
    if seconds:
        parts.append(f"{number(seconds)} s in steps")
    failed = {n: sum(y for _, y in record.series(n)) for n in record.names() if n.endswith(("/failed", "/overlong", "/aborted", "dropped"))}
    parts += [f"<b>{escape(n)}: {number(total)}</b>" for n, total in failed.items() if total]
    algorithm = (config.get("algorithm") or {}).get("name", "?")
    model = ((config.get("policy") or {}).get("model") or {}).get("path", "?")
    return f"{escape(str(algorithm))} on {escape(str(model))}: " + "; ".join(parts)


def time_spent(record: RunRecord) -> str:
    """Mean seconds a step by phase; what no phase claims is `other`."""
    phases = [n for n in record.names() if n.startswith("time/") and n != STEP]
    means = {n: sum(y for _, y in record.series(n)) / len(record.steps) for n in phases}
    whole = sum(y for _, y in record.series(STEP)) / len(record.steps)
    parts = sorted(((n.removeprefix("time/"), s) for n, s in means.items()), key=lambda p: -p[1])
    rest = whole - sum(means.values())
    if rest > 0:
        parts.append(("other", rest))
    if not parts:
        return "<p>No times were recorded.</p>"
    return f"<p>A step takes {number(whole)} s on average.</p>{bar(parts)}{curve(STEP, record.series(STEP), 'seconds')}"


def samples(record: RunRecord) -> str:
    """The latest samples, newest step first."""
    if not record.samples:
        return "<p>None were kept: add tracker <code>samples</code> (<code>trackers: [console, samples]</code>).</p>"
    newest = sorted(record.samples, key=lambda s: -s["step"])[:SHOWN_SAMPLES]
    head = "<tr><th>step</th><th>prompt</th><th>response</th><th>reward</th><th>tokens</th><th>end</th></tr>"
    return f"<table>{head}{''.join(_row(s) for s in newest)}</table>"


def _row(sample: dict[str, Any]) -> str:
    scores = ", ".join(f"{name} {'failed' if s is None else number(s)}" for name, s in sample.get("scores", {}).items())
    cells = (
        str(sample["step"]),
        f"<pre>{escape(str(sample.get('prompt')))}</pre>",
        f"<pre>{escape(str(sample.get('response')))}</pre>",
        f'<span title="{escape(scores)}">{number(sample["reward"])}</span>',
        str(sample.get("tokens", "")),
        escape(str(sample.get("finish_reason", ""))),
    )
    return f"<tr>{''.join(f'<td>{c}</td>' for c in cells)}</tr>"

"""One table from all sections of bench/multi_gpu.py: what was measured beside what is aimed at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Row = dict[str, Any]
LIMITS = {
    # what: (target, whether less is better)
    "seconds": (0.020, True),
    "share_of_link": (0.80, False),
    "extra_buckets": (2.0, True),
    "generation": (0.97, False),
    "training": (0.90, False),
    "communication": (0.15, True),
}
"""For Llama-2-13B in bfloat16 on 8 GPUs of one host, and weak scaling there. Elsewhere figures are shown without a verdict."""


def _against(what: str, value: float | None, judged: bool) -> Row:
    target, less = LIMITS[what]
    met = None if value is None or not judged else (value <= target if less else value >= target)
    return {"measured": value, "target": f"{'at most' if less else 'at least'} {target:g}"} | ({} if met is None else {"met": met})


def rows(result: Mapping[str, Any], cuda: bool) -> list[Row]:
    """The table; sections that did not run are missing."""
    out: list[Row] = []
    laws = [r for r in result.get("laws", []) if "skipped" not in r]
    if laws:
        held = sum(r.get("ok") is True for r in laws)
        out.append({"what": "laws that hold", "measured": f"{held} of {len(laws)}", "target": "all", "met": held == len(laws)})
    out += _switch(result, cuda)
    out += _scaling(result, cuda)
    out += [{"what": "device mapping, colocated over separate", "measured": r["ratio"]} for r in result.get("mapping", []) if "ratio" in r]
    for kind in ("switch", "training"):
        found = [r["predicted_over_measured"] for r in result.get("model", []) if r["what"].startswith(kind) and r["measured"]]
        if found:
            out.append({"what": f"{kind}: predicted over measured", "measured": f"{min(found):.2f} to {max(found):.2f}"})
    return out


def _switch(result: Mapping[str, Any], cuda: bool) -> list[Row]:
    out: list[Row] = []
    for r in result.get("switch", []):
        if "seconds" not in r:
            continue
        judged = cuda and r["model"] == "llama-2-13b" and r["ranks"] == 8
        name = f"switch {r['model']}, {r['from']} to {r['to']}: "
        out.append({"what": name + "seconds"} | _against("seconds", r["seconds"][0], judged))
        out.append({"what": name + "bytes at the bound", "measured": r["at_bound"], "target": "yes", "met": r["at_bound"]})
        out.append({"what": name + "gather-everything, times as long", "measured": r["ratio_seconds"]})
        out.append({"what": name + "share of the link rate"} | _against("share_of_link", r.get("share_of_link"), judged))
        if "extra_mb" in r:
            out.append({"what": name + "extra memory in buckets"} | _against("extra_buckets", r["extra_mb"] / r["bucket_mb"], judged))
    return out


def _scaling(result: Mapping[str, Any], cuda: bool) -> list[Row]:
    out: list[Row] = []
    for section in ("generation", "training"):
        ran = [r for r in result.get(section, []) if "efficiency" in r]
        for group in dict.fromkeys((r.get("backend") or r["engine"], r.get("layout", "")) for r in ran):
            last = [r for r in ran if (r.get("backend") or r["engine"], r.get("layout", "")) == group][-1]
            name = " ".join((section, *group)).strip() + f" at {last['ranks']}: "
            judged = cuda and last["ranks"] == 8
            out.append({"what": name + "weak-scaling efficiency"} | _against(section, last["efficiency"], judged))
            if last.get("communication_share") is not None:
                out.append({"what": name + "communication share"} | _against("communication", last["communication_share"], judged))
    return out

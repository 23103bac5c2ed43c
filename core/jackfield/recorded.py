"""Which plugins made a run: written into its folder and every checkpoint, and compared on resume (docs/plugins-recorded.md)."""

from __future__ import annotations

import warnings
from typing import Any

from jackfield import __version__, registry
from jackfield.errors import CheckpointError
from jackfield.manager import PluginManager

STAGES = ("rollout", "score", "filter", "advantage", "update", "step")
"""Hooks whose plugins decide what is learnt."""


def plugins(manager: PluginManager) -> dict[str, dict[str, Any]]:
    """By name: the class, its distribution and version ("" for a single file), and the stage hooks that it implements."""
    entries = (e for kind in registry.KINDS for e in registry.entries(kind))
    owners = {e.target.partition(":")[0].partition(".")[0]: f"{e.distribution} {e.version}" for e in entries}
    owners["jackfield"] = f"jackfield {__version__}"
    found = {}
    for name, plugin in manager.list_name_plugin():
        if plugin is not None:
            stages = [c.name for c in manager.get_hookcallers(plugin) or () if c.name in STAGES]
            component = type(getattr(plugin, "reward", plugin))
            made, owner = f"{component.__module__}:{component.__qualname__}", owners.get(component.__module__.partition(".")[0], "")
            found[name] = {"class": made, "distribution": owner, "stages": sorted(stages)}
    return found


def compare(before: dict[str, dict[str, Any]], now: dict[str, dict[str, Any]], *, strict: bool) -> list[str]:
    """What changed, in words. A plugin of a stage that came, went or changed its class is an error if `strict`; all else warns."""
    changes, grave = list[str](), list[str]()
    for name in sorted({*before, *now}):
        old, new = before.get(name, {}), now.get(name, {})
        if old.get("class") != new.get("class"):
            change = f"{name} " + ("is gone" if not new else "is new" if not old else f"was {old['class']} and is {new['class']}")
            (grave if old.get("stages") or new.get("stages") else changes).append(change)
        elif old.get("distribution") != new.get("distribution"):
            changes.append(f"{name} was of {old['distribution'] or 'a file'} and is of {new['distribution'] or 'a file'}")
    if grave and strict:
        way_out = "take the plugins back, start in another dir, or say checkpoint.changed_plugins=warn"
        raise CheckpointError(f"the run would go on with other plugins than it was made with: {'; '.join(grave)}: {way_out}")
    if grave or changes:
        warnings.warn(f"resuming with other plugins: {'; '.join(grave + changes)}", stacklevel=2)
    return grave + changes

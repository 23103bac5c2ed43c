"""Which plugins and settings made a run: in its folder and every checkpoint, and compared on resume (docs/plugins-recorded.md)."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from jackfield import __version__, registry
from jackfield.errors import CheckpointError

if TYPE_CHECKING:
    from jackfield.config import RunConfig
    from jackfield.manager import PluginManager

STAGES = ("rollout", "score", "filter", "advantage", "update", "step")
"""Hooks whose plugins decide what is learnt."""
UNTOLD = ("dir", "steps", "checkpoint", "trackers", "disabled", "launcher", "transport", "share_memory")
"""Fields of the config that decide nothing of what is learnt up to a step; any may change on resume, and nothing is said of it."""


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


def settings(config: RunConfig) -> dict[str, Any]:
    """The config's fields by dotted name, those of UNTOLD left out."""
    return _flat({n: v for n, v in config.model_dump(mode="json").items() if n not in UNTOLD}, "")


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, list):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return {name: value}
    below = [_flat(v, f"{name}.{k}" if name else str(k)) for k, v in value.items()]
    return {n.replace(".options", ""): v for each in below for n, v in each.items()}


def changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Which settings changed, in words; a warning says so. All may: this is how a run's rate or batch is changed on the way."""
    names = [n for n in dict.fromkeys([*before, *now]) if before.get(n) != now.get(n)]
    changes = [f"{n} was {before.get(n, 'unset')} and is {now.get(n, 'unset')}" for n in names]
    if changes:
        warnings.warn(f"resuming with other settings: {'; '.join(changes)}", stacklevel=2)
    return changes

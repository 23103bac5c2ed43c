"""`jackfield plugins`: what is installed, from metadata alone; `-v` imports each and shows its hooks; `show NAME` explains one."""

from __future__ import annotations

import json
import re
from collections import Counter
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING, Any

import click

from jackfield import JACKFIELD_API, __version__, registry
from jackfield.errors import JackfieldError, PluginError, nearest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jackfield.registry import Entry

COLUMNS = ("kind", "name", "distribution", "version", "api", "state")


@click.command("plugins")
@click.argument("words", nargs=-1, metavar="[KIND] | show NAME")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option(
    "-v", "--verbose", is_flag=True, help="Import each plugin: its API version, whether it loads, its hooks in the order of a step."
)
@click.option("-c", "--config", "config", help="Show instead the hooks of a run with this config, in the order in which they are called.")
def plugins(words: tuple[str, ...], as_json: bool, verbose: bool, config: str | None) -> None:
    """List installed plugins, of one KIND or of all; or show one, which may be a path/to/file.py:Class: its settings, hooks and source.

    Column api is the version of the plugin interface, which only the plugin's code says: with -v. Before that it is the range of jackfield
    versions that its distribution asks for.
    """
    if words[:1] == ("show",) and len(words) == 2:
        found = [_chosen(words[1])] if ":" in words[1] else [_installed(entry) for entry in _named(words[1])]
        click.echo("\n\n".join(_show(*each) for each in found))
        return
    if len(words) > 1 or (words and words[0] not in registry.KINDS):
        raise JackfieldError(f"there is no kind {' '.join(words)!r}: choose from {', '.join(registry.KINDS)}, or say show NAME")
    if config:
        click.echo(_order(config))
        return
    found = [e for kind in (words or registry.KINDS) for e in registry.entries(kind)]
    wanted = {name: _requirement(point) for name, point in {e.distribution: e.point for e in found}.items()}
    counts = Counter((e.kind, e.name) for e in found)
    rows = [_row(e, wanted[e.distribution], [o for o in found if counts[e.kind, e.name] > 1 and o.name == e.name], verbose) for e in found]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    widths = [max(len(str(row[c])) for row in [dict(zip(COLUMNS, COLUMNS, strict=True)), *rows]) for c in COLUMNS]
    for row in [dict(zip(COLUMNS, COLUMNS, strict=True)), *rows]:
        click.echo("  ".join(str(row[c]).ljust(w) for c, w in zip(COLUMNS, widths, strict=True)).rstrip())
        if row.get("hooks"):
            click.echo(f"{'':{widths[0]}}  hooks: {', '.join(row['hooks'])}")


def _row(entry: Entry, wanted: str, rivals: Sequence[Entry], verbose: bool) -> dict[str, Any]:
    row = {"kind": entry.kind, "name": entry.name, "distribution": entry.distribution, "version": entry.version}
    row |= {"api": wanted or str(JACKFIELD_API), "state": "ok", "target": entry.target}
    if wanted and not _contains(wanted, __version__):
        row["state"] = f"needs jackfield{wanted}, this is {__version__}"
    elif rivals:
        row["state"] = "clash: say " + " or ".join(f"{e.distribution}/{e.name}" for e in rivals if e.kind == entry.kind)
    if verbose:
        try:
            loaded = registry.load(entry.kind, f"{entry.distribution}/{entry.name}")
        except PluginError as error:
            return row | {"state": str(error)}
        from jackfield_commands.describe import hooks

        row |= {"api": str(getattr(loaded, "api", JACKFIELD_API)), "hooks": hooks(loaded)}
    return row


def _requirement(point: EntryPoint) -> str:
    """The versions of jackfield that a plugin's distribution asks for, as in its metadata; empty for jackfield's own plugins."""
    dist = point.dist
    if dist is None or dist.name == "jackfield":
        return ""
    for line in dist.requires or ():
        match = re.fullmatch(r"jackfield\s*(?:\[[^]]*\])?\s*\(?([<>=!~][^;)]*)\)?\s*(?:;.*)?", line)
        if match:
            return match[1].replace(" ", "")
    return ""


def _contains(specifier: str, version: str) -> bool:
    from packaging.specifiers import SpecifierSet

    return SpecifierSet(specifier).contains(version, prereleases=True)


def _named(name: str) -> list[Entry]:
    kind, slash, short = name.partition("/")
    kinds = [kind] if slash and kind in registry.KINDS else list(registry.KINDS)
    wanted = short if slash and kind in registry.KINDS else name
    found = [e for k in kinds for e in registry.entries(k) if wanted in (e.name, f"{e.distribution}/{e.name}")]
    if not found:
        names = [e.name for k in kinds for e in registry.entries(k)]
        hint = nearest(wanted, names, "`jackfield plugins` lists all; path/to/file.py:Class works too", most=3, cutoff=0.5)
        raise PluginError(f"no plugin is called {name!r}; {hint}")
    return found


def _installed(entry: Entry) -> tuple[str, str, str, Any]:
    loaded = registry.load(entry.kind, f"{entry.distribution}/{entry.name}")
    return entry.kind, entry.name, f"{entry.distribution} {entry.version}", loaded


def _chosen(name: str) -> tuple[str, str, str, Any]:
    """What a config would get by `file.py:Name` or `module:Name`. Its kind is its base class's; a function is a reward, all else hooks."""
    loaded = registry.load("hooks", name)
    kind = getattr(loaded, "kind", "hooks" if isinstance(loaded, type) or not callable(loaded) else "reward")
    return kind, name, name.rpartition(":")[0], registry.load(kind, name)


def _show(kind: str, name: str, source: str, loaded: Any) -> str:
    from jackfield_commands.describe import fields, hooks, where

    doc = (loaded.__doc__ or "").strip().split("\n\n")[0].split()
    lines = [f"{kind} {name}: {' '.join(doc)}"]
    lines += [f"  from {source}, API {getattr(loaded, 'api', JACKFIELD_API)}, {where(loaded)}"]
    if found := hooks(loaded):
        lines += [f"  hooks: {', '.join(found)}"]
    config = getattr(loaded, "Config", None)
    if config is not None and hasattr(config, "model_fields"):
        lines += ["  settings:" if config.model_fields else "  no settings"]
        for field in fields(config):
            kind = "" if field.type == "section" else f" = {field.default}  [{field.type}]"
            lines += [f"    {field.path}{kind}  # {field.doc}"]
    return "\n".join(lines)


def _order(path: str) -> str:
    """Call order of every hook that something implements: as pluggy calls them, wrappers first."""
    from jackfield.config import load_config
    from jackfield.hookspecs import Hooks
    from jackfield.trainer import Trainer

    manager = Trainer(load_config(path)).run.manager
    lines = []
    for name in (n for n in vars(Hooks) if not n.startswith("_")):
        impls = list(reversed(getattr(manager.hook, name).get_hookimpls()))
        if impls:
            lines.append(f"{name:18s} " + ", ".join(f"{i.plugin_name}{' (wrapper)' if i.wrapper else ''}" for i in impls))
    return "\n".join(lines)

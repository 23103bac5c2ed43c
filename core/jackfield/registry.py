"""Finding plugins: entry points, one group a kind. Listing reads metadata only; a module is imported when it is chosen."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import EntryPoint, distribution, distributions
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jackfield import JACKFIELD_API, OLDEST_API
from jackfield.errors import JackfieldError, PluginError, nearest, told

if TYPE_CHECKING:
    from jackfield.config import ComponentSpec

KINDS = ("algorithm", "backend", "engine", "rollout", "reward", "dataset", "launcher", "transport", "tracker", "hooks", "command")
"""Every kind of plugin; the entry-point group of a kind is `jackfield.<kind>`. (`jackfield.export` holds names for `jackfield` itself.)"""


@dataclass(frozen=True)
class Entry:
    """One installed plugin, as its distribution's metadata declares it."""

    kind: str
    name: str
    target: str
    """`module:attribute`"""
    distribution: str
    version: str
    point: EntryPoint

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r} of {self.distribution} {self.version}"


def entries(kind: str) -> list[Entry]:
    """Installed plugins of a kind, sorted by name and distribution; nothing is imported."""
    state = tuple((folder, os.stat(folder).st_mtime_ns) for folder in sys.path if os.path.isdir(folder))
    return [entry for entry in _scan(state) if entry.kind == kind]


@functools.lru_cache(maxsize=1)
def _scan(state: tuple[tuple[str, int], ...]) -> list[Entry]:
    """All plugins of all kinds. Reading the metadata of every distribution is slow, so it is done once for each state of sys.path."""
    found: dict[tuple[str, str, str], Entry] = {}
    for dist in distributions():
        if "[jackfield." in (dist.read_text("entry_points.txt") or ""):
            owner = (meta := dist.metadata)["Name"], meta["Version"]  # parsed anew at each access
            for point in dist.entry_points:
                kind = point.group.removeprefix("jackfield.")
                if kind in (*KINDS, "export") and kind != point.group:
                    found.setdefault((kind, point.name, owner[0]), Entry(kind, point.name, point.value, *owner, point))
    return sorted(found.values(), key=lambda e: (e.kind, e.name, e.distribution))


def find(kind: str, name: str) -> Entry:
    """The one installed plugin called `name` or `distribution/name`. Raises PluginError for none or several."""
    installed = entries(kind)
    wanted_dist, _, short = name.rpartition("/")
    matches = [e for e in installed if e.name == short and wanted_dist in ("", e.distribution)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        owners = " and ".join(f"{e.distribution} {e.version}" for e in matches)
        ways = " or ".join(f"{e.distribution}/{e.name}" for e in matches)
        raise PluginError(f"{kind} {name!r} is provided by {owners}: say {ways}")
    names = sorted({e.name for e in installed})
    other = next((f"{short!r} is of kind {k}" for k in KINDS if any(e.name == short for e in entries(k))), "")
    hint = other or nearest(short, names, f"installed: {', '.join(names) or 'none'}", most=3, cutoff=0.5)
    raise PluginError(f"no {kind} is called {name!r}; {hint} (`jackfield plugins` lists all; path/to/file.py:Class works too)")


def load(kind: str, name: str) -> Any:
    """The object behind a name, imported: entry point, `file.py:Object` or `module:Object`. Raises PluginError."""
    module_name, colon, attribute = name.rpartition(":")
    entry = None if colon else find(kind, name)
    source = str(entry or f"{kind} {name!r}")
    try:
        if entry:
            found = entry.point.load()
        else:
            module = _import_file(Path(module_name)) if module_name.endswith(".py") else importlib.import_module(module_name)
            found = getattr(module, attribute)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{source} cannot be imported: {told(error)}{_extra(entry, error)}") from error
    return found if kind == "command" else _checked(kind, source, found)


def _import_file(path: Path) -> Any:
    if not path.is_file():
        raise FileNotFoundError(f"there is no file {path.resolve()}")
    resolved = path.resolve()
    name = "jackfield_file_" + re.sub(r"\W", "_", str(resolved.with_suffix("")))
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, resolved)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _extra(entry: Entry | None, error: BaseException) -> str:
    """How to install the extra of a plugin's distribution that holds the module whose absence is the error; empty where none does."""
    if entry and isinstance(error, ModuleNotFoundError) and error.name:
        missing = error.name.split(".")[0].replace("_", "-").lower()
        for requirement in distribution(entry.distribution).requires or ():
            extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", requirement)
            if extra and requirement.lower().replace("_", "-").startswith(missing):
                return f"; install it with: pip install '{entry.distribution}[{extra[1]}]'"
    return ""


def _checked(kind: str, source: str, found: Any) -> Any:
    from jackfield import algorithm, components

    api = getattr(found, "api", JACKFIELD_API)
    if not OLDEST_API <= api <= JACKFIELD_API:
        spoken = f"{source} needs plugin API {api}, this jackfield speaks {OLDEST_API} to {JACKFIELD_API}"
        raise PluginError(f"{spoken}: upgrade {'jackfield' if api > JACKFIELD_API else 'the plugin'}")
    bases = [*vars(components).values(), algorithm.Algorithm]
    base = next((c for c in bases if isinstance(c, type) and issubclass(c, components.Component) and getattr(c, "kind", "") == kind), None)
    if base is None or (kind == "reward" and not isinstance(found, type)):
        return found
    if not (isinstance(found, type) and issubclass(found, base)):
        raise PluginError(f"{source} is {found!r}, no {base.__name__}: derive it from jackfield.{base.__name__}")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise PluginError(f"{source} lacks the method{'s' * (len(missing) > 1)} {', '.join(missing)} that every {kind} has")
    return found


def build(kind: str, spec: ComponentSpec) -> Any:
    """A component from its spec, its options validated. A plain function named as a reward becomes reward `function`."""
    from pydantic import ValidationError

    from jackfield import components as C
    from jackfield.config import explain

    found = load(kind, spec.name)
    options = spec.options
    if kind == "reward" and not isinstance(found, type):
        found, options = load(kind, "function"), {"function": spec.name, **options}
    if not (isinstance(found, type) and issubclass(found, C.Component)):
        if options:
            raise PluginError(f"{kind} {spec.name!r} takes no options, but got {', '.join(options)}: derive it from jackfield.Component")
        arguments: tuple[Any, ...] = ()
    else:
        try:
            arguments = (found.Config(**options),)
        except ValidationError as error:
            raise explain(error, found.Config, f"{kind} {spec.name!r}", spec) from error
    try:
        return found(*arguments) if isinstance(found, type) else found
    except JackfieldError:
        raise
    except Exception as error:
        raise PluginError(f"{kind} {spec.name!r} cannot be built: {told(error)}") from error

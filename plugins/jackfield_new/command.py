"""The command `jackfield new`."""

from __future__ import annotations

import keyword
import re
from pathlib import Path
from string import Template

import click

from jackfield import __version__, registry
from jackfield.errors import ConfigError

USES = {
    "algorithm": "algorithm={name}",
    "backend": "policy.backend={name}",
    "engine": "engine={name}",
    "rollout": "rollout={name}",
    "reward": "'rewards=[{name}]'",
    "dataset": "dataset={name}",
    "launcher": "launcher={name}",
    "transport": "transport={name}",
    "tracker": "'trackers=[{name}]'",
    "hooks": "-p {name}",
    "command": "",
}
"""How a config is told to use a plugin of the kind."""

FILES = {
    "pyproject.toml": "pyproject.tmpl",
    "README.md": "readme.tmpl",
    ".github/workflows/test.yml": "ci.tmpl",
    "{package}/plugin.py": "{kind}.tmpl",
    "tests/test_{module}.py": "{kind}_tests.tmpl",
}


@click.command("new")
@click.argument("kind", type=click.Choice(registry.KINDS))
@click.argument("name")
@click.option("--out", default=".", type=click.Path(file_okay=False), help="Folder to put it in; default: here.")
@click.option("--single", is_flag=True, help="One file NAME.py, to be named as NAME.py:Class in a config.")
def new(kind: str, name: str, out: str, single: bool) -> None:
    """Make a plugin of KIND called NAME: a package that installs, with tests that pass; or one file."""
    words = values(kind, name)
    if single:
        target = Path(out) / f"{words['module']}.py"
        write(target, render(f"{kind}.tmpl", words))
        chosen = f"{target}:{words['Class']}"
        click.echo(f"{target}\ntry it: jackfield train config.yaml {USES[kind].format(name=chosen)}")
        return
    if taken := next((entry for entry in registry.entries(kind) if entry.name == name), None):
        raise ConfigError(f"{kind} {name!r} is a plugin of {taken.distribution}, and two of one name clash: choose another name")
    folder = Path(out) / words["dist"]
    if folder.exists():
        raise ConfigError(f"{folder} exists already: choose another name, or --out another folder")
    for target, template in FILES.items():
        write(folder / target.format(**words), render(template.format(**words), words))
    write(folder / words["package"] / "__init__.py", f'"""{words["title"]} for jackfield."""\n')
    write(folder / words["package"] / "py.typed", "")
    click.echo(f"{folder}\nnext: pip install -e '{folder}[test]' && python -m pytest {folder}")
    click.echo(f"then: jackfield train config.yaml {words['use']}")


def values(kind: str, name: str) -> dict[str, str]:
    """What the templates speak of. Raises ConfigError for a name that is no name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or keyword.iskeyword(name):
        near = re.sub(r"\W+", "_", name.lower()).strip("_")
        hint = f"try {near!r}" if re.fullmatch(r"[a-z][a-z0-9_]*", near) and not keyword.iskeyword(near) else "start it with a letter"
        raise ConfigError(f"{name!r} cannot be a plugin's name (lower-case letters, digits and _): {hint}")
    major, minor = (int(part) for part in __version__.split(".")[:2])
    camel = "".join(part.capitalize() for part in name.split("_"))
    return {
        "kind": kind,
        "name": name,
        "module": name,
        "Class": name if kind == "command" else camel,
        "title": f"{'Hook plugin' if kind == 'hooks' else kind.capitalize()} {name}",
        "dist": f"jackfield-{name.replace('_', '-')}",
        "package": f"jackfield_{name}",
        "version": f"{major}.{minor}",
        "next": f"{major}.{minor + 2}" if major == 0 else f"{major + 1}",
        "use": USES[kind].format(name=name),
    }


def render(template: str, words: dict[str, str]) -> str:
    """A template with its words filled in; the templates lie beside this file."""
    return Template((Path(__file__).parent / template).read_text()).substitute(words)


def write(path: Path, text: str) -> None:
    """A new file; never over an old one."""
    if path.exists():
        raise ConfigError(f"{path} exists already: choose another name, or --out another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

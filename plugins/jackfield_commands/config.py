"""`jackfield config`: every field with its value, its source and its meaning; the JSON schema for editors."""

from __future__ import annotations

import json
from typing import Any

import click


@click.command("config")
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1)
@click.option("--schema", "as_schema", is_flag=True, help="Print the JSON schema, for editors; with CONFIG also its plugins' settings.")
def show_config(config: str | None, overrides: tuple[str, ...], as_schema: bool) -> None:
    """Show every field with its value, where it comes from and what it means."""
    from jackfield.config import RunConfig, load_config, load_raw
    from jackfield_commands.schema import schema

    values = load_config(config, overrides) if config else None
    if as_schema:
        click.echo(json.dumps(schema(values), indent=1))
        return
    named = load_raw(config) if config else {}
    changed = {item.split("=", 1)[0] for item in overrides}
    _show(RunConfig, values, named, changed, "")


def _show(model: Any, values: Any, named: Any, changed: set[str], prefix: str) -> None:
    for name, field in model.model_fields.items():
        path, value = f"{prefix}{name}", getattr(values, name, None) if values is not None else field.get_default(call_default_factory=True)
        kinds = [getattr(k, "__origin__", k) for k in (field.annotation, *getattr(field.annotation, "__args__", ()))]
        inner = next((k for k in kinds if hasattr(k, "model_fields")), None)
        mentioned = isinstance(named, dict) and name in named
        if inner is not None and not isinstance(value, list) and inner.__name__ not in ("ComponentSpec", "ModelConfig", "Ramp"):
            click.echo(f"{path}:  # {field.description}")
            _show(inner, value, named.get(name) if mentioned else None, changed, f"{path}.")
            continue
        source = "override" if any(c == path or c.startswith(f"{path}.") for c in changed) else "file" if mentioned else "default"
        shown = value if not hasattr(value, "options") else {"name": getattr(value, "name", None), **getattr(value, "options", {})}
        click.echo(f"{path} = {'(required)' if field.is_required() and values is None else shown}  [{source}]  # {field.description}")

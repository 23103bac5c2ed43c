"""The command line. Nothing here imports torch until a command needs it."""

from __future__ import annotations

import json
import sys
from typing import Any

import click

from jackfield import __version__, registry
from jackfield.errors import JackfieldError


class Commands(click.Group):
    """Built-in commands and those of entry-point group `jackfield.command`, imported when invoked."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names; nothing is imported."""
        return sorted({*super().list_commands(ctx), *(e.name for e in registry.entries("command"))})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        found = super().get_command(ctx, cmd_name)
        if found is None and any(e.name == cmd_name for e in registry.entries("command")):
            loaded: click.Command = registry.load("command", cmd_name)
            return loaded
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names with their help; a plugin's command shows its distribution, so that help imports nothing."""
        own = {n: (super(Commands, self).get_command(ctx, n)) for n in super().list_commands(ctx)}
        rows = [(n, c.get_short_help_str()) for n, c in own.items() if c]
        rows += [(e.name, f"(from {e.target.partition(':')[0]})") for e in registry.entries("command")]
        with formatter.section("Commands"):
            formatter.write_dl(sorted(rows))


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jackfield")
def app() -> None:
    """Reinforcement-learning post-training of language models that nobody has to fork."""


@app.command()
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("-p", "plugins", multiple=True, metavar="NAME", help="Add hook plugin NAME for this run; no:NAME leaves one out.")
@click.option("--trace-hooks", is_flag=True, help="End with the time spent in each plugin's hooks.")
def train(config: str, overrides: tuple[str, ...], plugins: tuple[str, ...], trace_hooks: bool) -> None:
    """Train as CONFIG says; OVERRIDES are field.subfield=value."""
    from jackfield.config import load_config

    settings = load_config(config, overrides, plugins)
    from jackfield.trainer import Trainer

    run = Trainer(settings).train()
    history = [json.loads(line) for line in (run.dir / "metrics.jsonl").read_text().splitlines()]
    if history:
        first, last = history[: max(len(history) // 10, 1)], history[-max(len(history) // 10, 1) :]
        means = [sum(row["reward"] for row in rows) / len(rows) for rows in (first, last)]
        click.echo(f"reward: {means[0]:.3f} in the first tenth of {len(history)} steps, {means[1]:.3f} in the last")
    click.echo(f"run folder: {run.dir}")
    if trace_hooks:
        for (plugin, hook), seconds in sorted(run.manager.seconds.items(), key=lambda item: -item[1]):
            click.echo(f"{seconds:10.3f} s  {hook:16s} {plugin}")


@app.command()
@click.argument("run_folder")
@click.argument("out")
@click.option("--step", type=int, help="Checkpoint of this step; default: the newest.")
def export(run_folder: str, out: str, step: int | None) -> None:
    """Write the policy of a run's checkpoint as a Hugging Face folder OUT."""
    from pathlib import Path

    from jackfield import checkpoint
    from jackfield.config import RunConfig

    found = {folder.name: folder for folder in checkpoint.complete(Path(run_folder))}
    name = f"step-{step:08d}" if step is not None else max(found, default="")
    if name not in found:
        raise JackfieldError(f"{run_folder} has no checkpoint {name or 'at all'}; it has: {', '.join(found) or 'none'}")
    if Path(out).exists():
        raise JackfieldError(f"{out} exists already: name a new folder")
    settings = RunConfig.model_validate_json((Path(run_folder) / "config.json").read_text())
    from jackfield.trainer import Trainer

    Trainer(settings).export(found[name], Path(out))
    click.echo(f"exported {name} to {out}")


@app.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.argument("kind", required=False)
def plugins(as_json: bool, kind: str | None) -> None:
    """List installed plugins, of one KIND or of all, from metadata alone."""
    if kind and kind not in registry.KINDS:
        raise JackfieldError(f"there is no kind {kind!r}: choose from {', '.join(registry.KINDS)}")
    found = [e for k in ([kind] if kind else registry.KINDS) for e in registry.entries(k)]
    if as_json:
        fields = ("kind", "name", "target", "distribution", "version")
        click.echo(json.dumps([{f: getattr(e, f) for f in fields} for e in found], indent=1))
        return
    names = [(e.kind, e.name) for e in found]
    for e in found:
        clash = f"  (clash: say {e.distribution}/{e.name})" if names.count((e.kind, e.name)) > 1 else ""
        click.echo(f"{e.kind:10s} {e.name:24s} {e.distribution} {e.version}  {e.target}{clash}")


@app.command("config")
@click.argument("config", required=False)
@click.argument("overrides", nargs=-1)
@click.option("--schema", is_flag=True, help="Print the JSON schema, for editors.")
def show_config(config: str | None, overrides: tuple[str, ...], schema: bool) -> None:
    """Show every field with its value, where it comes from and what it means."""
    from jackfield.config import RunConfig, load_config, load_raw

    if schema:
        click.echo(json.dumps(RunConfig.model_json_schema(), indent=1))
        return
    values = load_config(config, overrides) if config else None
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


def main() -> None:
    """Entry point: errors of ours are one line and exit code 2."""
    try:
        app(standalone_mode=False)
    except JackfieldError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except click.exceptions.Exit as error:
        sys.exit(error.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except (click.Abort, KeyboardInterrupt):
        sys.exit(130)

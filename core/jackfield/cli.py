"""The command line. Nothing here imports torch until a command needs it."""

from __future__ import annotations

import json
import sys

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
        plugin = any(e.name == cmd_name for e in registry.entries("command"))
        return super().get_command(ctx, cmd_name) or (registry.load("command", cmd_name) if plugin else None)

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

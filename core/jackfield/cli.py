"""The command line. Nothing here imports torch until a command needs it."""

from __future__ import annotations

import sys
from typing import cast

import click

from jackfield import __version__, registry
from jackfield.errors import JackfieldError, PluginError


class Commands(click.Group):
    """The commands of entry-point group `jackfield.command`, each imported when it is invoked, and all of them for help."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All names; nothing is imported."""
        return sorted({e.name for e in registry.entries("command")})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command, imported."""
        return cast(click.Command, registry.load("command", cmd_name)) if cmd_name in self.list_commands(ctx) else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Names with the first line of their help, or with why it cannot be had."""
        rows = []
        for name in self.list_commands(ctx):
            try:
                rows.append((name, registry.load("command", name).get_short_help_str(90)))
            except PluginError as error:
                rows.append((name, str(error)))
        with formatter.section("Commands"):
            formatter.write_dl(rows)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="jackfield")
def app() -> None:
    """Reinforcement-learning post-training of language models that nobody has to fork."""


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

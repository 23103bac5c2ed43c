"""`jackfield check CONFIG`."""

from __future__ import annotations

import click


@click.command("check")
@click.argument("config")
@click.argument("overrides", nargs=-1)
@click.option("--gpus", type=int, help="Workers that the launcher will have; default: its `workers`, or what the roles name.")
@click.option("--gpu-memory", type=float, help="GiB of each GPU; default: this host's GPU, if it has one. What does not fit is an error.")
def command(config: str, overrides: tuple[str, ...], gpus: int | None, gpu_memory: float | None) -> None:
    """Show which role of CONFIG runs where and whether it fits: workers, layouts, memory. Nothing is started."""
    from jackfield.config import load_config
    from jackfield_check.report import report

    for line in report(load_config(config, overrides), gpus, gpu_memory):
        click.echo(line)

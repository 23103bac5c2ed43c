"""The command `jackfield report`."""

from __future__ import annotations

from pathlib import Path

import click

from jackfield.errors import DataError
from jackfield_report.page import page
from jackfield_report.reading import read


@click.command("report")
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="File to write; default: report.html in the run's folder.")
def report(run_folder: Path, out: Path | None) -> None:
    """Write one self-contained HTML page about RUN_FOLDER: curves, where the time went, samples."""
    record = read(run_folder)
    target = out or run_folder / "report.html"
    try:
        target.write_text(page(record), encoding="utf-8")
    except OSError as error:
        raise DataError(f"{target} cannot be written: {error.strerror}; name another file with --out") from error
    click.echo(f"wrote {target}")

"""`jackfield export`: a checkpoint's policy as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import click

from jackfield.errors import CheckpointError, DataError


@click.command()
@click.argument("run_folder", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path))
@click.option("--step", type=int, help="Checkpoint of this step; default: the newest.")
def export(run_folder: Path, out: Path, step: int | None) -> None:
    """Write the policy of a run's checkpoint as a Hugging Face folder OUT."""
    from jackfield import checkpoint
    from jackfield.config import RunConfig
    from jackfield.roles import Role
    from jackfield.trainer import Trainer

    if not run_folder.is_dir():
        raise CheckpointError(f"{run_folder} is no folder: give the run's own, which holds checkpoints/ (`dir` in its config)")
    found = {folder.name: folder for folder in checkpoint.complete(run_folder)}
    name = f"step-{step:08d}" if step is not None else max(found, default="")
    if name not in found:
        raise CheckpointError(f"{run_folder} has no checkpoint {name or 'at all'}; it has: {', '.join(found) or 'none'}")
    if out.exists():
        raise DataError(f"{out} exists already: name a new folder")
    try:
        config = RunConfig.model_validate_json((found[name] / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{found[name]} has no readable config.json ({' '.join(str(error).split())}): export another step") from error
    trainer = Trainer(config)
    try:
        policy = Role("policy", trainer.launcher.start(trainer.config, ["policy"])["policy"], trainer.config)
        policy.load(found[name] / "policy")
        out.mkdir(parents=True)
        policy.export(out)
    finally:
        trainer.launcher.stop()
    if trainer.run.tokenizer is not None:
        trainer.run.tokenizer.save_pretrained(out)
    click.echo(f"exported {name} to {out}")

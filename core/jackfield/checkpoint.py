"""Checkpoints that are complete or absent: written beside, then renamed. A killed run resumes to the same trajectory (law 29)."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import platform
import random
import shutil
from pathlib import Path
from typing import TextIO

import torch

from jackfield.errors import CheckpointError, ConfigError
from jackfield.run import Run


def claim(run_dir: Path) -> TextIO:
    """Make the run's folder and keep other processes out of it until the file is closed; what a killed run left half written goes.

    Raises ConfigError where another process is in it. The kernel frees the lock when its process ends, killed or not; processes forked
    from it do not hold it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / "lock").open("a+")
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        holder = (run_dir / "lock").read_text()
        raise ConfigError(f"{run_dir} is in use by a live run, {holder}: choose another dir, or end that run first") from error
    except OSError as error:
        raise ConfigError(f"{run_dir} cannot be used as the run's folder ({error}): choose another dir") from error
    for stale in (run_dir / "checkpoints").glob(".partial-*"):
        shutil.rmtree(stale)
    lock.truncate(0)
    print(f"process {os.getpid()} on {platform.node()}", end="", file=lock, flush=True)
    return lock


def save(run: Run) -> Path:
    """Write `checkpoints/step-N` and drop all but the newest `checkpoint.keep`. Raises CheckpointError; nothing half written stays."""
    home = run.dir / "checkpoints"
    final, partial = home / f"step-{run.step:08d}", home / f".partial-{run.step:08d}"
    if final.exists():
        return final
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name in ("policy", "critic"):
            if hasattr(run, name):
                getattr(run, name).save(partial / name)
        run.hook.checkpoint_save(run=run, folder=partial)
        torch.save({"torch": torch.get_rng_state(), "python": random.getstate()}, partial / "rng.pt")
        state = {"step": run.step, "drawn": run.prompts.drawn, "algorithm": run.algorithm.state_dict()}
        (partial / "run.json").write_text(json.dumps(state, indent=1))
        _sync_to_disk(partial)
        partial.rename(final)
        _sync_to_disk(home)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        cause = " ".join(str(error).split()) or type(error).__name__
        raise CheckpointError(f"checkpoint {final} cannot be written: {cause}; the earlier ones are untouched") from error
    for old in complete(run.dir)[: -run.config.checkpoint.keep]:
        shutil.rmtree(old)
    return final


def complete(run_dir: Path) -> list[Path]:
    """The run's complete checkpoints, oldest first."""
    return sorted((run_dir / "checkpoints").glob("step-*"))


def load(run: Run, folder: Path) -> None:
    """Restore the run from a checkpoint. Raises CheckpointError."""
    try:
        state = json.loads((folder / "run.json").read_text())
        run.step, run.prompts.drawn = state["step"], state["drawn"]
        run.hook.checkpoint_load(run=run, folder=folder)
        rng = torch.load(folder / "rng.pt", weights_only=False)
        for name in ("policy", "critic"):
            if hasattr(run, name):
                getattr(run, name).load(folder / name)
        run.algorithm.load_state_dict(state["algorithm"])
        torch.set_rng_state(rng["torch"])
        random.setstate(rng["python"])
    except (OSError, ValueError, KeyError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        why = " ".join(str(error).split())
        raise CheckpointError(f"{folder} is no readable checkpoint: {why}; remove it to resume from the one before it") from error


def _sync_to_disk(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

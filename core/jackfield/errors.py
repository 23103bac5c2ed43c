"""Errors that a user or a plugin author can act on: one line naming the culprit, the cause and the way out."""

from __future__ import annotations

import difflib
import sysconfig
import traceback
from collections.abc import Iterable
from pathlib import Path


class JackfieldError(Exception):
    """Base of every error raised on purpose; the command line prints it on one line and exits with code 2."""


class ConfigError(JackfieldError):
    """A configuration names something that does not exist or does not fit together."""


class PluginError(JackfieldError):
    """A plugin cannot be found, imported or registered, or one of its hooks raised."""


class DataError(JackfieldError):
    """Input data or a model folder is missing, empty or corrupt."""


class CheckpointError(JackfieldError):
    """A checkpoint cannot be written or read."""


class WorkerError(JackfieldError):
    """A worker or engine died or raised; carries the rank and the worker's own traceback."""


class ScoreError(Exception):
    """Why one sample has no score: a reward may return it in the score's place. Its text is shown as the traceback."""


class JackfieldRemovedIn1Warning(DeprecationWarning):
    """Something of the public surface goes with release 1.0; `@typing_extensions.deprecated("use ...", category=...)` gives it."""


def nearest(name: str, known: Iterable[str], otherwise: str, *, most: int = 1, cutoff: float = 0.6) -> str:
    """`did you mean ...?` with up to `most` known names that a mistyped one is near to; `otherwise` where none is."""
    near = difflib.get_close_matches(name, sorted(set(known)), n=most, cutoff=cutoff)
    return f"did you mean {' or '.join(map(repr, near))}?" if near else otherwise


def told(error: BaseException) -> str:
    """A foreign exception on one line: its type, its text, and the innermost line of code that is neither the core's nor installed."""
    roots = (*(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib")), str(Path(__file__).parent), "<")
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(roots)]
    where = f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
    return " ".join(f"{type(error).__name__}: {error}".split()) + where

"""Taking something out of the public surface, over two minor releases (docs/api-policy.md)."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


class JackfieldDeprecationWarning(DeprecationWarning):
    """Something of the public surface will go; the message names the release and what to use."""


class JackfieldRemovedIn1Warning(JackfieldDeprecationWarning):
    """It goes with release 1.0."""


def warn(old: str, new: str, category: type[JackfieldDeprecationWarning] = JackfieldRemovedIn1Warning, *, stacklevel: int = 3) -> None:
    """Warn the caller's caller that `old` goes; `new` says what to use."""
    release = "1.0" if category is JackfieldRemovedIn1Warning else "a later release"
    warnings.warn(f"{old} is deprecated and goes with jackfield {release}: use {new}", category, stacklevel=stacklevel)


def deprecated(new: str, category: type[JackfieldDeprecationWarning] = JackfieldRemovedIn1Warning) -> Callable[[F], F]:
    """Decorator of a function that goes."""

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            warn(f"{function.__module__}.{function.__qualname__}", new, category)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate

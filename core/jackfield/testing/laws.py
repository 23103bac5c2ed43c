"""Which law a failing conformance test stands for."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

Class = TypeVar("Class", bound=type)


def says_which_law(cls: Class) -> Class:
    """Class decorator: whatever a `test_` method raises carries the method's docstring, which names the law, as a note."""
    for name, method in list(vars(cls).items()):
        if name.startswith("test_") and inspect.isfunction(method):
            note = f"what is broken: {' '.join((method.__doc__ or name).split())}"
            drawn = getattr(method, "hypothesis", None)
            if drawn is not None:
                drawn.inner_test = _noting(drawn.inner_test, note)
            else:
                setattr(cls, name, _noting(method, note))
    return cls


def _noting(method: Callable[..., Any], note: str) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            error.add_note(note)
            raise

    return call

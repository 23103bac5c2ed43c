"""What a plugin is, in words: its settings with types, defaults and documentation, its hooks, where its code is."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from jackfield.hookspecs import Hooks


@dataclass(frozen=True)
class Field:
    """One setting."""

    path: str
    """Dotted name."""
    type: str
    default: str
    """As YAML would have it; "required" where there is none."""
    doc: str


def type_name(annotation: Any) -> str:
    """A type as a reader of a config understands it: `float or {start, end, steps, shape}`."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return type_name(args[0])
    if origin is Literal:
        return " or ".join(str(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(type_name(a) for a in args))
    if annotation is type(None):
        return "null"
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        return "plugin" if annotation.__name__.endswith("Spec") else "{" + ", ".join(annotation.model_fields) + "}"
    if origin is not None:
        inner = ", ".join(dict.fromkeys(type_name(a) for a in args if a is not Ellipsis))
        return f"{'map' if origin is dict else 'list'} of {inner}"
    return str(getattr(annotation, "__name__", annotation)).replace("Path", "path").replace("str", "text")


def _default(value: Any) -> str:
    if value is PydanticUndefined:
        return "required"
    if isinstance(value, BaseModel):
        return str(getattr(value, "name", None) or value.model_dump())
    if isinstance(value, list | tuple):
        return f"[{', '.join(_default(v) for v in value)}]"
    return {None: "null", True: "true", False: "false"}.get(value, str(value)) if isinstance(value, bool | None) else str(value)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[Field]:
    """Every setting of a config, nested ones after the one that holds them; chosen plugins have settings of their own, not listed."""
    for name, field in model.model_fields.items():
        path, doc = f"{prefix}{name}", " ".join((field.description or "").split())
        default = field.get_default(call_default_factory=True)
        inner = default if isinstance(default, BaseModel) else field.annotation
        nested = inner if inspect.isclass(inner) else type(inner)
        if issubclass(nested, BaseModel) and not nested.__name__.endswith("Spec"):
            yield Field(path, "section", "", doc)
            yield from fields(nested, f"{path}.")
        else:
            yield Field(path, type_name(field.annotation), _default(default), doc)


def hooks(plugin: Any) -> list[str]:
    """Hooks that a class or object implements, with what changes their order."""
    found = []
    for name in sorted(dir(plugin)):
        options = getattr(inspect.getattr_static(plugin, name, None), "jackfield_impl", None)
        if options:
            marks = [m for m in ("wrapper", "tryfirst", "trylast", "optionalhook") if options.get(m)]
            found.append((options.get("specname") or name) + (f" ({', '.join(marks)})" if marks else ""))
    order = list(vars(Hooks))
    return sorted(found, key=lambda h: order.index(h.split(" ")[0]) if h.split(" ")[0] in order else len(order))


def where(thing: Any) -> str:
    """`file:line` of a class or function."""
    try:
        return f"{inspect.getsourcefile(thing)}:{inspect.getsourcelines(thing)[1]}"
    except (TypeError, OSError):
        return "?"

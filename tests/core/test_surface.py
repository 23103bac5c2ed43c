"""The public surface changes only on purpose: names and signatures against a committed list (docs/api-policy.md).

After a wanted change: python tests/core/test_surface.py, and a fragment in changelog.d/.
"""

import inspect
import warnings
from pathlib import Path

import pytest
from typing_extensions import deprecated

import jackfield
from jackfield import testing
from jackfield.errors import JackfieldRemovedIn1Warning
from jackfield.hookspecs import Hooks

SNAPSHOT = Path(__file__).with_name("public_surface.txt")


def _signature(thing) -> str:
    try:
        parameters = inspect.signature(thing).parameters.values()
    except (TypeError, ValueError):
        return ""
    words = []
    for p in parameters:
        mark = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        words.append(f"{mark}{p.name}" + ("" if p.default is p.empty else "=") + (" kw" if p.kind is p.KEYWORD_ONLY else ""))
    return f"({', '.join(words)})"


def surface() -> list[str]:
    lines = [f"hook {name}{_signature(spec)}" for name, spec in vars(Hooks).items() if not name.startswith("_")]
    for module in (jackfield, testing):
        for name in module.__all__:
            thing = getattr(module, name)
            where = f"{module.__name__}.{name}"
            if not inspect.isclass(thing):
                lines.append(where + (_signature(thing) if callable(thing) else ""))
                continue
            lines.append(where)
            for member, value in sorted(vars(thing).items()):
                if member.startswith("_") and member not in ("__len__", "__getitem__"):
                    continue
                function = value.__func__ if isinstance(value, staticmethod | classmethod) else value
                if inspect.isfunction(function) and not member.startswith("test_"):
                    lines.append(f"{where}.{member}{_signature(function)}")
                elif isinstance(value, property):
                    lines.append(f"{where}.{member} property")
            lines += [f"{where}.{field} field" for field in sorted(getattr(thing, "model_fields", {}))]
    return lines


def test_the_public_surface_is_as_written_down():
    wanted = SNAPSHOT.read_text().splitlines()
    found = surface()
    gone, new = [x for x in wanted if x not in found], [x for x in found if x not in wanted]
    assert not gone, f"gone or changed: {gone}; the policy asks for two releases of warning first (docs/api-policy.md)"
    assert not new, f"new: {new}; say so in changelog.d/, and run python {Path(__file__).name} to write it down"


def test_deprecation_names_release_and_way_out():
    @deprecated("old_way goes with jackfield 1.0: use jackfield.new_way", category=JackfieldRemovedIn1Warning)
    def old_way(x):
        return x + 1

    with pytest.warns(JackfieldRemovedIn1Warning, match=r"goes with jackfield 1.0: use jackfield.new_way") as caught:
        assert old_way(1) == 2
    assert caught[0].filename == __file__, "the warning must point at the caller"
    with warnings.catch_warnings():
        warnings.simplefilter("error", JackfieldRemovedIn1Warning)
        with pytest.raises(JackfieldRemovedIn1Warning):
            old_way(1)


if __name__ == "__main__":
    SNAPSHOT.write_text("\n".join(surface()) + "\n")

"""What the tree itself must keep to: sizes, shelves, contracts, and no word about the machine it was written on."""

import ast
import io
import re
import subprocess
import tokenize
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHELVES = ("core", "plugins", "algorithms", "parallel")
CORE_BUDGET = 1800
FILE_LIMIT = 420


def tracked(*patterns: str) -> list[Path]:
    """Files under version control, or all files where there is no git (an unpacked sdist)."""
    try:
        out = subprocess.run(["git", "ls-files", "-z", "-co", "--exclude-standard", *patterns], cwd=ROOT, capture_output=True, check=True)
        names = [ROOT / n for n in out.stdout.decode().split("\0") if n]
    except (OSError, subprocess.CalledProcessError):
        names = [p for pattern in patterns or ("*",) for p in ROOT.rglob(pattern) if ".venv" not in p.parts]
    return [p for p in names if p.is_file()]


def code_lines(source: str) -> int:
    """Lines that hold code: not blank, not only a comment, not part of a docstring (also those under fields)."""
    strings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        for child in getattr(node, "body", []) if isinstance(getattr(node, "body", []), list) else []:
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant) and isinstance(child.value.value, str):
                strings.update(range(child.lineno, child.end_lineno + 1))
    silent = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in silent:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def test_code_lines_counts_code_alone():
    source = '"""Doc\nstring."""\n\n# comment\nclass A:\n    """Doc."""\n\n    x: int = 1  # why\n    """Field."""\n    y = """two\n"""\n'
    assert code_lines(source) == 4


def test_core_stays_within_its_budget():
    files = [p for p in tracked("core/jackfield/*.py") if "testing" not in p.parts]
    sizes = {str(p.relative_to(ROOT)): code_lines(p.read_text()) for p in files}
    assert len(sizes) > 15
    total = sum(sizes.values())
    assert total <= CORE_BUDGET, f"core has {total} lines of code, {CORE_BUDGET} are allowed: move something into a plugin ({sizes})"


def test_files_stay_readable():
    sizes = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in tracked("*.py")}
    long = {name: n for name, n in sizes.items() if n > FILE_LIMIT}
    assert sizes
    assert not long, f"files over {FILE_LIMIT} lines, split them: {long}"


def test_shelves_are_no_packages():
    assert [shelf for shelf in SHELVES if (ROOT / shelf / "__init__.py").exists()] == []
    packages = {p.parent.name for shelf in SHELVES for p in (ROOT / shelf).glob("*/__init__.py")}
    assert "jackfield" in packages
    assert all(name == "jackfield" or name.startswith("jackfield_") for name in packages), packages
    typed = [name for name in packages if not list(ROOT.glob(f"*/{name}/py.typed"))]
    assert typed == [], f"packages without py.typed: {typed}"


def test_every_package_is_under_the_import_contracts():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    packages = {p.parent.name for shelf in SHELVES for p in (ROOT / shelf).glob("*/__init__.py")}
    assert set(settings["root_packages"]) == packages
    layers = next(c for c in settings["contracts"] if c["type"] == "layers")["layers"]
    assert {name.strip() for layer in layers for name in layer.split("|")} == packages


def test_entry_points_exist():
    points = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    missing = []
    for group, names in points.items():
        for name, target in names.items():
            module, _, attribute = target.partition(":")
            path = module.replace(".", "/")
            files = [f for shelf in SHELVES for f in (ROOT / shelf / f"{path}.py", ROOT / shelf / path / "__init__.py") if f.is_file()]
            defined = attribute and files and re.search(rf"\b{re.escape(attribute.split('.')[0])}\b", files[0].read_text())
            if not files or (attribute and not defined):
                missing.append(f"{group}:{name} -> {target}")
    assert missing == []


MACHINE = re.compile(r"/(?:work|opt|root|farm|tmp)/|/(?:home|Users)/\w")
HOSTS = re.compile(r"pypi\.org|pythonhosted\.|registry\.npm|deb\.debian\.|download\.pytorch\.")


@pytest.mark.parametrize(("what", "pattern"), [("machine path", MACHINE), ("registry host", HOSTS)])
def test_nothing_names_this_machine(what, pattern):
    found = []
    for path in tracked():
        if path.suffix in (".safetensors", ".png", ".parquet", ".gguf", ".bin") or path == Path(__file__).resolve():
            continue
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1):
            if pattern.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == [], f"{what} in the tree: {found}"

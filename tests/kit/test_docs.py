"""Documentation is held to the code."""

import importlib.util
import re
from pathlib import Path

import pytest

from jackfield.config import RunConfig
from jackfield.registry import KINDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def site():
    spec = importlib.util.spec_from_file_location("site_tool", ROOT / "docs" / "tools" / "site.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_hook_is_documented_under_its_exact_signature(site):
    pages = site.generated()
    for name in site.hook_names():
        page = pages[f"hooks/{name}.md"]
        assert f"def {site.signature(name)}" in page
        assert len(page.split("```\n")[1].strip()) > 20, f"hook {name} has no description"
        for argument in re.findall(r"\w+", site.signature(name).split("(")[1]):
            assert f"| `{argument}` | " in page, f"argument {argument} of {name} is not explained"


def test_each_hook_has_a_test(site):
    text = "\n".join(p.read_text() for p in (ROOT / "tests").rglob("*.py"))
    missing = [n for n in site.hook_names() if not re.search(rf"def {n}\(self|[\"']{n}[\"']", text)]
    assert missing == []


def test_each_kind_has_a_page(site):
    pages = site.generated()
    assert all(f"jackfield.{kind}" in pages[f"components/{kind}.md"] for kind in KINDS)
    assert "| `forward_backward(micro_batches, loss)` | yes |" in pages["components/backend.md"]


def test_the_types_that_methods_name_are_explained(site):
    import inspect

    from jackfield import Algorithm, components

    page = site.generated()["components/types.md"]
    bases = [Algorithm, *(c for c in vars(components).values() if inspect.isclass(c) and getattr(c, "kind", None))]
    hints = " ".join(str(inspect.signature(f)) for base in bases for f in vars(base).values() if inspect.isfunction(f))
    named = {
        w
        for w in re.findall(r"[A-Z]\w+", hints)
        if w not in ("Any", "Sequence", "Iterator", "Iterable", "Path", "Tensor", "None", "ClassVar")
    }
    configs = {"ModelConfig", "OptimizerConfig", "SamplingConfig", "RunConfig", "Schedule"}  # in the reference of the config
    own = {base.__name__ for base in bases} | {"Loss", "WorkerGroup"}
    assert {n for n in named - configs - own if f"## {n}\n" not in page} == set()
    assert "| `loss_mask` | `Tensor` | bool [B, T]: tokens to train on" in page


def test_each_field_is_in_the_reference_with_its_meaning(site):
    page = site.generated()["config.md"]
    for name in RunConfig.model_fields:
        assert f"| `{name}` |" in page
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    assert all(line.rstrip("| ").split("|")[-1].strip() for line in rows), "a field has no meaning"
    assert len(rows) <= 150, "a config of more than 150 fields is too large to read"


def test_each_kind_of_error_is_in_the_catalogue():
    from jackfield import errors

    page = (ROOT / "docs" / "errors.md").read_text()
    kinds = [n for n, k in vars(errors).items() if isinstance(k, type) and issubclass(k, Exception) and n != "JackfieldError"]
    assert len(kinds) >= 7
    assert [n for n in kinds if f"| `{n}` |" not in page] == []


def test_links_between_pages_lead_somewhere(site):
    pages = set(site.generated()) | {p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*") if p.is_file()}
    lost = []
    for path in (p for p in (ROOT / "docs").rglob("*.md") if "tools" not in p.parts):
        for target in re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", path.read_text()):
            resolved = (path.parent / target).resolve()
            if not resolved.is_relative_to(ROOT / "docs") or resolved.relative_to(ROOT / "docs").as_posix() not in pages:
                lost.append(f"{path.name}: {target}")
    assert lost == []


def test_the_changelog_can_be_assembled(tmp_path):
    spec = importlib.util.spec_from_file_location("changelog_tool", ROOT / "docs" / "tools" / "changelog.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "changelog.d").mkdir()
    (tmp_path / "changelog.d" / "core.md").write_text("- One thing.\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## Unreleased\n\n### old\n\n- Gone.\n\n## 0.1.0\n\n- First.\n")
    assert module.assemble(tmp_path) == "# Changelog\n\n## Unreleased\n\n### core\n\n- One thing.\n\n## 0.1.0\n\n- First.\n"


def test_the_readmes_runs_have_folders_of_their_own():
    """A run resumes from what is in its folder: another algorithm in the quickstart's is an error."""
    lines = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("jackfield train") and "algorithm=" in line]
    folders = re.findall(r"dir=(\S+)", "\n".join(lines))
    assert len(lines) >= 2
    assert len(set(folders)) == len(lines)


def test_listings_that_pages_name_exist():
    from click.testing import CliRunner

    from jackfield_commands.plugins import plugins

    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    named = {words for page in pages for words in re.findall(r"`jackfield plugins ([a-z_ ]+)`", page.read_text())}
    assert {"algorithm", "show fork"} <= named
    for words in named:
        result = CliRunner().invoke(plugins, words.split())
        assert result.exit_code == 0, f"jackfield plugins {words}: {result.exception}"

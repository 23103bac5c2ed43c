"""Put the fragments of changelog.d/ (one file an area, bullets inside) under "Unreleased" in CHANGELOG.md, area by area."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def assemble(root: Path = ROOT) -> str:
    """CHANGELOG.md with its "Unreleased" section rebuilt from the fragments; older sections are left as they are."""
    head, _, rest = (root / "CHANGELOG.md").read_text().partition("## Unreleased")
    _, found, older = rest.partition("\n## ")
    parts = [f"### {path.stem}\n\n{path.read_text().strip()}\n" for path in sorted((root / "changelog.d").glob("*.md"))]
    return f"{head}## Unreleased\n\n" + "\n".join(parts) + (f"\n## {older}" if found else "")


if __name__ == "__main__":
    text = assemble()
    (ROOT / "CHANGELOG.md").write_text(text)

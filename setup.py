"""Every folder in SHELVES holds import packages; metadata is in pyproject.toml."""

from setuptools import find_packages, setup

SHELVES = ("core", "plugins", "algorithms", "parallel")
PACKAGES = {name: f"{shelf}/{name.replace('.', '/')}" for shelf in SHELVES for name in find_packages(shelf)}

setup(
    packages=list(PACKAGES),
    package_dir=PACKAGES,
    package_data={"": ["py.typed", "*.pyi", "*.yaml", "*.html", "*.json", "*.tmpl"]},
)

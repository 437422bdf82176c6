"""The map of the code in CONTRIBUTING.md is complete, and its paths exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGES = ("implicit_blocks", "trainer")


def paths(text: str) -> list[str]:
    """Return the files and folders in code spans."""
    return re.findall(r"`([\w./]+(?:/|\.py|\.md|\.yml))`", text)


def section(package: str) -> str:
    """Return the part of the map about a package."""
    return TEXT.partition(f"### {package}: ")[2].partition("\n### ")[0]


def exists(path: str, line: str) -> bool:
    """Return whether a path exists from the root, a package, or the folder that its table row is about."""
    folders = [ROOT, *(ROOT / package for package in PACKAGES), ROOT / "tools" / "docs", ROOT / "benchmarks"]
    row = re.match(r"\| `([\w/]+/)`", line)
    folders += [folder / row[1] for folder in folders[1:3]] if row else []
    return any((folder / path).exists() for folder in folders)


def test_paths_in_contributing_exist() -> None:
    missing = [path for line in TEXT.splitlines() for path in paths(line) if not exists(path, line)]
    missing = [path for path in missing if "NAME" not in path]  # a placeholder
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_has_every_folder_of_a_package(package: str) -> None:
    present = {f"{path.parent.name}/" for path in (ROOT / package).glob("*/__init__.py")}
    assert present <= set(paths(section(package)))

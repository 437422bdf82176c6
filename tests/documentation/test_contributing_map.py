"""The map of the code in CONTRIBUTING.md is complete; its walks name the files that are passed."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
PACKAGES = ("implicit_blocks", "trainer")
ENUMERATED = (
    "implicit_blocks/search",
    "implicit_blocks/models",
    "implicit_blocks/registry",
    "implicit_blocks/serving",
    "implicit_blocks/weights",
    "trainer/run",
)
"""The folders whose row of the map names their modules."""


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


@pytest.mark.parametrize("row", ENUMERATED)
def test_the_map_names_every_module_of_an_enumerated_folder(row: str) -> None:
    package, folder = row.split("/")
    rows = [line for line in section(package).splitlines() if line.startswith(f"| `{folder}/`")]
    named = {path for line in rows for path in paths(line)}
    modules = {path.name for path in (ROOT / row).glob("*.py")} - {"__init__.py"}
    assert modules - named == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_the_map_names_every_module_at_the_root_of_a_package(package: str) -> None:
    modules = {path.name for path in (ROOT / package).glob("*.py")} - {"__init__.py"}
    assert modules - set(paths(section(package))) == set()


def entered(python: Any, action: str, first: str) -> list[str]:
    """Return the files that an action enters, in order, beginning with the function ``first``.

    What a training step records of the step before it follows at the end.
    """
    done = python.run([str(ROOT / "tools" / "structure.py"), "--files", action], cwd=ROOT, timeout=600)
    assert done.returncode == 0, done.stderr
    visits = re.findall(r"^ *\d+ ([\w/]+\.py): (.*)$", done.stdout, re.MULTILINE)
    begin = next(place for place, (_, functions) in enumerate(visits) if first in functions.split(", "))
    return list(dict.fromkeys(path for path, _ in visits[begin:] + visits[:begin]))


@pytest.mark.parametrize(
    ("title", "action", "first"),
    [
        ("Life of a training step", "step", "Loop._one_step"),
        ("From a YAML file to a model", "build", "load_spec"),
    ],
)
def test_a_walk_names_every_file_entered_in_order(python: Any, title: str, action: str, first: str) -> None:
    """In a new process, since earlier imports and caches change which files are entered."""
    walk = paths(TEXT.partition(f"### {title}\n")[2].partition("\n## ")[0].partition("\n### ")[0])
    files = entered(python, action, first)
    named = [
        next((place for place, path in enumerate(walk) if f"/{file}".endswith(f"/{path}")), None)
        for file in files
    ]
    assert [file for file, place in zip(files, named, strict=True) if place is None] == []
    order = [file for _, file in sorted(zip(named, files, strict=True))]
    assert order == files

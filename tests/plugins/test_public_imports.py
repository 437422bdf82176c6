"""Plugins import only from the public modules that ``docs/plugins.md`` lists."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import implicit_blocks as ib
from implicit_blocks.registry.scaffold import FAMILIES, PluginNames
from implicit_blocks.registry.scaffold.writing import render

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (ROOT / "plugins", Path(__file__).parent / "distributions")

PAGE = (ROOT / "docs" / "plugins.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("## Public modules\n")[2].partition("\n## ")[0]
CELLS = re.findall(r"^\| (`.*?) \|", TABLE, re.MULTILINE)
PUBLIC_MODULES = tuple(module for cell in CELLS for module in re.findall(r"`([\w.]+)`", cell))
"""The modules that plugins may import from, as the page on plugins lists them."""


def sources() -> Iterator[tuple[str, str]]:
    """Yield (name, text) of every Python file of the plugins, and of what ``new-plugin`` writes."""
    for folder in FOLDERS:
        for path in sorted(folder.rglob("*.py")):
            if not {"build", "dist"} & set(path.parts):
                yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for family in FAMILIES:
        for name, text in render(PluginNames("acme_thing", family)).items():
            if name.endswith(".py"):
                yield f"new-plugin --family {family}: {name}", text


def imports(text: str) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield (line, module, names) of every import from the library or the trainer."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found = [(node.module, tuple(alias.name for alias in node.names))]
        elif isinstance(node, ast.Import):
            found = [(alias.name, ()) for alias in node.names]
        else:
            continue
        for module, names in found:
            if module.partition(".")[0] in ("implicit_blocks", "trainer"):
                yield node.lineno, module, names


def test_the_page_names_only_public_classes() -> None:
    found = set(re.findall(r"`ib\.(\w+)`", PAGE))
    assert {"Solver", "DepthSpec", "Start"} < found
    assert all(hasattr(ib, name) for name in found - {"NAME"}), found


def test_plugins_import_only_from_public_modules() -> None:
    found = [
        f"{name}:{line} imports from {module}"
        for name, text in sources()
        for line, module, _ in imports(text)
        if module not in PUBLIC_MODULES
    ]
    assert not found, "\n".join(found)


def test_plugins_import_names_and_no_modules() -> None:
    """``from implicit_blocks import search`` imports a module, which may not be public."""
    found = [
        f"{name}:{line} imports {module}.{imported}"
        for name, text in sources()
        for line, module, names in imports(text)
        for imported in names
        if imported.startswith("_") or is_module(f"{module}.{imported}")
    ]
    assert not found, "\n".join(found)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("module", PUBLIC_MODULES)
def test_a_public_module_exists_and_is_documented(module: str) -> None:
    assert importlib.import_module(module).__doc__

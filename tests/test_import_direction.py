"""Imports go down: no module imports from a package of a higher layer.

Imports for type checkers only (``if TYPE_CHECKING``) may point anywhere; imports inside functions may not.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From top to bottom. A package may import from its own row and from rows below it. A module belongs to the
# longest entry that matches the beginning of its name. Modules that match no entry are not checked; an entry
# for a package that does not exist has no effect.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("trainer.experiments",),
    ("trainer",),
    ("implicit_blocks.serving", "implicit_blocks.decoding", "implicit_blocks.hf"),
    ("implicit_blocks.models",),
    ("implicit_blocks.mixers", "implicit_blocks.gradients", "implicit_blocks.search"),
    ("implicit_blocks.solvers", "implicit_blocks.ops"),
)

# Beside the layers: every layer may import from these packages, and they import from no layer.
BESIDE: tuple[str, ...] = ("implicit_blocks.specs", "implicit_blocks.registry")


def height(module: str) -> int | None:
    """Return the height of a module's layer: 0 beside the layers, 1 at the bottom; None outside the table."""
    heights = dict.fromkeys(BESIDE, 0)
    for number, packages in enumerate(reversed(LAYERS), 1):
        heights |= dict.fromkeys(packages, number)
    matches = [package for package in heights if f"{module}.".startswith(f"{package}.")]
    return heights[max(matches, key=len)] if matches else None


def upward_imports(structure: Any, modules: Mapping[str, Path], root: Path) -> list[str]:
    """Return ``file:line imports module: upward`` for each import from a higher layer."""
    found = []
    for name in modules:
        own = height(name)
        for imported in structure.find_imports(name, modules) if own is not None else ():
            other = height(imported.module)
            if other is not None and other > own:
                place = f"{imported.path.relative_to(root)}:{imported.line}"
                found.append(f"{place} imports {imported.module}: upward")
    return found


@pytest.fixture
def structure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``tools/structure.py``, which parses imports."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("structure")


def test_no_module_imports_from_a_higher_layer(structure: Any) -> None:
    upward = upward_imports(structure, structure.find_modules(ROOT), ROOT)
    assert not upward, "\n".join(upward)


@pytest.mark.parametrize(
    ("module", "source", "line", "imported"),
    [
        ("implicit_blocks.solvers", "import implicit_blocks.models.implicit\n", 1, "models.implicit"),
        ("implicit_blocks.ops", "from implicit_blocks.models import implicit\n", 1, "models.implicit"),
        ("implicit_blocks.mixers", "def f():\n    from implicit_blocks.models import LM\n", 2, "models"),
        ("implicit_blocks.specs", "from ..solvers import picard\n", 1, "solvers.picard"),
    ],
    ids=["module", "name of a module", "in a function", "beside the layers"],
)
def test_an_upward_import_is_named_with_its_place(
    structure: Any, tmp_path: Path, module: str, source: str, line: int, imported: str
) -> None:
    write(tmp_path, "implicit_blocks.models.implicit", "")
    write(tmp_path, "implicit_blocks.solvers.picard", "")
    path = write(tmp_path, f"{module}.offender", source)
    assert upward_imports(structure, structure.find_modules(tmp_path), tmp_path) == [
        f"{path.relative_to(tmp_path)}:{line} imports implicit_blocks.{imported}: upward"
    ]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("implicit_blocks.models", "from implicit_blocks.solvers import picard\n"),
        ("implicit_blocks.ops", "from implicit_blocks.solvers import picard\n"),
        ("implicit_blocks.unlisted", "from implicit_blocks.models import implicit\n"),
        (
            "implicit_blocks.ops",
            "import typing\nif typing.TYPE_CHECKING:\n    from implicit_blocks.models import implicit\n",
        ),
    ],
    ids=["a lower layer", "the same layer", "outside the table", "for type checkers"],
)
def test_imports_that_are_not_upward_are_accepted(
    structure: Any, tmp_path: Path, module: str, source: str
) -> None:
    write(tmp_path, "implicit_blocks.models.implicit", "")
    write(tmp_path, "implicit_blocks.solvers.picard", "")
    write(tmp_path, f"{module}.importer", source)
    assert upward_imports(structure, structure.find_modules(tmp_path), tmp_path) == []


def write(root: Path, module: str, source: str) -> Path:
    """Write a module and the ``__init__`` files of its packages; return its path."""
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    for package in path.relative_to(root).parents[:-1]:
        (root / package / "__init__.py").touch()
    path.write_text(source, encoding="utf-8")
    return path

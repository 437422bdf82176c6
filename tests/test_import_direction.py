"""Imports go down: no module of the library or the trainer imports from a higher layer.

Imports for type checkers only (``if TYPE_CHECKING``) may point anywhere; imports inside functions may not.
``from implicit_blocks import Name`` is an import of the module that defines ``Name``.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]

# From top to bottom. A module may import from its own row and from the rows below it. A module belongs to the
# longest entry that is its name or a package around it; "implicit_blocks" stands for its ``__init__`` alone,
# whose names are lazy, so that no module of the library imports the package itself.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("trainer.experiments",),
    ("trainer",),
    ("implicit_blocks", "implicit_blocks.__main__"),
    ("implicit_blocks.serving",),
    (
        "implicit_blocks.decoding",
        "implicit_blocks.hf",
        "implicit_blocks.analysis",
        "implicit_blocks.describing",
        "implicit_blocks.testing",
    ),
    ("implicit_blocks.models",),
    ("implicit_blocks.fixed_point",),
    (
        "implicit_blocks.mixers",
        "implicit_blocks.mlps",
        "implicit_blocks.injections",
        "implicit_blocks.gradients",
        "implicit_blocks.search",
    ),
    ("implicit_blocks.parallel", "implicit_blocks.layers", "implicit_blocks.weights", "implicit_blocks.cuda"),
    (
        "implicit_blocks.solvers",
        "implicit_blocks.exits",
        "implicit_blocks.ops",
        "implicit_blocks.starts",
        "implicit_blocks.depths",
        "implicit_blocks.scalings",
    ),
    ("implicit_blocks.interfaces", "implicit_blocks.solution", "implicit_blocks.windows"),
    ("implicit_blocks.checkpoints",),
    ("implicit_blocks.specs", "implicit_blocks.registry"),
    ("implicit_blocks._utils", "implicit_blocks.cuda.host_copy"),  # the copy needs torch alone
)

# Upward imports that exist, as (module, imported module). Remove an entry with its import; add none.
KNOWN_UPWARD: frozenset[tuple[str, str]] = frozenset(
    {
        # load_model reads a transformers folder through hf; such folders are one of its three sources.
        ("implicit_blocks.checkpoints.load_model", "implicit_blocks.hf.folders"),
        # load_spec accepts a run folder, whose spec checkpoints.find locates.
        ("implicit_blocks.specs.loading", "implicit_blocks.checkpoints.find"),
    }
)


def layer(module: str) -> int | None:
    """Return the height of a module's layer, 0 at the bottom; None for a module of no layer."""
    heights = {entry: number for number, row in enumerate(reversed(LAYERS)) for entry in row}
    around = [module.rsplit(".", dots)[0] for dots in range(module.count(".") + 1)]
    found = next((entry for entry in around if entry in heights), None)
    return None if found is None or (found == "implicit_blocks" != module) else heights[found]


def upward_imports(structure: Any, modules: Mapping[str, Path], root: Path) -> dict[tuple[str, str], str]:
    """Return (module, imported module) of each import from a higher layer, with its place in words."""
    found = {}
    for name in modules:
        own = layer(name)
        for imported in structure.find_imports(name, modules) if own is not None else ():
            other = layer(imported.module)
            if other is not None and other > own:
                place = f"{imported.path.relative_to(root)}:{imported.line}"
                found[name, imported.module] = f"{place} imports {imported.module}: upward"
    return found


@pytest.fixture
def structure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return ``tools/structure.py``, which parses imports."""
    monkeypatch.syspath_prepend(str(ROOT / "tools"))
    return importlib.import_module("structure")


def test_every_module_of_the_library_and_the_trainer_belongs_to_a_layer(structure: Any) -> None:
    modules = structure.find_modules(ROOT)
    project = [name for name in modules if name.split(".")[0] in ("implicit_blocks", "trainer")]
    assert len(project) > 200
    assert [name for name in project if layer(name) is None] == []


def test_no_module_imports_from_a_higher_layer(structure: Any) -> None:
    upward = upward_imports(structure, structure.find_modules(ROOT), ROOT)
    new = [place for pair, place in upward.items() if pair not in KNOWN_UPWARD]
    assert not new, "\n".join(new)


def test_every_known_upward_import_still_exists(structure: Any) -> None:
    upward = upward_imports(structure, structure.find_modules(ROOT), ROOT)
    assert sorted(KNOWN_UPWARD - upward.keys()) == [], "remove these entries of KNOWN_UPWARD"


@pytest.mark.parametrize(
    ("module", "source", "line", "imported"),
    [
        ("implicit_blocks.solvers", "import implicit_blocks.models.implicit\n", 1, "models.implicit"),
        ("implicit_blocks.ops", "from implicit_blocks.models import implicit\n", 1, "models.implicit"),
        ("implicit_blocks.mixers", "def f():\n    from implicit_blocks.models import LM\n", 2, "models"),
        ("implicit_blocks.specs", "from ..solvers import picard\n", 1, "solvers.picard"),
        ("implicit_blocks.solvers", "from implicit_blocks import ImplicitLM\n", 1, "models.implicit"),
    ],
    ids=["module", "name of a module", "in a function", "relative", "lazy name"],
)
def test_an_upward_import_is_reported_with_its_place(
    structure: Any, tmp_path: Path, module: str, source: str, line: int, imported: str
) -> None:
    write_library(tmp_path)
    path = write(tmp_path, f"{module}.offender", source)
    upward = upward_imports(structure, structure.find_modules(tmp_path), tmp_path)
    assert upward == {
        (f"{module}.offender", f"implicit_blocks.{imported}"): (
            f"{path.relative_to(tmp_path)}:{line} imports implicit_blocks.{imported}: upward"
        )
    }


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("implicit_blocks.models", "from implicit_blocks.solvers import picard\n"),
        ("implicit_blocks.ops", "from implicit_blocks.solvers import picard\n"),
        ("implicit_blocks.models", "from implicit_blocks import Picard\n"),
        (
            "implicit_blocks.ops",
            "import typing\nif typing.TYPE_CHECKING:\n    from implicit_blocks.models import implicit\n",
        ),
    ],
    ids=["a lower layer", "the same layer", "a lazy name of a lower layer", "for type checkers"],
)
def test_an_import_that_is_not_upward_is_accepted(
    structure: Any, tmp_path: Path, module: str, source: str
) -> None:
    write_library(tmp_path)
    write(tmp_path, f"{module}.importer", source)
    assert upward_imports(structure, structure.find_modules(tmp_path), tmp_path) == {}


def test_the_library_may_not_import_its_own_package(structure: Any, tmp_path: Path) -> None:
    write_library(tmp_path)
    write(tmp_path, "implicit_blocks.models.importer", "import implicit_blocks as ib\n")
    assert list(upward_imports(structure, structure.find_modules(tmp_path), tmp_path)) == [
        ("implicit_blocks.models.importer", "implicit_blocks")
    ]


def write_library(root: Path) -> None:
    """Write a model, a solver, and a package that exports both lazily."""
    write(root, "implicit_blocks.models.implicit", "class ImplicitLM: ...\n")
    write(root, "implicit_blocks.solvers.picard", "class Picard: ...\n")
    (root / "implicit_blocks" / "__init__.py").write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from implicit_blocks.models.implicit import ImplicitLM\n"
        "    from implicit_blocks.solvers.picard import Picard\n",
        encoding="utf-8",
    )


def write(root: Path, module: str, source: str) -> Path:
    """Write a module and the ``__init__`` files of its packages; return its path."""
    path = root.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    for package in path.relative_to(root).parents[:-1]:
        (root / package / "__init__.py").touch()
    path.write_text(source, encoding="utf-8")
    return path

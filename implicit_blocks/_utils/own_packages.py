"""The project's top-level packages, located beside this one: a user's files may have the same names.

`implicit_blocks`, `trainer` and `zoo` are installed together. Python searches the working directory first,
where a user's file ``trainer.py`` or folder ``zoo`` hides the installed package.
"""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
import warnings
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
"""The folder that contains the packages: a clone, or ``site-packages``."""


def load_own(package: str) -> None:
    """Import a package of this project, so that later imports of its name find it in any working directory.

    If another file or folder of that name comes first on Python's path, a `RuntimeWarning` names it, because
    ``python -m PACKAGE`` runs that one.

    Raises:
        ImportError: another module of that name has been imported already.

    """
    ours = ROOT / package / "__init__.py"
    if not ours.is_file():  # not installed: the import raises
        return
    if (loaded := sys.modules.get(package)) is not None:
        if not _is(getattr(loaded, "__file__", None), ours):
            raise ImportError(
                f"the name {package!r} is taken by {_place(loaded)}, which has been imported already and "
                f"hides the package {package!r} of implicit_blocks; rename that module",
                name=package,
            )
        return
    first = importlib.util.find_spec(package)
    if first is None or not _is(first.origin, ours):
        found = PathFinder.find_spec(package, [str(ROOT)])
        assert found is not None
        assert found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[package] = module
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[package]
            raise
    if first is not None and not _is(first.origin, ours):
        place = first.origin or ", ".join(first.submodule_search_locations or ())
        warnings.warn(
            f"{place} has the name of the package {package!r} of implicit_blocks: `python -m {package}` runs "
            f"that file here; use the program implicit-blocks or `python -P -m {package}`, or rename it",
            RuntimeWarning,
            stacklevel=2,
        )


def install_extra(extra: str) -> str:
    """Return the command that installs the packages of an extra, such as ``hf``.

    In a clone it installs the extra with the pinned versions. For an installed wheel it names the packages of
    the extra, as the wheel's metadata list them, so that it works wherever the wheel came from.
    """
    if (ROOT / "pyproject.toml").is_file() and (ROOT / "constraints.txt").is_file():
        return f"pip install -c '{ROOT / 'constraints.txt'}' -e '{ROOT}[{extra}]'"
    try:
        return f"pip install {' '.join(map(shlex.quote, _packages_of(extra)))}"
    except metadata.PackageNotFoundError:  # source files that were never installed
        return f"pip install -c constraints.txt -e '.[{extra}]' in a clone of the repository"


def _packages_of(extra: str) -> list[str]:
    """Return the requirements of an extra, with those of the extras that it names."""
    found: list[str] = []
    for line in metadata.requires("implicit_blocks") or ():
        if not (of_extra := re.search(rf"(?:;| and) *extra == ['\"]{extra}['\"]", line)):
            continue
        requirement = line[: of_extra.start()].strip()  # with the rest of its marker
        inner = re.fullmatch(r"implicit[_-]blocks\[([\w,-]+)\]", requirement)
        found += (
            [package for each in inner[1].split(",") for package in _packages_of(each)]
            if inner
            else [requirement]
        )
    return list(dict.fromkeys(found))


def _is(origin: str | None, ours: Path) -> bool:
    return origin is not None and Path(origin).resolve() == ours


def _place(module: ModuleType) -> str:
    folders = ", ".join(map(str, getattr(module, "__path__", ())))
    return getattr(module, "__file__", None) or folders or "a module"

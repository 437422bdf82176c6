"""Our own top-level packages, found beside this one and not by name: a user's files may have the same names.

`implicit_blocks`, `trainer` and `zoo` are installed together. Python looks for `trainer` and `zoo` in the
working directory first, where a file ``trainer.py`` or a folder ``zoo`` of the user's hides ours.
"""

from __future__ import annotations

import importlib.util
import sys
import warnings
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
"""The folder that our packages are installed in: a clone's, or ``site-packages``."""


def load_own(package: str) -> None:
    """Make ``import PACKAGE`` mean ours from now on, whatever the working directory holds.

    Where another file or folder of that name comes first on Python's path, a `RuntimeWarning` names it, since
    ``python -m PACKAGE`` runs that one.

    Raises:
        ImportError: a module of that name, not ours, has been imported already.

    """
    ours = ROOT / package / "__init__.py"
    if not ours.is_file():  # not installed, which importing it will say
        return
    if (loaded := sys.modules.get(package)) is not None:
        if not _is(getattr(loaded, "__file__", None), ours):
            raise ImportError(
                f"the name {package!r} is taken by {_place(loaded)}, which has been imported already and "
                f"hides the package {package!r} of implicit_blocks; rename it",
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
            f"that file here; rename it, or run `python -P -m {package}`",
            RuntimeWarning,
            stacklevel=2,
        )


def install_extra(extra: str) -> str:
    """Return the command that installs the packages of one of our extras, such as ``hf``.

    There is no index to install `implicit_blocks` from: extras are installed from the clone.
    """
    if (ROOT / "pyproject.toml").is_file() and (ROOT / "constraints.txt").is_file():
        return f"pip install -c '{ROOT / 'constraints.txt'}' -e '{ROOT}[{extra}]'"
    return f"pip install -c constraints.txt -e '.[{extra}]' in a clone of the repository"


def _is(origin: str | None, ours: Path) -> bool:
    return origin is not None and Path(origin).resolve() == ours


def _place(module: ModuleType) -> str:
    folders = ", ".join(map(str, getattr(module, "__path__", ())))
    return getattr(module, "__file__", None) or folders or "a module"

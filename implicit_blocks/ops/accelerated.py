"""Which optional packages are here: looked for once, a failure said once, with its reason."""

from __future__ import annotations

import importlib
import logging
import warnings
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType

import torch

_LOG = logging.getLogger(__name__)

MOST_IN_GRID = 65_535
"""What the second and the third number of a kernel's grid reach; only the first goes further."""


class MissingPackageError(ImportError, ValueError):
    """A package that was asked for by name is not there; says how to get it."""


_FOUND: dict[str, ModuleType | str] = {}


def available(module: str) -> bool:
    """Whether a module can be used. A compiler asks once, while it traces, and takes the answer as given."""
    found: bool = _loads(module)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _loads(module: str) -> bool:
    return not isinstance(load(module), str)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def load(module: str) -> ModuleType | str:
    """Import a module; return it, or the reason why it can't be used."""
    if module not in _FOUND:
        _FOUND[module] = _import(module)
    return _FOUND[module]


def _import(module: str) -> ModuleType | str:
    try:
        with warnings.catch_warnings():  # what a package warns of itself is no reason to do without it
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        reason = f"{error.name or module} is not installed"
    except Exception as error:  # compiled packages that don't fit fail in any way at all
        reason = f"importing {module} failed: {type(error).__name__}: {error}"
    if torch.cuda.is_available():
        _LOG.info("%s is not used: %s", module, reason)
    return reason


def require(module: str, *, package: str) -> ModuleType:
    """Import a module that was asked for by name; ``package`` is what to install.

    Raises:
        MissingPackageError: saying what is missing and how to get it. It is an ImportError and a ValueError.

    """
    found: ModuleType | str = load(module)
    if isinstance(found, str):
        raise MissingPackageError(f"{found}; {how_to_get(package)}")
    return found


def how_to_get(package: str) -> str:
    """Say how a package is installed."""
    built = {"mamba-ssm", "causal-conv1d", "flash-attn"}
    how = f"pip install --no-build-isolation {package}, built for your card" if package in built else ""
    return f"install it ({how or f'pip install {package}'}; docs/backends.md)"


PACKAGES = {
    "mamba-ssm": "mamba_ssm.ops.triton.ssd_combined",
    "causal-conv1d": "causal_conv1d",
    "fla-core": "fla.ops.simple_gla",
    "flash-attn": "flash_attn",
    "xformers": "xformers.ops",
    "triton": "triton",
}


def report() -> dict[str, str]:
    """Return, for each package that the operators know, its version or why it is not used.

    For records of a run: on a machine without a GPU nothing is imported, and every package says so. That a
    package is there does not say that anything ran with it; `implicit_blocks.ops.backends.report` does.
    """
    if not torch.cuda.is_available():
        return dict.fromkeys(PACKAGES, "not used: no GPU")
    found = {package: load(module) for package, module in PACKAGES.items()}
    return {
        package: f"not used: {module}" if isinstance(module, str) else metadata.version(package)
        for package, module in found.items()
    }


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it untyped
def fla_backward_is_wrong() -> bool:
    """Whether fla-core refuses to differentiate scans with one decay a head.

    With this card and this compiler their values would be wrong: Hopper, and Triton from 3.4 to before 3.7.1.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9:
        return False
    version = tuple(int(part) for part in metadata.version("triton").split("+")[0].split(".")[:3])
    return (3, 4) <= version < (3, 7, 1) and find_spec("tilelang") is None

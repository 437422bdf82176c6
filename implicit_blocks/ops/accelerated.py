"""Optional packages: each is imported once, and a failure is logged once with its reason."""

from __future__ import annotations

import importlib
import logging
import warnings
from importlib import metadata
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

_LOG = logging.getLogger(__name__)

MOST_IN_GRID = 65_535
"""The maximum of the second and third dimension of a kernel's grid; the first one may be larger."""


class MissingPackageError(ImportError, ValueError):
    """A package that was requested by name is not installed; the message says how to install it."""


_FOUND: dict[str, ModuleType | str] = {}


def available(module: str) -> bool:
    """Whether a module can be imported; a compiler treats the result as a constant."""
    found: bool = _loads(module)
    return found


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]  # torch leaves it untyped
def _loads(module: str) -> bool:
    return not isinstance(load(module), str)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def load(module: str) -> ModuleType | str:
    """Import a module; return it, or the reason why it cannot be used."""
    if module not in _FOUND:
        _FOUND[module] = _import(module)
    return _FOUND[module]


def _import(module: str) -> ModuleType | str:
    try:
        with warnings.catch_warnings():  # warnings of the package itself are irrelevant here
            warnings.simplefilter("ignore")
            return importlib.import_module(module)
    except ModuleNotFoundError as error:
        reason = f"{error.name or module} is not installed"
    except Exception as error:  # incompatible compiled packages raise any exception
        reason = f"importing {module} failed: {type(error).__name__}: {error}"
    if torch.cuda.is_available():
        _LOG.info("%s is not used: %s", module, reason)
    return reason


def package_refuses(x: Tensor, documents_BL: Tensor | None) -> str:
    """Return why no package's kernels support these inputs of a scan or a convolution, or ""."""
    if not x.is_cuda:
        return "its kernels require a GPU"
    if x.dtype == torch.float64:
        return "its kernels do not support float64"
    return "" if documents_BL is None else "it supports one document per row"


def require(module: str, *, package: str) -> ModuleType:
    """Import a module that was requested by name; ``package`` installs it.

    Raises:
        MissingPackageError: the module cannot be imported. It is an ImportError and a ValueError.

    """
    found: ModuleType | str = load(module)
    if isinstance(found, str):
        raise MissingPackageError(f"{found}; {how_to_get(package)}")
    return found


def how_to_get(package: str) -> str:
    """Return how to install a package."""
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

    For the records of a run. Without a GPU nothing is imported, and every entry says so. An installed package
    has not necessarily been used; `implicit_blocks.ops.backends.report` lists what ran.
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

    It does on Hopper GPUs with Triton 3.4 up to, but not including, 3.7.1, where gradients would be wrong.
    """
    if torch.version.hip is not None or torch.cuda.get_device_capability()[0] != 9:
        return False
    version = tuple(int(part) for part in metadata.version("triton").split("+")[0].split(".")[:3])
    return (3, 4) <= version < (3, 7, 1) and find_spec("tilelang") is None

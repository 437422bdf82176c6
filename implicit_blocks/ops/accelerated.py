"""Which accelerated packages are here: looked for once, a failure said once, with its reason."""

from __future__ import annotations

import importlib
import logging
from importlib import metadata
from types import ModuleType

import torch

_LOG = logging.getLogger(__name__)


_FOUND: dict[str, ModuleType | str] = {}


def available(module: str) -> bool:
    """Whether an accelerated module can be used."""
    if (
        module not in _FOUND
    ):  # a dictionary, which a compiler sees through; it must not trace the import itself
        load(module)
    return not isinstance(_FOUND[module], str)


@torch.compiler.disable  # type: ignore[untyped-decorator]  # torch leaves it untyped
def load(module: str) -> ModuleType | str:
    """Import an accelerated module; return it, or the reason why it can't be used."""
    if module not in _FOUND:
        _FOUND[module] = _import(module)
    return _FOUND[module]


def _import(module: str) -> ModuleType | str:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        reason = f"{error.name or module} is not installed"
    except Exception as error:  # compiled packages that don't fit fail in any way at all
        reason = f"importing {module} failed: {type(error).__name__}: {error}"
    if torch.cuda.is_available():
        _LOG.info("plain PyTorch in place of %s: %s", module, reason)
    return reason


def require(module: str, *, package: str) -> ModuleType:
    """Import an accelerated module that was asked for by name.

    Raises:
        ImportError: saying what is missing and how to get it.

    """
    found: ModuleType | str = load(module)
    if isinstance(found, str):
        raise ImportError(f"{found}; install {package} for your card (pip install 'implicit_blocks[cuda]')")
    return found


PACKAGES = {
    "mamba-ssm": "mamba_ssm.ops.triton.ssd_combined",
    "causal-conv1d": "causal_conv1d",
    "triton": "triton",
}


def report() -> dict[str, str]:
    """Return, for each package that the operators use where it is there, its version or why it is not used.

    For records of a run: on a machine without a GPU nothing is imported, and every package says so.
    """
    if not torch.cuda.is_available():
        return dict.fromkeys(PACKAGES, "not used: no GPU")
    found = {package: load(module) for package, module in PACKAGES.items()}
    return {
        package: f"not used: {module}" if isinstance(module, str) else metadata.version(package)
        for package, module in found.items()
    }

"""Implicit sequence models: fixed points of state-space and attention layers, made of interchangeable parts.

The public names are listed in ``__init__.pyi``. They are imported on first use, so that specs can be read and
validated without torch.
"""

from __future__ import annotations

from importlib import metadata
from typing import Any

from implicit_blocks._utils.lazy import names_of_stub

_public_name = names_of_stub(__name__)


def __getattr__(name: str) -> Any:
    if name != "__version__":
        return _public_name(name)
    try:
        return metadata.version("implicit_blocks")
    except metadata.PackageNotFoundError:  # source files that were never installed
        return "unknown"


def __dir__() -> list[str]:
    return list(_public_name("__all__"))

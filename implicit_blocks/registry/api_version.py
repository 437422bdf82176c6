"""Which plugin interfaces this library works with, and how what is to go is announced. Imports no torch.

The policy is in CONTRIBUTING.md: ``MAJOR.MINOR``; the minor number counts additions, the major one breaks. A
plugin states the interface that it was written for as ``api_version = "1.0"`` in the module that its entry
point names; one that states none is taken to have been written for the first.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import warnings
from pathlib import Path
from typing import Any

from implicit_blocks.registry.hooks import API_VERSION

OLDEST_API_VERSION = "1.0"
"""The oldest interface that still works; those between it and the present major number are deprecated."""


class PluginDeprecationWarning(DeprecationWarning):
    """A plugin relies on something that a later version of the library will not have."""


def check_api_version(stated: Any, plugin: str) -> None:
    """Refuse a plugin for an interface that this library doesn't have; warn of one that is about to go.

    Args:
        stated: what the plugin says, ``"1.0"``; None: nothing.
        plugin: its name.

    Raises:
        ValueError: it is for another interface, or what it says is no version; says what to install.

    """
    if stated is None:
        stated = "1.0"
    wanted = _numbers(stated)
    if wanted is None:
        raise ValueError(
            f'its api_version is {stated!r}; write MAJOR.MINOR as a string, api_version = "{API_VERSION}"'
        )
    ours, oldest = _numbers(API_VERSION), _numbers(OLDEST_API_VERSION)
    assert ours is not None
    assert oldest is not None
    if wanted > ours:
        raise ValueError(
            f"it was written for plugin interface {stated}, this implicit_blocks has {API_VERSION}; "
            "install a newer implicit_blocks, or an older version of the plugin"
        )
    if wanted < oldest:
        raise ValueError(
            f"it was written for plugin interface {stated}, this implicit_blocks has {API_VERSION} and works "
            f"with {OLDEST_API_VERSION} at the oldest; install a newer version of the plugin, or an older "
            "implicit_blocks"
        )
    if wanted[0] < ours[0]:
        deprecated(
            f"plugin {plugin!r} was written for plugin interface {stated}",
            instead=f"install a version of it for {API_VERSION}",
        )


def deprecated(what: str, *, instead: str) -> None:
    """Warn that something will be gone with the next major plugin interface.

    Args:
        what: the plugin, method or argument, and whose it is.
        instead: what to do.

    """
    goes = int(API_VERSION.partition(".")[0]) + 1
    warnings.warn(
        f"{what}; this stops working with plugin interface {goes}.0: {instead}",
        PluginDeprecationWarning,
        stacklevel=3,
    )


def stated_api_version(module: str) -> str | None:
    """Read ``api_version = "…"`` from a module's source without running it; None where there is none."""
    try:
        if "." in module:  # finding it would import what it is in
            return None
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None or not found.origin.endswith(".py"):
            return None
        tree = ast.parse(Path(found.origin).read_bytes())
    except (OSError, ValueError, SyntaxError, ImportError):
        return None  # importing it will say what is wrong
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "api_version" for target in targets):
            value = node.value  # type: ignore[attr-defined]  # targets are those of an Assign
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def _numbers(version: Any) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    return (int(match[1]), int(match[2])) if match else None

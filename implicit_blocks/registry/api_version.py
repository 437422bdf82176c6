"""The supported versions of the plugin interface, and deprecation warnings. Imports no torch.

The policy is in CONTRIBUTING.md: ``MAJOR.MINOR``; the minor number counts additions, the major one breaking
changes. A plugin states the version that it was written for as ``api_version = "1.0"`` in the module of its
entry point; without it, the first version is assumed.
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
"""The oldest supported version; versions between it and the current major version are deprecated."""


class PluginDeprecationWarning(DeprecationWarning):
    """A plugin uses something that a later version of the library removes."""


def check_api_version(stated: Any, plugin: str) -> None:
    """Reject a plugin for an unsupported version of the plugin interface; warn about a deprecated version.

    Args:
        stated: the version that the plugin states, ``"1.0"``; None: none.
        plugin: its name.

    Raises:
        ValueError: the version is not supported or malformed; says what to install.

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
            f"it was written for plugin interface {stated}, this implicit_blocks supports "
            f"{OLDEST_API_VERSION} to {API_VERSION}; install a newer version of the plugin, or an older "
            "implicit_blocks"
        )
    if wanted[0] < ours[0]:
        deprecated(
            f"plugin {plugin!r} was written for plugin interface {stated}",
            instead=f"install a version of it for {API_VERSION}",
        )


def deprecated(what: str, *, instead: str) -> None:
    """Warn that the next major version of the plugin interface removes something.

    Args:
        what: the plugin, method or argument, and its owner.
        instead: what to use instead.

    """
    goes = int(API_VERSION.partition(".")[0]) + 1
    warnings.warn(
        f"{what}; this stops working with plugin interface {goes}.0: {instead}",
        PluginDeprecationWarning,
        stacklevel=3,
    )


def stated_api_version(module: str) -> str | None:
    """Return ``api_version = "…"`` from a module's source without running it; None if it has none."""
    try:
        if "." in module:  # finding it would import its parent package
            return None
        found = importlib.util.find_spec(module)
        if found is None or found.origin is None or not found.origin.endswith(".py"):
            return None
        tree = ast.parse(Path(found.origin).read_bytes())
    except (OSError, ValueError, SyntaxError, ImportError):
        return None  # importing it will report the problem
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "api_version" for target in targets):
            value = node.value  # type: ignore[attr-defined]  # targets are those of an Assign
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def _numbers(version: Any) -> tuple[int, int] | None:
    match = re.fullmatch(r"(\d+)\.(\d+)", version) if isinstance(version, str) else None
    return (int(match[1]), int(match[2])) if match else None

"""The hook through which components register, built-ins and third parties alike.

A plugin is a module with functions marked `hookimpl`, named by an entry point of group `implicit_blocks`::

    @implicit_blocks.hookimpl
    def register_components(add):
        add("mixer", ShiftSpec, Shift)

Run specs in a directory ``zoo`` of the module's package are found by name, after those of the shipped zoo.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import pluggy

GROUP = "implicit_blocks"
"""The entry-point group, and the project name for pluggy."""

API_VERSION = "1.0"
"""The version of the plugin interface: the names that plugins import from `implicit_blocks`, the hook, the
contracts of `interfaces.py` and the base specs. A plugin's module may state the version that it was written
for, ``api_version = "1.0"``; CONTRIBUTING.md defines when it is raised."""

Builder = Callable[..., Any] | str
"""What builds a component from its spec: a callable ``builder(spec, **context)``, or its import string,
``"package.module:Name"`` or ``"package.module:Class.method"``, with which registering imports no torch."""

_F = TypeVar("_F", bound=Callable[..., Any])


class _Marker(Protocol):
    """pluggy's decorators without arguments: they return the function."""

    def __call__(self, function: _F, /) -> _F: ...


class Add(Protocol):
    """The function that a plugin registers with; called once per kind."""

    def __call__(self, family: str, spec_class: type[Any], builder: Builder) -> None:
        """Register a spec class, under the default of its ``kind``, and its builder in a family."""


hookspec: _Marker = pluggy.HookspecMarker(GROUP)
hookimpl: _Marker = pluggy.HookimplMarker(GROUP)
"""The decorator of a plugin's ``register_components``."""


@hookspec
def register_components(add: Add) -> None:
    """Call ``add`` for every kind that the plugin provides.

    All of a plugin's kinds are registered, or none: an error raised here, or a kind that is taken, rejects
    the whole plugin and does not affect other plugins.
    """

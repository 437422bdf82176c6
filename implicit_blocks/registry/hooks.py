"""The hook through which components register, built-ins and third parties alike.

A plugin is a module with functions marked `hookimpl`, named by an entry point of group `implicit_blocks`::

    @implicit_blocks.hookimpl
    def register_components(add):
        add("mixer", ShiftSpec, Shift)

Run specs in a folder ``zoo`` of the module's package are found by name, behind those of the library's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import pluggy

GROUP = "implicit_blocks"
"""The entry-point group, and pluggy's name of the project."""

API_VERSION = "1.0"
"""The plugin interface of this library: what is imported from `implicit_blocks` by plugins, the hook, the
contracts of `interfaces.py` and the base specs. A plugin's module may name the one that it was written for,
``api_version = "1.0"``; CONTRIBUTING.md says when it is raised."""

Builder = Callable[..., Any] | str
"""What makes a component from its spec: a callable ``builder(spec, **context)``, or where to import one,
``"package.module:Name"`` or ``"package.module:Class.method"``, so that registering imports nothing heavy."""

_F = TypeVar("_F", bound=Callable[..., Any])


class _Marker(Protocol):
    """pluggy's markers, used bare: they give back the function they mark."""

    def __call__(self, function: _F, /) -> _F: ...


class Add(Protocol):
    """What a plugin is handed to register with: one call for each kind."""

    def __call__(self, family: str, spec_class: type[Any], builder: Builder) -> None:
        """Register a spec class, the default of whose ``kind`` names it, and its builder in a family."""


hookspec: _Marker = pluggy.HookspecMarker(GROUP)
hookimpl: _Marker = pluggy.HookimplMarker(GROUP)
"""The decorator that marks a plugin's ``register_components``."""


@hookspec
def register_components(add: Add) -> None:
    """Call ``add`` for every kind that the plugin brings.

    All of a plugin's kinds are registered, or none: an error raised here, or a kind that is taken, refuses
    the plugin as a whole and leaves every other one alone.
    """

"""A broken contract: who broke it, which one, and what to do. Imports no torch.

The driver, the layers and ``registry.build`` raise it where they are handed what can't be used; the checks of
``implicit_blocks.testing`` raise it where a component doesn't hold what it must.
"""

from __future__ import annotations

from typing import Any

from implicit_blocks import registry


class ContractError(ValueError):
    """A component breaks a contract; the message names it, its plugin, the contract, and what to look at."""


def require(condition: bool, component: Any, contract: str, remedy: str) -> None:
    """Raise ``ContractError`` unless the condition holds.

    Args:
        condition: whether the contract holds.
        component: the component, its class or its spec, or what to call it.
        contract: its name.
        remedy: what was found, and what to look at.

    Raises:
        ContractError: naming all of them.

    """
    if not condition:
        raise ContractError(f"{describe_component(component)} breaks the contract '{contract}': {remedy}")


def describe_component(component: Any) -> str:
    """Name a component and the plugin that it comes from: ``Shift (of plugin acme-blocks 2.5.0)``."""
    if isinstance(component, str):
        return component
    kind = component if isinstance(component, type) else type(component)
    owner = _owner(kind)
    return f"{kind.__qualname__} ({owner})" if owner else kind.__qualname__


def _owner(kind: type[Any]) -> str | None:
    """Find the plugin whose package a class is defined in; None for our own and for loose code."""
    package = kind.__module__.partition(".")[0]
    if package in ("implicit_blocks", "trainer"):
        return None
    for family in registry.families():
        for name in registry.kinds(family):
            entry = registry.entry(family, name)
            if entry.spec.__module__.partition(".")[0] == package:
                return f"of plugin {entry.owner} {entry.version}"
    return f"of module {kind.__module__}"

"""Contract violations: naming the component, its plugin, the contract and the remedy. Imports no torch.

The search, the layers and ``registry.build`` raise ``ContractError`` where a component returns something
invalid; the checks of ``implicit_blocks.testing`` raise it where a component breaks a contract.
"""

from __future__ import annotations

from typing import Any

from implicit_blocks import registry
from implicit_blocks.registry.entries import ContractError

__all__ = ["ContractError", "describe_component", "require"]


def require(condition: bool, component: Any, contract: str, remedy: str) -> None:
    """Raise ``ContractError`` unless the condition is true.

    Args:
        condition: whether the contract is kept.
        component: the component, its class, its spec, or its name.
        contract: the contract's name.
        remedy: what was found, and how to fix it.

    Raises:
        ContractError: the condition is false.

    """
    if not condition:
        raise ContractError(f"{describe_component(component)} breaks the contract '{contract}': {remedy}")


def describe_component(component: Any) -> str:
    """Return a component's name and its plugin: ``Shift (of plugin acme-blocks 2.5.0)``."""
    if isinstance(component, str):
        return component
    kind = component if isinstance(component, type) else type(component)
    owner = _owner(kind)
    return f"{kind.__qualname__} ({owner})" if owner else kind.__qualname__


def _owner(kind: type[Any]) -> str | None:
    """Return the plugin whose package defines a class; None for this distribution's classes."""
    package = kind.__module__.partition(".")[0]
    if package in ("implicit_blocks", "trainer"):
        return None
    for family in registry.families():
        for name in registry.kinds(family):
            entry = registry.entry(family, name)
            if entry.spec.__module__.partition(".")[0] == package:
                return f"of plugin {entry.owner} {entry.version}"
    return f"of module {kind.__module__}"

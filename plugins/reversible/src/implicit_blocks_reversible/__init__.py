"""A reversible solver and its gradient for `implicit_blocks`; the module of the entry point."""

from __future__ import annotations

from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks_reversible.spec import ReversibleGradientSpec, ReversibleSolverSpec

__all__ = ["ReversibleGradientSpec", "ReversibleSolverSpec", "api_version", "register_components"]

api_version = "1.0"  # version of the plugin interface that this plugin targets


@hookimpl
def register_components(add: Add) -> None:
    """Register both. The builders are import strings, so that registration imports no torch."""
    add("solver", ReversibleSolverSpec, "implicit_blocks_reversible.solver:Reversible.from_spec")
    add(
        "gradient", ReversibleGradientSpec, "implicit_blocks_reversible.gradient:ReversibleGradient.from_spec"
    )

"""Sliding-window attention, a mixer for `implicit_blocks`; the module of the entry point."""

from __future__ import annotations

from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks_sliding_window.spec import SlidingWindowAttentionSpec

__all__ = ["SlidingWindowAttentionSpec", "register_components"]


@hookimpl
def register_components(add: Add) -> None:
    """Register the mixer. The builder is an import string, so that registration imports no torch."""
    add("mixer", SlidingWindowAttentionSpec, "implicit_blocks_sliding_window.mixer:SlidingWindowAttention")

"""RWKV-7's time mixing, a mixer for `implicit_blocks`; the module of the entry point."""

from __future__ import annotations

from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks_rwkv7.spec import RWKV7Spec

__all__ = ["RWKV7Spec", "api_version", "register_components"]

api_version = "1.0"  # version of the plugin interface that this plugin targets


@hookimpl
def register_components(add: Add) -> None:
    """Register the mixer. The builder is an import string, so that registration imports no torch."""
    add("mixer", RWKV7Spec, "implicit_blocks_rwkv7.mixer:RWKV7")

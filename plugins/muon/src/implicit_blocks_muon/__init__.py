"""Muon, an optimizer for the trainer of `implicit_blocks`; the module of the entry point."""

from __future__ import annotations

from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks_muon.spec import MuonSpec

__all__ = ["MuonSpec", "api_version", "register_components"]

api_version = "1.0"  # version of the plugin interface that this plugin targets


@hookimpl
def register_components(add: Add) -> None:
    """Register the optimizer. The builder is an import string, so that registration imports no torch."""
    add("optimizer", MuonSpec, "implicit_blocks_muon.optimizer:build_muon")

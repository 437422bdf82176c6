"""Muon, an optimizer for the trainer of `implicit_blocks`: the module that its entry point names."""

from __future__ import annotations

from implicit_blocks.registry.hooks import Add, hookimpl
from implicit_blocks_muon.spec import MuonSpec

__all__ = ["MuonSpec", "api_version", "register_components"]

api_version = "1.0"  # of the library's plugin interface that this was written for


@hookimpl
def register_components(add: Add) -> None:
    """Register the optimizer. The builder is an import string, so that knowing the kind imports no torch."""
    add("optimizer", MuonSpec, "implicit_blocks_muon.optimizer:build_muon")

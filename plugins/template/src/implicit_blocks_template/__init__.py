"""A mixer for `implicit_blocks`: the module of the distribution's entry point."""

from __future__ import annotations

from implicit_blocks.registry.hooks import Add, hookimpl

from implicit_blocks_template.spec import TemplateSpec

__all__ = ["TemplateSpec", "api_version", "register_components"]

api_version = "1.0"  # the version of the plugin interface


@hookimpl
def register_components(add: Add) -> None:
    """Register the mixer. Its builder is an import string, so that registering imports no torch."""
    add(
        "mixer",
        TemplateSpec,
        "implicit_blocks_template.mixer:Template",
    )

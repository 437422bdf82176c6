"""A mixer for `implicit_blocks`: the module that the distribution's entry point names."""

from __future__ import annotations

from implicit_blocks.registry.hooks import Add, hookimpl

from implicit_blocks_template.spec import TemplateSpec

__all__ = ["TemplateSpec", "api_version", "register_components"]

api_version = "1.0"  # of the library's plugin interface that this was written for


@hookimpl
def register_components(add: Add) -> None:
    """Register the mixer. The builder is an import string, so that knowing the kind imports no torch."""
    add(
        "mixer",
        TemplateSpec,
        "implicit_blocks_template.mixer:Template",
    )

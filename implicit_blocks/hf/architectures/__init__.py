"""Published looped models: Attractor, Parcae, Huginn and Ouro, read and written.

One file per architecture maps its configuration to the fields of a spec, and its tensors to ours, in both
directions. The functions need no transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from implicit_blocks.hf.architectures.attractor import AttractorFormat
from implicit_blocks.hf.architectures.base import Architecture, Reading, export_config
from implicit_blocks.hf.architectures.huginn import HuginnFormat
from implicit_blocks.hf.architectures.ouro import OuroFormat
from implicit_blocks.hf.architectures.parcae import ParcaeFormat
from implicit_blocks.specs import ExplicitLMSpec, ImplicitLMSpec

__all__ = [
    "ARCHITECTURES",
    "Architecture",
    "Reading",
    "architecture_for",
    "export_config",
    "find",
    "inner_config",
]

ARCHITECTURES: dict[str, Architecture] = {
    format.name: format for format in (AttractorFormat(), ParcaeFormat(), HuginnFormat(), OuroFormat())
}
"""The known formats by name."""


def find(config: Mapping[str, Any]) -> Architecture | None:
    """Return the format of a published configuration; None: another one.

    A configuration that is wrapped as ``{"architecture": name, "config": {…}}`` is recognized by its name.
    """
    named = config.get("architecture")
    if isinstance(named, str) and isinstance(config.get("config"), Mapping):
        return ARCHITECTURES.get(named)
    return next((each for each in ARCHITECTURES.values() if each.recognizes(config)), None)


def inner_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the published configuration itself, without the wrapping that ``find`` describes."""
    inner = config.get("config")
    return dict(inner) if "architecture" in config and isinstance(inner, Mapping) else dict(config)


def architecture_for(spec: ImplicitLMSpec | ExplicitLMSpec) -> Architecture | None:
    """Return the format in which a spec can probably be written; None: none of them."""
    if not isinstance(spec, ImplicitLMSpec):
        return None
    return next((each for each in ARCHITECTURES.values() if each.describes(spec)), None)

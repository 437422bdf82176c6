"""Laying one spec over another: `extends`, phases and the command line all merge by these rules.

A mapping that names another `kind` replaces what was there; every other mapping merges, key by key; lists and
scalars replace. A model that is switched to its *twin* keeps the fields that both kinds know, and the phases,
which told the old one how to search, go.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from implicit_blocks import registry
from implicit_blocks.specs.tree import Section


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Section:
    """Lay ``over`` on ``base``; neither is changed."""
    if "kind" in over and "kind" in base and over["kind"] != base["kind"]:
        return Section(over)
    merged = Section(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = merge(below, value)
        merged.put(key, value, like=over)
    return merged


def merge_runs(base: Mapping[str, Any], over: Mapping[str, Any]) -> Section:
    """`merge` for whole run specs, where ``model: {kind: …}`` may switch to a twin."""
    return merge(_as_twin(Section(base), over), over)


def _as_twin(base: Section, over: Mapping[str, Any]) -> Section:
    """Leave out what a new kind of model has no use for."""
    model, change = base.get("model"), over.get("model")
    if not isinstance(model, Mapping) or not isinstance(change, Mapping):
        return base
    old, new = model.get("kind"), change.get("kind")
    if old is None or new is None or old == new:
        return base
    base.pop("phases", None)
    if new in registry.kinds("model"):  # otherwise validation says what is wrong with it
        spec = registry.entry("model", new).spec
        if old in spec.twin_of:
            kept = Section(model)
            for key in set(kept) - set(spec.model_fields):
                del kept[key]
            kept.put("kind", new, like=change)
            base["model"] = kept
    return base

"""Where a key belongs that a section doesn't know: ``training.learning_rate`` is the optimizer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from implicit_blocks import registry


def places_of(key: str, section: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    """Return the paths below a section at which there is such a key, as things stand.

    Args:
        key: a field's name.
        section: the spec whose key it is not.
        given: the section's values, which say the kinds of its components; what they lack has its default.

    """
    return list(_places(key, section, given, ""))


def _places(key: str, section: type[BaseModel], given: Any, path: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        value = given.get(name, field.default) if isinstance(given, Mapping) else getattr(given, name, None)
        below = _section_of(field.annotation, value)
        if below is None:
            continue
        if key in below.model_fields:
            yield f"{path}{name}.{key}"
        yield from _places(key, below, value, f"{path}{name}.")


def _section_of(annotation: Any, value: Any) -> type[BaseModel] | None:
    """Return the spec that stands there: the value's own, or the one of its kind, or the only one."""
    if isinstance(value, BaseModel):
        return type(value)
    if not isinstance(value, Mapping):
        return None
    for candidate in (annotation, *get_args(annotation)):
        if not isinstance(candidate, type) or not issubclass(candidate, BaseModel):
            continue
        family = candidate.__dict__.get("family")
        if family is None:
            return candidate
        if value.get("kind") in registry.kinds(family):
            return registry.entry(family, value["kind"]).spec
    return None

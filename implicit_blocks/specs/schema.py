"""The JSON schema of run specs with every registered kind, for editors and for the test that pins it."""

from __future__ import annotations

from typing import Any

from implicit_blocks import registry
from implicit_blocks.specs.families import BaseRunSpec
from implicit_blocks.specs.loading import DEFAULT_KIND

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def run_schema(kind: str = DEFAULT_KIND) -> dict[str, Any]:
    """Return the schema of a complete run spec, after merging.

    Raises:
        UnknownKindError: the kind of run is not registered.

    """
    spec: type[BaseRunSpec] = registry.entry("run", kind).spec
    return {"$schema": _DIALECT, **_tidy(spec.model_json_schema())}


def file_schema(kind: str = DEFAULT_KIND) -> dict[str, Any]:
    """Return the schema of a YAML file: `run_schema` with every key optional, and with `extends`.

    Raises:
        UnknownKindError: the kind of run is not registered.

    """
    schema: dict[str, Any] = _partial(run_schema(kind))
    names = {"type": "string", "description": "A zoo name, or a path relative to this file."}
    schema["properties"] = {
        "extends": {"anyOf": [names, {"type": "array", "items": names}], "title": "Extends"},
        **schema["properties"],
    }
    return schema


def _tidy(node: Any) -> Any:
    """Remove the wrappers around references that pydantic needs."""
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    node = {key: _tidy(value) for key, value in node.items()}
    match node.get("allOf"):
        case [{"$ref": _} as reference]:
            del node["allOf"]
            node.update(reference)
    return node


def _partial(node: Any, *, in_properties: bool = False) -> Any:
    """Make every key optional; a component without `kind` may match any kind."""
    if isinstance(node, list):
        return [_partial(item) for item in node]
    if not isinstance(node, dict):
        return node
    if in_properties:  # the keys are the spec's, not JSON schema's
        return {key: _partial(value) for key, value in node.items()}
    names = {"oneOf": "anyOf"}
    return {
        names.get(key, key): _partial(value, in_properties=key in ("properties", "$defs"))
        for key, value in node.items()
        if key != "required"
    }

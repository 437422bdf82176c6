"""The JSON schema of run specs with every kind registered now: for editors, and to pin the format."""

from __future__ import annotations

from typing import Any

from implicit_blocks import registry
from implicit_blocks.specs.loading import DEFAULT_KIND
from implicit_blocks.specs.run import BaseRunSpec

_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def run_schema(kind: str = DEFAULT_KIND) -> dict[str, Any]:
    """Describe a complete run spec, as it is after merging.

    Raises:
        UnknownKindError: no such kind of run.

    """
    spec: type[BaseRunSpec] = registry.entry("run", kind).spec
    return {"$schema": _DIALECT, **_tidy(spec.model_json_schema())}


def file_schema(kind: str = DEFAULT_KIND) -> dict[str, Any]:
    """Describe a YAML file: as `run_schema`, but anything may be left to `extends` or the command line.

    Raises:
        UnknownKindError: no such kind of run.

    """
    schema: dict[str, Any] = _partial(run_schema(kind))
    names = {"type": "string", "description": "A zoo name, or a path relative to this file."}
    schema["properties"] = {
        "extends": {"anyOf": [names, {"type": "array", "items": names}], "title": "Extends"},
        **schema["properties"],
    }
    return schema


def _tidy(node: Any) -> Any:
    """Remove the wrapper around references that pydantic needs."""
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
    """Require nothing; where one of several kinds is meant and none named, let any of them do."""
    if isinstance(node, list):
        return [_partial(item) for item in node]
    if not isinstance(node, dict):
        return node
    if in_properties:  # its keys are the spec's, not the schema's
        return {key: _partial(value) for key, value in node.items()}
    names = {"oneOf": "anyOf"}
    return {
        names.get(key, key): _partial(value, in_properties=key in ("properties", "$defs"))
        for key, value in node.items()
        if key != "required"
    }

"""Validation errors: creating them in validators, and formatting them with their place in the YAML."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from implicit_blocks import registry
from implicit_blocks._utils.hints import nearest, synonyms
from implicit_blocks.specs.tree import SpecError, place_of, shown

MOST_ERRORS = 20
"""Maximum number of errors listed in one message."""

_OF_VALUE, _OF_KEY = "refused_value", "refused_key"


def field_error(message: str, *location: str | int, value: Any, of_key: bool = False) -> ValidationError:
    """Return the error to raise in a validator when one particular entry is wrong.

    Args:
        message: what is wrong and how to fix it, for users.
        location: keys from the spec under validation to that entry.
        value: the entry's value.
        of_key: whether the key is wrong, not its value.

    """
    return _error([_details(message, location, value, kind=_OF_KEY if of_key else _OF_VALUE)])


def merge_errors(errors: Iterable[ValidationError], *, under: Sequence[str | int] = ()) -> ValidationError:
    """Combine several errors into one, so that all of them are reported.

    Args:
        errors: the errors of parts of the spec under validation.
        under: keys from that spec to the parts.

    """
    lines = []
    for details in (details for error in errors for details in _details_of(error)):
        kind = details["type"] if details["type"] == _OF_KEY else _OF_VALUE
        lines.append(_details(_message(details), (*under, *details["loc"]), details["input"], kind=kind))
    return _error(lines)


def format_error(error: ValidationError, tree: Any, *, source: str) -> SpecError:
    """Convert a validation error to a `SpecError` with one line per problem: place, path, message.

    Args:
        error: the error that validation raised.
        tree: what was validated, with places.
        source: the name to report where the tree has no place.

    """
    lines = []
    found = list(_details_of(error))
    for details in found[:MOST_ERRORS]:
        location = details["loc"]
        place = place_of(tree, location, key=details["type"] == _OF_KEY) or source
        path = ".".join(str(step)[:200] for step in location)  # as on the command line
        lines.append(": ".join(part for part in (str(place), path, _message(details)) if part))
    lines = list(dict.fromkeys(lines))  # the alternatives of a union may give the same message
    if len(found) > MOST_ERRORS:
        lines.append(f"and {len(found) - MOST_ERRORS:,} more errors")
    return SpecError("\n".join(lines), found)


def key_hints(key: str, section: type[BaseModel], given: Mapping[str, Any]) -> list[str]:
    """Return the paths below a section that end in a key: ``optimizer.learning_rate`` for ``learning_rate``.

    If no path ends in it, those that end in the name used here, as for ``lr``.

    Args:
        key: a key that the section does not have.
        section: the spec class of the section.
        given: the section's values, which determine the kinds of its components; defaults fill the rest.

    """
    for name in (key, *synonyms(key)):
        if found := list(_paths_to(name, section, given, "")):
            return found
    return []


def _paths_to(key: str, section: type[BaseModel], given: Any, path: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        value = given.get(name, field.default) if isinstance(given, Mapping) else getattr(given, name, None)
        below = _section_of(field.annotation, value)
        if below is None:
            continue
        if key in below.model_fields:
            yield f"{path}{name}.{key}"
        yield from _paths_to(key, below, value, f"{path}{name}.")


def _section_of(annotation: Any, value: Any) -> type[BaseModel] | None:
    """Return the spec class of a field's value: its own, the one of its kind, or the annotated one."""
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


def _details_of(error: ValidationError) -> Iterator[Mapping[str, Any]]:
    """Yield the details of each error, including those of specs that validators construct."""
    for details in error.errors(include_url=False):
        if details["type"] == "too_short" and len(details["input"]) >= details["ctx"]["min_length"]:
            continue  # pydantic omits invalid entries from the length; each has its own error
        cause = details.get("ctx", {}).get("error")
        inner = cause.errors() if isinstance(cause, SpecError) else []
        if not inner:
            yield details
        for each in inner:
            yield {**each, "loc": (*details["loc"], *each["loc"])}


def _message(details: Mapping[str, Any]) -> str:
    message: str = details["msg"]
    match details["type"]:
        case "refused_key" | "refused_value":
            return message
        case "missing":
            return "is missing; add it"
        case "tuple_type" | "list_type":  # YAML's terms instead of Python's
            example = "[]" if details["input"] is None else f"[{shown(details['input'], limit=60)}]"
            return f"should be a list such as {example}; got {shown(details['input'])}"
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"should be a mapping such as {{key: value}}; got {shown(details['input'])}"
        case "value_error":
            message = message.removeprefix("Value error, ")
    if isinstance(details["input"], Mapping) and details["type"] == "value_error":
        return message  # about a whole section, whose content would not help
    hint = ""
    if details["type"] == "literal_error" and isinstance(details["input"], str):
        near = nearest(details["input"], re.findall(r"'([^']*)'", details["ctx"]["expected"]))
        hint = "" if near is None else f"; did you mean {near!r}?"
    return f"{message.replace('Input should be', 'should be')}; got {shown(details['input'])}{hint}"


def _details(message: str, location: Sequence[str | int], value: Any, *, kind: str) -> InitErrorDetails:
    # The message is passed as context, because pydantic requires a literal template.
    context = {"message": message}
    error = (
        PydanticCustomError("refused_key", "{message}", context)
        if kind == _OF_KEY
        else PydanticCustomError("refused_value", "{message}", context)
    )
    return {"type": error, "loc": tuple(location), "input": value}


def _error(lines: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("spec", lines)

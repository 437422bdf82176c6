"""Validation errors: raising them in a validator, and putting them in words with the place in the YAML."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from implicit_blocks.specs.tree import SpecError, place_of, shown

MOST_ERRORS = 20
"""Most errors that one message lists."""

_OF_VALUE, _OF_KEY = "refused_value", "refused_key"


def field_error(message: str, *location: str | int, value: Any, of_key: bool = False) -> ValidationError:
    """Make the error to raise in a validator when one particular entry is wrong.

    Args:
        message: what is wrong and what to do; for users.
        location: keys from the spec under validation to that entry.
        value: what stands there.
        of_key: whether it is the key that is wrong, not its value.

    """
    return _error([_details(message, location, value, kind=_OF_KEY if of_key else _OF_VALUE)])


def merge_errors(errors: Iterable[ValidationError], *, under: Sequence[str | int] = ()) -> ValidationError:
    """Make one error of several, so that all of them are shown.

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
    """Say an error as a user should read it, one line for each thing that is wrong.

    Args:
        error: what validation found.
        tree: what was validated, with places.
        source: what to name where the tree remembers no place.

    """
    lines = []
    found = list(_details_of(error))
    for details in found[:MOST_ERRORS]:
        location = details["loc"]
        place = place_of(tree, location, key=details["type"] == _OF_KEY) or source
        path = ".".join(str(step)[:200] for step in location)  # as one writes it on the command line
        lines.append(": ".join(part for part in (str(place), path, _message(details)) if part))
    lines = list(dict.fromkeys(lines))  # a union's alternatives may say the same
    if len(found) > MOST_ERRORS:
        lines.append(f"and {len(found) - MOST_ERRORS:,} more errors")
    return SpecError("\n".join(lines), found)


def _details_of(error: ValidationError) -> Iterator[Mapping[str, Any]]:
    """Yield the details of each error, those of a spec that a validator made included."""
    for details in error.errors(include_url=False):
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
        case "tuple_type" | "list_type":  # in the words of YAML, not of Python
            return f"should be a list such as [32, 64]; got {shown(details['input'])}"
        case "dict_type" | "model_type" | "model_attributes_type":
            return f"should be a mapping such as {{key: value}}; got {shown(details['input'])}"
        case "value_error":
            message = message.removeprefix("Value error, ")
    if isinstance(details["input"], Mapping) and details["type"] == "value_error":
        return message  # a rule of a whole section: quoting all of it says nothing
    return f"{message.replace('Input should be', 'should be')}; got {shown(details['input'])}"


def _details(message: str, location: Sequence[str | int], value: Any, *, kind: str) -> InitErrorDetails:
    # The message goes in as context, because pydantic's template must be a literal.
    context = {"message": message}
    error = (
        PydanticCustomError("refused_key", "{message}", context)
        if kind == _OF_KEY
        else PydanticCustomError("refused_value", "{message}", context)
    )
    return {"type": error, "loc": tuple(location), "input": value}


def _error(lines: list[InitErrorDetails]) -> ValidationError:
    return ValidationError.from_exception_data("spec", lines)

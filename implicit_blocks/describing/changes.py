"""Differences between two specs, after resolving everything they extend and all defaults."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from implicit_blocks.describing.drawing import Line, Span
from implicit_blocks.specs import BaseRunSpec

ABSENT = "—"


class Change(NamedTuple):
    """A difference of two specs: the path and both values as JSON, or `ABSENT`."""

    path: tuple[str, ...]
    old: str
    new: str


def changes(old: BaseRunSpec, new: BaseRunSpec) -> list[Change]:
    """List the differences, in the order of the spec's fields.

    Named elements of lists, such as phases, are compared by name. For components of different kinds, the
    kind comes first, followed by every field that only one of the kinds has, unless its value is null. A
    section that only one spec has, such as a prelude, is listed by its fields in the same way.
    """
    return _compare(old.model_dump(mode="json"), new.model_dump(mode="json"), ())


_MISSING = object()


def _compare(old: Any, new: Any, path: tuple[str, ...]) -> list[Change]:
    old, new = _named(old), _named(new)
    if isinstance(old, Mapping) or isinstance(new, Mapping):
        # A section that is absent or null in one spec.
        left = old if isinstance(old, Mapping) else {}
        right = new if isinstance(new, Mapping) else {}
        found = []
        if not left and not right:  # an empty mapping equals an absent one
            return [Change(path, _shown(old), _shown(new))] if old != new else []
        keys = dict.fromkeys((*left, *right))
        for key in sorted(keys, key=lambda key: key != "kind"):  # the sort is stable
            found += _compare(left.get(key, _MISSING), right.get(key, _MISSING), (*path, str(key)))
        return found
    if (old is None and new is _MISSING) or (old is _MISSING and new is None):
        return []
    same = old == new or repr(old) == repr(new)  # NaN != NaN
    return [] if same else [Change(path, _shown(old), _shown(new))]


def _named(value: Any) -> Any:
    """Convert a list of named mappings to a mapping by name, and other lists of mappings by position."""
    if not isinstance(value, list) or not value or not all(isinstance(item, Mapping) for item in value):
        return value
    names = [str(item.get("name")) for item in value]
    if None in (item.get("name") for item in value) or len(set(names)) < len(names):
        return {str(number): item for number, item in enumerate(value)}
    return {
        name: {key: entry for key, entry in item.items() if key != "name"}
        for name, item in zip(names, value, strict=True)
    }


def _shown(value: Any) -> str:
    if value is _MISSING:
        return ABSENT
    if isinstance(value, Mapping):
        return "{}"  # other mappings are shown entry by entry
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def draw_changes(found: Sequence[Change], *, old: str, new: str) -> list[Line]:
    """Draw differences as a table under the names of both specs; common path prefixes appear once."""
    rows = [("", old, new, True)]
    open_sections: tuple[str, ...] = ()
    for change in found:
        above = change.path[:-1]
        common = 0
        while common < min(len(above), len(open_sections)) and above[common] == open_sections[common]:
            common += 1
        for depth in range(common, len(above)):
            rows.append(("  " * depth + above[depth], "", "", True))
        open_sections = above
        rows.append(("  " * len(above) + change.path[-1], change.old, change.new, False))
    widths = [max(len(row[0]) for row in rows), max(len(row[1]) for row in rows)]
    return [
        (
            Span(name.ljust(widths[0] + 2), "bold cyan" if section else "cyan"),
            Span(left.ljust(widths[1] + 2), "bold" if section else "red"),
            Span(right, "bold" if section else "green"),
        )
        for name, left, right, section in rows
    ]

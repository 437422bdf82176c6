"""Changes from the command line: ``model.solver.damping=0.5``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from implicit_blocks.specs.merging import merge_runs
from implicit_blocks.specs.tree import MAX_DEPTH, Place, Section, SpecError, parse_yaml, shown


def apply_overrides(tree: Section, overrides: Sequence[str]) -> Section:
    """Lay all changes on the tree.

    Each is ``path.to.key=value``, the value in YAML; an element of a list goes by its index or its `name`, as
    in ``phases.free.until=0.9``. Changes of a `kind` come first, whatever their order, so that settings
    beside them belong to the new component.

    Raises:
        SpecError: not of that form.

    """
    if isinstance(overrides, str | Mapping):
        raise SpecError(
            f"the changes are {overrides!r}; give a list of them, such as ['training.max_steps=200']"
        )
    parsed = [_parse(text) for text in overrides]
    for keys, value, place in sorted(parsed, key=lambda change: change[0][-1] != "kind"):
        tree = merge_runs(tree, _nested(tree, keys, value, place))
    return tree


def _parse(text: str) -> tuple[list[str], Any, Place]:
    name, equals, value = text.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise SpecError(
            f"{shown(text)} changes nothing; write path.to.key=value, such as training.max_steps=200"
        )
    place = Place(f"command line, {shown(text)}")
    if len(keys) > MAX_DEPTH:
        raise SpecError(f"{place}: a path has at most {MAX_DEPTH} keys, this one has {len(keys):,}")
    return keys, parse_yaml(value, source=place.source, at=place), place


def _nested(tree: Any, keys: Sequence[str], value: Any, place: Place) -> Any:
    """Wrap the value in what leads to it from the tree's root."""
    if not keys:
        return value
    if isinstance(tree, list):
        index = _index(tree, keys[0], place)
        inner = _nested(tree[index], keys[1:], value, place)
        both = isinstance(tree[index], Section) and isinstance(inner, Section)
        return [*tree[:index], merge_runs(tree[index], inner) if both else inner, *tree[index + 1 :]]
    key = keys[0]
    below = tree.get(key) if isinstance(tree, Section) else None
    section = Section({key: _nested(below, keys[1:], value, place)})
    section.key_places[key] = section.value_places[key] = place
    return section


def _index(items: list[Any], word: str, place: Place) -> int:
    names = [item.get("name") if isinstance(item, Section) else None for item in items]
    if word in names:
        return names.index(word)
    if word.isdecimal() and int(word) < len(items):
        return int(word)
    known = ", ".join(str(name if name is not None else index) for index, name in enumerate(names))
    raise SpecError(f"{place}: {word!r} names no element of a list of {len(items)}; known: {known or 'none'}")

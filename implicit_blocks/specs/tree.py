"""YAML as data that remember where they stand, so that an error can name file, line and column."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml


class SpecError(ValueError):
    """Something is wrong with a spec; the message names the place, the value and the remedy."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where something was written: line and column of a file, from 1, or a word of the command line."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.source, self.line, self.column) if part is not None)


class Section(dict[str, Any]):
    """A mapping that knows the places of its keys and of their values."""

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        super().__init__(entries or {})
        self.key_places: dict[str, Place] = dict(getattr(entries, "key_places", {}))
        self.value_places: dict[str, Place] = dict(getattr(entries, "value_places", {}))

    def put(self, key: str, value: Any, *, like: Mapping[str, Any]) -> None:
        """Set an entry, with the places that it has in another section."""
        self[key] = value
        for mine, others in (
            (self.key_places, getattr(like, "key_places", {})),
            (self.value_places, getattr(like, "value_places", {})),
        ):
            mine.pop(key, None)
            if key in others:
                mine[key] = others[key]


def place_of(tree: Any, location: Sequence[str | int], *, key: bool = False) -> Place | None:
    """Tell where the entry at a location was written, or else the nearest that holds it.

    Args:
        tree: sections and lists.
        location: keys and list indices from the root; what the tree doesn't have is passed over.
        key: the place of the entry's key, not of its value.

    """
    place = None
    for depth, step in enumerate(location):
        if isinstance(tree, Mapping) and step in tree:
            last = depth == len(location) - 1
            places = getattr(tree, "key_places" if key and last else "value_places", {})
            place, tree = places.get(step, place), tree[step]
        elif isinstance(tree, list) and isinstance(step, int) and step < len(tree):
            tree = tree[step]
        else:
            break
    return place


def read_yaml(path: Path, *, name: str) -> Section:
    """Read the mapping that a file holds.

    Args:
        path: the file.
        name: what to call it in places.

    Raises:
        SpecError: not UTF-8, not YAML, not a mapping, or a key given twice.

    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{name}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise SpecError(f"{name}: can't be read: {error.strerror or error}") from None
    tree = parse_yaml(text, source=name)
    if not isinstance(tree, Section):
        raise SpecError(f"{name}:1:1: a spec is a mapping with sections such as `model:`, not {tree!r}")
    return tree


def parse_yaml(text: str, *, source: str, at: Place | None = None) -> Any:
    """Read a YAML text, mappings as `Section`.

    Args:
        text: one document, by the YAML 1.2 rules for plain scalars: ``1e-3`` is a number, ``no`` is a word.
        source: what to call the text in places.
        at: the place of everything in it, instead of lines and columns.

    Raises:
        SpecError: it isn't YAML, or gives a key twice.

    """
    try:
        node = yaml.compose(text, Loader=_Loader)
        return None if node is None else _Reader(source, at).value(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = at or (Place(source, mark.line + 1, mark.column + 1) if mark else Place(source))
        context = f" {error.context}" if error.context else ""
        raise SpecError(f"{place}: not valid YAML: {error.problem or 'error'}{context}") from None
    except yaml.reader.ReaderError as error:
        raise SpecError(
            f"{at or source}: not valid YAML: {error.reason} at character {error.position}"
        ) from None


class _Loader(yaml.SafeLoader):
    """PyYAML with the scalars of YAML 1.2: it reads 1e-3 as a word and `no` as false by itself."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012 - replaces the parent's table


for _tag, _pattern, _first in (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9][0-9_]*|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan",
        list("-+.0123456789"),
    ),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"(?:{_pattern})\\Z"), _first)

_CONVERT: dict[str, Callable[[str], Any]] = {
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text.replace("_", ""), 0 if text[:2] in ("0o", "0x") else 10),
    "float": lambda text: float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan")),
}


@dataclass
class _Reader:
    source: str
    at: Place | None

    def place(self, node: yaml.Node) -> Place:
        return self.at or Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def value(self, node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> Any:
        if node in above:
            raise SpecError(f"{self.place(node)}: an anchor that holds itself; write the values out")
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        match node, tag:
            case yaml.MappingNode(), "map":
                return self.section(node, (*above, node))
            case yaml.SequenceNode(), "seq":
                return [self.value(item, (*above, node)) for item in node.value]
            case yaml.ScalarNode(), "null":
                return None
            case yaml.ScalarNode(), "str":
                return node.value
            case yaml.ScalarNode(), ("bool" | "int" | "float"):
                try:
                    return _CONVERT[tag](node.value)
                except ValueError:
                    raise SpecError(f"{self.place(node)}: {node.value!r} is no {tag}") from None
        raise SpecError(f"{self.place(node)}: tag {node.tag!r} has no meaning here; remove it")

    def section(self, node: yaml.Node, above: tuple[yaml.Node, ...]) -> Section:
        section = Section()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError(f"{self.place(key_node)}: a key is a word, not a list or a mapping")
            key, place = key_node.value, self.place(key_node)
            if key in section:
                raise SpecError(
                    f"{place}: key {key!r} is given twice, first at {section.key_places[key]}; keep one"
                )
            section[key] = self.value(value_node, above)
            section.key_places[key], section.value_places[key] = place, self.place(value_node)
        return section

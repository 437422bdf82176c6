"""YAML read into mappings that keep the file, line and column of every entry, for error messages.

ruamel.yaml's round-trip loader keeps positions too, but it neither limits nesting and expanded aliases nor
rejects recursive anchors, surrogates and unknown tags, and it takes three times as long.
"""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

MAX_BYTES = 1 << 20
"""Maximum size of a spec file, in bytes."""
MAX_DEPTH = 64
"""Maximum nesting of mappings and lists, of keys in an override, and of files that extend each other."""
MAX_VALUES = 100_000
"""Maximum number of values in one spec, including expanded aliases and all files that it extends."""


class SpecError(ValueError):
    """A spec is invalid; the message gives the place, the value and the remedy."""

    def __init__(self, message: str, errors: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self._errors = tuple(errors)

    def errors(self) -> list[Any]:
        """Return pydantic's details of each validation error; empty for other errors."""
        return list(self._errors)


def shown(value: Any, *, limit: int = 200) -> str:
    """Return the ``repr`` of a value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # an integer with more digits than Python prints; deep nesting
        return f"a value of type {type(value).__name__} that is too large to print"
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text):,} characters)"


OUT_OF_RANGE = "outside the range of 64-bit integers; choose a smaller number"


def in_range(value: int) -> bool:
    """Whether an integer fits into 64 bits, signed or unsigned, as torch and NumPy require."""
    return -(1 << 63) <= value < 1 << 64


class ValueBudget:
    """Counts the values of a spec while it is read, so that a small file cannot expand without bound."""

    def __init__(self, limit: int = MAX_VALUES) -> None:
        self._limit = self._left = limit

    def spend(self, place: Place) -> None:
        """Count one value.

        Raises:
            SpecError: the limit is exceeded.

        """
        self._left -= 1
        if self._left < 0:
            raise SpecError(
                f"{place}: the spec has more than {self._limit:,} values once its aliases and `extends` are "
                "expanded; remove aliases of aliases, or extend fewer files"
            )


@dataclass(frozen=True, slots=True)
class Place:
    """Where an entry was written: line and column of a file, from 1, or a word of the command line."""

    source: str
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        return ":".join(str(part) for part in (self.source, self.line, self.column) if part is not None)


class Section(dict[str, Any]):
    """A mapping that keeps the places of its keys and of their values."""

    def __init__(self, entries: Mapping[str, Any] | None = None) -> None:
        super().__init__(entries or {})
        self.key_places: dict[str, Place] = dict(getattr(entries, "key_places", {}))
        self.value_places: dict[str, Place] = dict(getattr(entries, "value_places", {}))

    def put(self, key: str, value: Any, *, like: Mapping[str, Any]) -> None:
        """Set an entry and copy its places from another section."""
        self[key] = value
        for mine, others in (
            (self.key_places, getattr(like, "key_places", {})),
            (self.value_places, getattr(like, "value_places", {})),
        ):
            mine.pop(key, None)
            if key in others:
                mine[key] = others[key]


def place_of(tree: Any, location: Sequence[str | int], *, key: bool = False) -> Place | None:
    """Return where the entry at a location was written, or the nearest enclosing entry with a place.

    Args:
        tree: sections and lists.
        location: keys and list indices from the root; steps that the tree lacks are ignored.
        key: return the place of the entry's key, not of its value.

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


def read_yaml(path: Path, *, name: str, budget: ValueBudget | None = None) -> Section:
    """Read the mapping in a file.

    Args:
        path: the file.
        name: the name of the file in places.
        budget: shared by several files to limit their values together.

    Raises:
        SpecError: not UTF-8, not YAML, not a mapping, a duplicate key, or too large.

    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise SpecError(f"{name}: a spec file has at most {MAX_BYTES:,} bytes, and this one has more")
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise SpecError(f"{name}: byte {error.start} is not UTF-8; save the file as UTF-8") from None
    except OSError as error:
        raise SpecError(f"{name}: cannot be read: {error.strerror or error}") from None
    tree = parse_yaml(text, source=name, budget=budget)
    if not isinstance(tree, Section):
        raise SpecError(f"{name}:1:1: a spec is a mapping with sections such as `model:`, not {shown(tree)}")
    return tree


def parse_yaml(text: str, *, source: str, at: Place | None = None, budget: ValueBudget | None = None) -> Any:
    """Parse a YAML text; mappings become `Section`.

    Args:
        text: one document, by the YAML 1.2 rules for plain scalars: ``1e-3`` is a number, ``no`` is a word.
        source: the name of the text in places.
        at: the place of every entry, instead of lines and columns.
        budget: shared by several texts to limit their values together.

    Raises:
        SpecError: not YAML, a duplicate key, too large or too deeply nested.

    """
    try:
        node = _cached_compose(text) if len(text) in _CACHED_LENGTHS else _compose(text)
    except yaml.MarkedYAMLError as error:
        place = _at_mark(error.problem_mark or error.context_mark, source, at)
        context = f" {error.context}" if error.context else ""
        raise SpecError(f"{place}: not valid YAML: {error.problem or 'error'}{context}") from None
    except yaml.reader.ReaderError as error:
        raise SpecError(
            f"{at or source}: not valid YAML: {error.reason} at character {error.position}"
        ) from None
    except _NumberRangeError as error:
        place = _at_mark(error.mark, source, at)
        raise SpecError(
            f"{place}: not valid YAML: an escape or directive whose number is out of range"
        ) from None
    return None if node is None else _Reader(source, at, budget or ValueBudget()).value(node)


def dump_yaml(tree: Mapping[str, Any], **layout: Any) -> str:
    """Write a mapping so that `parse_yaml` returns the same values: strings such as ``1e-3`` are quoted."""
    text: str = yaml.dump(dict(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, **layout)
    return text


def _at_mark(mark: Any, source: str, at: Place | None) -> Place:
    return at or (Place(source, mark.line + 1, mark.column + 1) if mark else Place(source))


class _Loader(yaml.SafeLoader):
    """PyYAML with the scalars of YAML 1.2; by default it reads 1e-3 as a string and `no` as false."""

    yaml_implicit_resolvers: Any = {}  # noqa: RUF012  # replaces the parent's table
    _depth = _nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node; the nesting, because PyYAML recurses, and the number of nodes are limited."""
        self._depth += 1
        self._nodes += 1
        message = None
        if self._depth > MAX_DEPTH:
            message = f"nested more than {MAX_DEPTH} levels deep"
        elif self._nodes > 2 * MAX_VALUES:  # keys and values
            message = f"more than {MAX_VALUES:,} values"
        if message is not None:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]  # missing in PyYAML's stubs
            raise yaml.composer.ComposerError(None, None, message, event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class _NumberRangeError(Exception):
    """A number is out of the range of PyYAML's chr() or int(), as in "\\UFFFFFFFF" or ``%YAML``."""

    def __init__(self, mark: Any) -> None:
        super().__init__()
        self.mark = mark


def _compose(text: str) -> yaml.Node | None:
    loader = _Loader(text)
    try:
        return loader.get_single_node()
    except (ValueError, OverflowError):
        raise _NumberRangeError(loader.get_mark()) from None


_CACHED_LENGTHS = range(200, 20_000)
"""Files of a usual size, without the values of overrides."""
_cached_compose = functools.lru_cache(maxsize=32)(_compose)
"""PyYAML takes 15 ms for the spec of a run, which is read up to four times when the run is resumed."""


class _Dumper(yaml.SafeDumper):
    """Quotes strings that YAML 1.1 or 1.2 would read as another type."""

    def ignore_aliases(self, data: Any) -> bool:
        """Write values out instead of anchors."""
        return True

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Escape Unicode line breaks, which PyYAML would write unescaped and read as spaces."""
        style = '"' if _BREAKS.intersection(data) else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style=style)


_BREAKS = frozenset("\x85\u2028\u2029\ufeff")
_Dumper.add_representer(str, _Dumper.represent_str)


_PLAIN: dict[str, re.Pattern[str]] = {}
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
    _PLAIN[_tag] = re.compile(f"(?:{_pattern})\\Z")
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _PLAIN[_tag], _first)
    _Dumper.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", _PLAIN[_tag], _first)

_WORDS = {
    "null": "null or ~",
    "bool": "true or false",
    "int": "a number such as 3",
    "float": "a number such as 0.5",
}
_UNENCODABLE = re.compile("[\0\ud800-\udfff]")
_CONVERT: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": lambda text: int(text.replace("_", ""), 0 if text[:2] in ("0o", "0x") else 10),
    "float": lambda text: float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan")),
}


@dataclass
class _Reader:
    source: str
    at: Place | None
    budget: ValueBudget

    def place(self, node: yaml.Node) -> Place:
        return self.at or Place(self.source, node.start_mark.line + 1, node.start_mark.column + 1)

    def value(self, node: yaml.Node, above: tuple[yaml.Node, ...] = ()) -> Any:
        if node in above:
            raise SpecError(f"{self.place(node)}: an anchor that contains itself; write the values out")
        if len(above) >= MAX_DEPTH:  # aliases increase the nesting
            raise SpecError(f"{self.place(node)}: nested more than {MAX_DEPTH} levels deep")
        self.budget.spend(self.place(node))
        tag = node.tag.removeprefix("tag:yaml.org,2002:")
        match node, tag:
            case yaml.MappingNode(), "map":
                return self.section(node, (*above, node))
            case yaml.SequenceNode(), "seq":
                return [self.value(item, (*above, node)) for item in node.value]
            case yaml.ScalarNode(), "str":
                return self.text(node)
            case yaml.ScalarNode(), ("null" | "bool" | "int" | "float"):
                return self.converted(node, tag)
        raise SpecError(f"{self.place(node)}: tag {shown(node.tag)} is not supported; remove it")

    def text(self, node: yaml.ScalarNode) -> str:
        text: str = node.value
        if _UNENCODABLE.search(text):
            raise SpecError(f"{self.place(node)}: {shown(text)} contains NUL or a surrogate; remove it")
        return text

    def converted(self, node: yaml.ScalarNode, tag: str) -> Any:
        """Convert a scalar by its tag, which may be explicit, such as ``!!bool yes``."""
        text: str = node.value
        value = None
        if _PLAIN[tag].match(text):
            with contextlib.suppress(ValueError):  # more digits than Python can convert
                value = _CONVERT[tag](text)
        elif tag != "null" or text:
            raise SpecError(f"{self.place(node)}: {shown(text)} is not a valid {tag}; write {_WORDS[tag]}")
        if tag == "int" and (value is None or not in_range(value)):
            raise SpecError(f"{self.place(node)}: {shown(text, limit=40)} is {OUT_OF_RANGE}")
        return value

    def section(self, node: yaml.Node, above: tuple[yaml.Node, ...]) -> Section:
        section = Section()
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                raise SpecError(f"{self.place(key_node)}: a key must be a scalar, not a list or a mapping")
            key, place = self.text(key_node), self.place(key_node)
            if key in section:
                raise SpecError(
                    f"{place}: key {shown(key)} is given twice, first at {section.key_places[key]}; keep one"
                )
            section[key] = self.value(value_node, above)
            section.key_places[key], section.value_places[key] = place, self.place(value_node)
        return section

"""The grid of a sweep: its axes, and one run for every combination of values and seed. Imports no torch."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from implicit_blocks.specs.tree import Place, parse_yaml, shown

SEED = "training.seed"
_OPENING, _CLOSING = "([{", ")]}"
_LONGEST_NAME = 120


@dataclass(frozen=True)
class Axis:
    """A field of the spec and its values, as JSON values."""

    key: str
    values: tuple[Any, ...]

    @property
    def is_numeric(self) -> bool:
        """Whether all values are numbers, so that the axis has two edges."""
        return all(isinstance(v, int | float) and not isinstance(v, bool) for v in self.values)


@dataclass(frozen=True)
class GridRun:
    """A run of the grid: the values of its axes in their order, and its seed (None: the spec's)."""

    name: str
    settings: tuple[tuple[str, Any], ...]
    seed: int | None

    @property
    def overrides(self) -> list[str]:
        """The overrides of the spec, as on the command line."""
        settings = [*self.settings, *([] if self.seed is None else [(SEED, self.seed)])]
        return [f"{key}={_text(value)}" for key, value in settings]


def parse_axes(texts: Sequence[str]) -> list[Axis]:
    """Parse axes such as ``training.optimizer.learning_rate=1e-3,2e-3``.

    Commas inside brackets, braces and quotes do not separate values.

    Raises:
        ValueError: an axis has no values, an invalid or repeated one, or a field is given twice.

    """
    axes: list[Axis] = []
    for text in texts:
        key, equals, listed = text.partition("=")
        key = key.strip()
        words = _split(listed)
        if not equals or not key or not all(words):
            raise ValueError(
                f"--grid {shown(text)} is not an axis; write path.to.key=value,value such as "
                "training.optimizer.learning_rate=1e-3,2e-3"
            )
        if any(axis.key == key for axis in axes):
            raise ValueError(f"--grid has {key} twice; give all its values at once: {key}=value,value")
        source = f"--grid {shown(text)}"
        # Through JSON, so that the values are plain.
        values = tuple(
            json.loads(json.dumps(parse_yaml(word, source=source, at=Place(source)))) for word in words
        )
        for word, value in zip(words, values, strict=True):
            if sum(_text(value) == _text(other) for other in values) > 1:
                raise ValueError(f"--grid {key} has the value {word} twice; give each value once")
        axes.append(Axis(key, values))
    return axes


def make_runs(axes: Sequence[Axis], seeds: Sequence[int]) -> list[GridRun]:
    """Return the runs of a grid, the seeds of a cell next to each other.

    The name of a run depends on its settings alone: a run that a wider grid contains too keeps its folder.

    Args:
        axes: the axes; none: a single cell.
        seeds: the seeds of each cell; empty: one run with the spec's seed.

    Raises:
        ValueError: a seed is repeated, or the axes contain the seed.

    """
    if len(set(seeds)) < len(seeds):
        raise ValueError(f"--seeds contains a seed twice: {', '.join(map(str, seeds))}; give each seed once")
    if seeds and any(axis.key == SEED for axis in axes):
        raise ValueError(f"--grid {SEED} conflicts with --seeds; use --seeds alone")
    labels = short_names([axis.key for axis in axes])
    each_seed: Sequence[int | None] = seeds or (None,)
    runs = []
    for values in itertools.product(*(axis.values for axis in axes)):
        for seed in each_seed:
            settings = tuple((axis.key, value) for axis, value in zip(axes, values, strict=True))
            parts = [f"{labels[key]}={_text(value)}" for key, value in settings]
            parts += [] if seed is None else [f"seed={seed}"]
            runs.append(GridRun(_folder_name(",".join(parts) or "run"), settings, seed))
    return runs


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the shortest ends of paths that tell them apart: ``learning_rate`` for the optimizer's."""
    names: dict[str, str] = {}
    for key in keys:
        parts = key.split(".")
        for count in range(1, len(parts) + 1):
            name = ".".join(parts[-count:])
            if sum(f".{other}".endswith(f".{name}") for other in keys) == 1 and name != "seed":
                break
        names[key] = name
    return names


def describe_value(value: Any) -> str:
    """Return a value as in a table: ``0.001``, ``cosine``, ``{"kind": "muon"}``."""
    return value if isinstance(value, str) else _text(value)


def _text(value: Any) -> str:
    """Return a value in YAML, the same for equal values: 1e-3 and 0.001 are one run."""
    if isinstance(value, float) and not isinstance(value, bool):
        return f"{value!r}"
    if isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w.+-]*( tokens)?", value):
        parsed = parse_yaml(value, source="")
        if parsed == value:  # not a word that YAML reads as something else, such as true
            return value
    return json.dumps(value, ensure_ascii=False)


def _folder_name(text: str) -> str:
    """Return a name that any file system accepts, distinct for distinct texts."""
    name = re.sub(r"[^A-Za-z0-9.+=,_-]", "_", text)
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _split(text: str) -> list[str]:
    """Split at the commas outside brackets and quotes."""
    words, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
        elif character == "," and depth == 0:
            words.append("")
            continue
        words[-1] += character
    return [word.strip() for word in words]

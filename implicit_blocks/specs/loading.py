"""Reading a run's spec: a zoo name or a YAML file, what it extends, and changes from the command line."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from implicit_blocks import registry
from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks._utils.own_parts import zoo_folder
from implicit_blocks.checkpoints.find import SPEC
from implicit_blocks.specs.base import validate
from implicit_blocks.specs.errors import format_error
from implicit_blocks.specs.merging import merge_runs
from implicit_blocks.specs.model import ModelSpec
from implicit_blocks.specs.overrides import apply_overrides
from implicit_blocks.specs.run import BaseRunSpec
from implicit_blocks.specs.tree import MAX_DEPTH, Place, Section, SpecError, ValueBudget, read_yaml, shown

_SUFFIXES = (".yaml", ".yml")
DEFAULT_KIND = "run"
"""Kind of run spec of a file that names none."""
MAX_EXTENDED = 256
"""Most entries of `extends` that one spec may have, in all files together."""


def load_spec(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> BaseRunSpec:
    """Load the run spec of a zoo name (``"mamba2_130m"``) or a YAML file.

    Args:
        name_or_path: a name in the zoo, or the path of a file or of a run's folder; a path that isn't there
            is looked for in the zoo. The shipped zoo comes first, then those of plugins: the folders ``zoo``
            in their packages.
        overrides: changes such as ``"model.solver.kind=anderson"``, the values in YAML.

    Raises:
        SpecError: a ValueError that names place, value and remedy, a line for each thing that is wrong.

    """
    tree = resolve(name_or_path, overrides)
    kind = tree.get("kind", DEFAULT_KIND)
    try:
        spec = registry.entry("run", str(kind)).spec
    except registry.UnknownKindError as error:
        remedy = (
            ""
            if registry.kinds("run") or registry.failures()
            else "; install the distribution, which brings the trainer's sections"
        )
        raise SpecError(f"{tree.value_places.get('kind', name_or_path)}: kind: {error}{remedy}") from None
    try:
        loaded: BaseRunSpec = validate(spec, tree)
    except ValidationError as error:
        raise format_error(error, tree, source=str(name_or_path)) from None
    return loaded


def resolve(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Section:
    """Merge what `load_spec` validates: the file, everything it extends, and all changes.

    Raises:
        SpecError: a file that isn't there or isn't YAML, `extends` in a circle, a malformed change.

    """
    path = _find(os.fspath(name_or_path), folder=None, place=None)
    return apply_overrides(_read(path, _Reading()), overrides)


def read_model_spec(path: Path) -> ModelSpec:
    """Read the spec of a model alone, as stands beside exported weights (``model.yaml``).

    Raises:
        SpecError: it is none.

    """
    tree = read_yaml(path, name=_shown(path))
    try:
        model: ModelSpec = validate(registry.entry("model", str(tree.get("kind"))).spec, tree)
    except registry.UnknownKindError as error:
        raise SpecError(f"{_shown(path)} is no spec of a model: {error}") from None
    except ValidationError as error:
        raise format_error(error, tree, source=str(path)) from None
    return model


def spec_name(name_or_path: str | os.PathLike[str]) -> str:
    """Name a spec by its file: ``llama_1.3b`` for ``zoo/llama_1.3b.yaml``, and for the bare name too."""
    path = Path(name_or_path)
    return path.stem if path.suffix in _SUFFIXES else path.name


def zoo_names() -> list[str]:
    """List the names of the shipped specs."""
    folder = zoo_folder()
    return sorted(path.stem for path in folder.glob("*.yaml")) if folder else []


def _plugin_zoos() -> list[Path]:
    """Locate the folders ``zoo`` in the packages of the plugins in use."""
    folders = []
    for module in registry.plugin_modules().values():
        found = importlib.util.find_spec(module)
        package = importlib.util.find_spec(found.parent) if found and found.parent else None
        folders += [Path(place) / "zoo" for place in (package and package.submodule_search_locations) or ()]
    return [folder for folder in folders if folder.is_dir()]


@dataclass
class _Reading:
    """What one call of `resolve` has read: each file once, however often it is extended."""

    read: dict[Path, Section] = field(default_factory=dict)
    budget: ValueBudget = field(default_factory=ValueBudget)
    merged: int = 0


def _read(path: Path, reading: _Reading, *, chain: tuple[Path, ...] = ()) -> Section:
    """Read a file and lay it over what it extends."""
    if path in reading.read:
        return reading.read[path]
    tree = read_yaml(path, name=_shown(path), budget=reading.budget)
    place = tree.value_places.get("extends")
    named = tree.pop("extends", None)
    parents = named if isinstance(named, list) else [] if named is None else [named]
    chain = (*chain, path)
    merged = Section()
    for parent in parents:
        if not isinstance(parent, str):
            raise SpecError(f"{place}: extends: a name, a path or a list of them, not {shown(parent)}")
        found = _find(parent, folder=path.parent, place=place)
        if found in chain:
            circle = " extends ".join(_shown(link) for link in (*chain[chain.index(found) :], found))
            raise SpecError(f"{place}: extends: in a circle: {circle}; remove one of them")
        reading.merged += 1
        if reading.merged > MAX_EXTENDED:
            raise SpecError(f"{place}: extends: more than {MAX_EXTENDED} files in all; extend fewer")
        if len(chain) >= MAX_DEPTH:
            raise SpecError(f"{place}: extends: more than {MAX_DEPTH} files deep; shorten the chain")
        merged = merge_runs(merged, _read(found, reading, chain=chain))
    reading.read[path] = merged = merge_runs(merged, tree)
    return merged


def _find(name: str, *, folder: Path | None, place: Place | None) -> Path:
    """Find the file that a name or a path means.

    A path is relative to ``folder`` (the extending file's) or the working directory; a bare name means the
    zoo's, or in `extends` first a neighbour's. What isn't there is looked for in the zoo, then in the
    plugins' (which are loaded only then), at last in the working directory.
    """
    where = f"{place}: extends: " if place else ""
    if not name.strip("/"):
        raise SpecError(f"{where}{name!r} names no spec; give a name in the zoo, or the path of a file")
    is_path = name.endswith(_SUFFIXES) or os.sep in name or "/" in name
    zoo = zoo_folder()
    beside = (folder or Path()) / name
    candidates = [beside] if is_path or folder else []
    if zoo is not None:
        candidates += [zoo / name, zoo / name.removeprefix("zoo/")]
    for candidate in candidates:
        if file := _file(candidate, where):
            return file
    stem = spec_name(name)
    plugin_zoos = _plugin_zoos()
    found = [file for folder in plugin_zoos if (file := _file(folder / name.removeprefix("zoo/"), where))]
    if len(found) > 1:
        listed = ", ".join(map(_shown, found))
        raise SpecError(f"{where}several plugins bring a spec {stem!r}: {listed}; give the path of one")
    if found:
        return found[0]
    if file := _file(beside, where):  # a bare name means the zoo's before it means what lies here
        return file
    looked = ""
    if is_path:
        beside_shown = shown(_shown(beside))
        looked = f"{beside_shown} is a folder, " if beside.is_dir() else f"no file {beside_shown}, "
    known = sorted({*zoo_names(), *(path.stem for folder in plugin_zoos for path in folder.glob("*.yaml"))})
    the_zoo = f" The zoo is the folder {zoo}" if zoo is not None and known else ""
    raise SpecError(
        f"{where}{looked}{'and ' if looked else ''}no spec {shown(stem)} in the zoo; "
        f"{did_you_mean(stem, known)}{the_zoo}{registry.absent_plugins()}"
    )


def _file(candidate: Path, where: str) -> Path | None:
    """Find the file of that name, with or without the suffix; of a run's folder, its spec."""
    try:
        if (candidate / SPEC).is_file():
            return (candidate / SPEC).resolve()
        for suffix in ("", *_SUFFIXES) if candidate.name else ():  # ``.`` has none
            file = candidate.with_name(candidate.name + suffix)
            if file.is_file():
                return file.resolve()
    except OSError as error:  # such as a name too long for the file system
        reason = error.strerror or error
        raise SpecError(f"{where}{shown(str(candidate))} can't be read: {reason}") from None
    return None


def _shown(path: Path) -> str:
    """Write a path as a user would."""
    zoo = zoo_folder()
    if zoo is not None and path.is_relative_to(zoo.resolve()):
        return str(Path("zoo") / path.relative_to(zoo.resolve()))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

"""Loading a run's spec: a zoo name or a YAML file, the files that it extends, and command-line overrides.

All of them merge by the same rules (`merge`). A mapping that names another `kind` replaces the existing one;
every other mapping merges key by key; lists and scalars replace. A model that switches to its *twin* keeps
the fields that both kinds have, and loses the phases, which change search settings of the old kind.
OmegaConf's merge has no rule for `kind`, loses the places of entries, and interpolates strings with ``${``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from implicit_blocks import registry
from implicit_blocks._utils.hints import did_you_mean, nearest
from implicit_blocks._utils.own_packages import ROOT
from implicit_blocks.checkpoints.find import SPEC
from implicit_blocks.specs.base import validate
from implicit_blocks.specs.errors import format_error
from implicit_blocks.specs.families import BaseRunSpec, ModelSpec
from implicit_blocks.specs.tree import (
    MAX_DEPTH,
    Place,
    Section,
    SpecError,
    ValueBudget,
    parse_yaml,
    read_yaml,
    shown,
)

_SUFFIXES = (".yaml", ".yml")
DEFAULT_KIND = "run"
"""Kind of the run spec of a file without `kind`."""
MAX_EXTENDED = 256
"""Maximum number of `extends` entries of one spec, counted over all files."""


def load_spec(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> BaseRunSpec:
    """Load the run spec of a zoo name (``"mamba2_130m"``) or a YAML file.

    Args:
        name_or_path: a name in the zoo, or the path of a file or of a run's directory. A path that does not
            exist is looked up in the zoo: first the shipped one, then those of plugins, which are the
            ``zoo`` directories in their packages.
        overrides: changes such as ``"model.solver.kind=anderson"``, with values in YAML.

    Raises:
        SpecError: a ValueError with place, value and remedy, one line per problem.

    """
    tree = resolve(name_or_path, overrides)
    kind = tree.get("kind", DEFAULT_KIND)
    try:
        spec = registry.entry("run", str(kind)).spec
    except registry.UnknownKindError as error:
        remedy = (
            ""
            if registry.kinds("run") or registry.failures()
            else "; install the distribution, which provides the trainer's sections"
        )
        raise SpecError(f"{tree.value_places.get('kind', name_or_path)}: kind: {error}{remedy}") from None
    try:
        loaded: BaseRunSpec = validate(spec, tree)
    except ValidationError as error:
        refused = format_error(error, tree, source=str(name_or_path))
        phases, own = tree.value_places.get("phases"), _find(os.fspath(name_or_path), folder=None, place=None)
        inherited = phases is not None and phases.line is not None and phases.source != _shown(own)
        if inherited and any(each["loc"][:1] == ("phases",) for each in refused.errors()):
            note = f"the phases are inherited from {phases}; set phases: [] to remove them"
            refused = SpecError(f"{refused}\n{note}", refused.errors())
        raise refused from None
    return loaded


def resolve(name_or_path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Section:
    """Return the mapping that `load_spec` validates: the file, everything it extends, and all overrides.

    Raises:
        SpecError: a file that does not exist or is not YAML, circular `extends`, a malformed override.

    """
    path = _find(os.fspath(name_or_path), folder=None, place=None)
    return apply_overrides(_read(path, _Reading()), overrides)


def read_model_spec(path: Path) -> ModelSpec:
    """Read the spec of a model alone, as saved beside exported weights (``model.yaml``).

    Raises:
        SpecError: the file is not the spec of a model.

    """
    tree = read_yaml(path, name=_shown(path))
    try:
        model: ModelSpec = validate(registry.entry("model", str(tree.get("kind"))).spec, tree)
    except registry.UnknownKindError as error:
        raise SpecError(f"{_shown(path)} is not the spec of a model: {error}") from None
    except ValidationError as error:
        raise format_error(error, tree, source=str(path)) from None
    return model


def spec_name(name_or_path: str | os.PathLike[str]) -> str:
    """Return the name of a spec: ``llama_1.3b`` for ``zoo/llama_1.3b.yaml``, and for the bare name."""
    path = Path(name_or_path)
    return path.stem if path.suffix in _SUFFIXES else path.name


# ------------------------------------------------------------------------------------ merging


def merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> Section:
    """Return ``over`` merged into ``base``; neither is changed."""
    if "kind" in over and "kind" in base and over["kind"] != base["kind"]:
        return Section(over)
    merged = Section(base)
    for key, value in over.items():
        below = merged.get(key)
        if isinstance(value, Mapping) and isinstance(below, Mapping):
            value = merge(below, value)
        merged.put(key, value, like=over)
    return merged


def merge_runs(base: Mapping[str, Any], over: Mapping[str, Any]) -> Section:
    """Merge whole run specs, where ``model: {kind: …}`` may switch to a twin."""
    return merge(_as_twin(Section(base), over), over)


def _as_twin(base: Section, over: Mapping[str, Any]) -> Section:
    """Remove the settings that a new kind of model does not have."""
    model, change = base.get("model"), over.get("model")
    if not isinstance(model, Mapping) or not isinstance(change, Mapping):
        return base
    old, new = model.get("kind"), change.get("kind")
    if old is None or new is None or old == new:
        return base
    base.pop("phases", None)
    if new in registry.kinds("model"):  # otherwise validation reports the unknown kind
        spec = registry.entry("model", new).spec
        if old in spec.twin_of:
            kept = Section(model)
            for key in set(kept) - set(spec.model_fields):
                del kept[key]
            kept.put("kind", new, like=change)
            base["model"] = kept
    return base


# ------------------------------------------------------------------------------------ overrides


def apply_overrides(tree: Section, overrides: Sequence[str]) -> Section:
    """Merge overrides into a tree.

    Each override is ``path.to.key=value``, with the value in YAML. A list element is addressed by its index
    or its `name`, as in ``phases.free.until=0.9``. Changes of a `kind` are applied first, whatever their
    order, so that the other settings apply to the new component.

    Raises:
        SpecError: an override is malformed.

    """
    if isinstance(overrides, str | Mapping):
        raise SpecError(
            f"overrides must be a list such as ['training.max_steps=200']; got {shown(overrides)}"
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
            f"{shown(text)} is not an override; write path.to.key=value, such as training.max_steps=200"
        )
    place = Place(f"command line, {shown(text)}")
    if len(keys) > MAX_DEPTH:
        raise SpecError(f"{place}: a path has at most {MAX_DEPTH} keys, this one has {len(keys):,}")
    return keys, parse_yaml(value, source=place.source, at=place), place


def _nested(tree: Any, keys: Sequence[str], value: Any, place: Place) -> Any:
    """Return the value wrapped in the mappings and lists that lead to it from the tree's root."""
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
    raise SpecError(
        f"{place}: {word!r} is not an element of this list of {len(items)}; known: {known or 'none'}"
    )


# ------------------------------------------------------------------------------------ files


def zoo_folder() -> Path | None:
    """Return the directory of the shipped specs; None if they are not installed."""
    folder = ROOT / "zoo"
    return folder if (folder / "__init__.py").is_file() else None


def zoo_names() -> list[str]:
    """Return the names of the shipped specs, sorted."""
    folder = zoo_folder()
    return sorted(path.stem for path in folder.glob("*.yaml")) if folder else []


def _plugin_zoos() -> list[Path]:
    """Return the ``zoo`` directories in the packages of the loaded plugins."""
    folders = []
    for module in registry.plugin_modules().values():
        found = importlib.util.find_spec(module)
        package = importlib.util.find_spec(found.parent) if found and found.parent else None
        folders += [Path(place) / "zoo" for place in (package and package.submodule_search_locations) or ()]
    return [folder for folder in folders if folder.is_dir()]


@dataclass
class _Reading:
    """What one call of `resolve` has read; each file is read once, however often it is extended."""

    read: dict[Path, Section] = field(default_factory=dict)
    budget: ValueBudget = field(default_factory=ValueBudget)
    merged: int = 0


def _read(path: Path, reading: _Reading, *, chain: tuple[Path, ...] = ()) -> Section:
    """Read a file and merge it into the files that it extends."""
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
            raise SpecError(
                f"{place}: extends: should be a name, a path or a list of them; got {shown(parent)}"
            )
        found = _find(parent, folder=path.parent, place=place)
        if found in chain:
            circle = " extends ".join(_shown(link) for link in (*chain[chain.index(found) :], found))
            raise SpecError(f"{place}: extends: circular: {circle}; remove one of them")
        reading.merged += 1
        if reading.merged > MAX_EXTENDED:
            raise SpecError(f"{place}: extends: more than {MAX_EXTENDED} files in all; extend fewer")
        if len(chain) >= MAX_DEPTH:
            raise SpecError(f"{place}: extends: more than {MAX_DEPTH} files deep; shorten the chain")
        merged = merge_runs(merged, _read(found, reading, chain=chain))
    reading.read[path] = merged = merge_runs(merged, tree)
    return merged


def _find(name: str, *, folder: Path | None, place: Place | None) -> Path:
    """Return the file that a name or a path refers to.

    A path is relative to ``folder`` (that of the extending file) or the working directory. A bare name refers
    to the zoo; in `extends` it refers first to a file in the same directory. The order of the lookup is: the
    path, the shipped zoo, the zoos of plugins (loaded only now), the working directory.
    """
    where = f"{place}: extends: " if place else ""
    if not name.strip("/"):
        raise SpecError(f"{where}{name!r} is not a spec; give a name in the zoo, or the path of a file")
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
        raise SpecError(f"{where}several plugins have a spec {stem!r}: {listed}; give the path of one")
    if found:
        return found[0]
    if file := _file(beside, where):  # a bare name: the zoo takes precedence over the working directory
        return file
    looked = ""
    if is_path:
        beside_shown = shown(_shown(beside))
        problem = "is a directory without a spec" if beside.is_dir() else "does not exist"
        looked = f"{beside_shown} {problem}, and "
    known = sorted({*zoo_names(), *(path.stem for folder in plugin_zoos for path in folder.glob("*.yaml"))})
    files = beside.parent.glob("*") if beside.parent.is_dir() else ()
    beside_it = {file.stem: file.name for file in files if file.suffix in _SUFFIXES}
    hint = did_you_mean(stem, known)
    if (near := nearest(stem, {*known, *beside_it})) in beside_it:
        hint = f"did you mean {os.path.join(os.path.dirname(name), beside_it[near])!r}?"
    if zoo is not None and known:
        hint += f"{'' if hint.endswith('?') else '.'} The zoo is the directory {zoo}"
    missing = f"there is no spec {shown(stem)} in the zoo; {hint}"
    raise SpecError(f"{where}{looked}{missing}{registry.absent_plugins()}")


def _file(candidate: Path, where: str) -> Path | None:
    """Return the file of that name, with or without suffix, or the spec in a run's directory of that name."""
    try:
        if (candidate / SPEC).is_file():
            return (candidate / SPEC).resolve()
        for suffix in ("", *_SUFFIXES) if candidate.name else ():  # ``.`` has no name
            file = candidate.with_name(candidate.name + suffix)
            if file.is_file():
                return file.resolve()
    except OSError as error:  # such as a name too long for the file system
        reason = error.strerror or error
        raise SpecError(f"{where}{shown(str(candidate))} cannot be read: {reason}") from None
    return None


def _shown(path: Path) -> str:
    """Return a path as users write it: relative to the zoo or the working directory where possible."""
    zoo = zoo_folder()
    if zoo is not None and path.is_relative_to(zoo.resolve()):
        return str(Path("zoo") / path.relative_to(zoo.resolve()))
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)

"""The registered kinds: (family, kind) → spec class and builder, for built-ins and plugins alike.

Everything is loaded at the first lookup: the built-in kinds from the modules in `BUILT_IN`, then plugins,
found by the entry-point group `implicit_blocks`, in the order of their names. A plugin that fails, or whose
module states an incompatible plugin interface (``api_version = "…"``), is listed in `failures()` and does
not affect the others. The environment variable `IMPLICIT_BLOCKS_PLUGINS` disables all third-party plugins
(``none``) or all but some (``acme,other``).

The registry imports no specs: it accepts any pydantic model with a `family`, and imports the modules that
register by name.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points
from importlib.metadata import version as distribution_version
from types import ModuleType
from typing import Any, cast

import pluggy
from pydantic import BaseModel

from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks._utils.own_packages import load_own
from implicit_blocks.registry import hooks as hookspecs
from implicit_blocks.registry.api_version import check_api_version, stated_api_version
from implicit_blocks.registry.hooks import GROUP, Builder

PLUGINS_VARIABLE = "IMPLICIT_BLOCKS_PLUGINS"
"""Environment variable: ``none``, or a comma-separated list of the entry points to load."""

OWN_DISTRIBUTION = "implicit_blocks"

BUILT_IN = (
    "implicit_blocks.solvers",
    "implicit_blocks.gradients",
    "implicit_blocks.exits",
    "implicit_blocks.mixers",
    "implicit_blocks.mlps",
    "implicit_blocks.injections",
    "implicit_blocks.starts",
    "implicit_blocks.depths",
    "implicit_blocks.scalings",
    "implicit_blocks.models.objective_specs",
    "implicit_blocks.models.implicit_spec",
)
"""The modules that register the built-in kinds, through the hook that plugins use."""


class UnknownKindError(ValueError):
    """No such family or kind is registered."""


class ContractError(ValueError):
    """A component breaks a contract; the message names it, its plugin, the contract, and the remedy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered kind: its spec class, its builder, and the distribution that provides it."""

    family: str
    kind: str
    spec: type[Any]
    builder: Builder
    owner: str
    version: str

    def resolve_builder(self) -> Callable[..., Any]:
        """Return the builder; it is imported now if it was registered by name.

        Raises:
            ImportError: the import failed; names the kind that needs it.

        """
        if not isinstance(self.builder, str):
            return self.builder
        try:
            target = _imported(self.builder)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"{self.family} {self.kind!r} of {self.owner} is built by {self.builder!r}, "
                f"which cannot be imported: {error}"
            ) from error
        return cast(Callable[..., Any], target)


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that is not in use, and the reason."""

    name: str
    owner: str
    version: str
    reason: str


@dataclass
class _State:
    entries: dict[tuple[str, str], Entry] = field(default_factory=dict)
    failures: list[PluginFailure] = field(default_factory=list)
    switched_off: list[str] = field(default_factory=list)
    modules: dict[str, str] = field(default_factory=dict)
    loaded: bool = False


_state = _State()
_lock = threading.RLock()


def add(
    family: str, spec_class: type[Any], builder: Builder, *, owner: str, version: str | None = None
) -> None:
    """Register one kind; its name is the default of the spec class's `kind`.

    Args:
        family: the family, equal to ``spec_class.family``.
        spec_class: a `ComponentSpec` subclass.
        builder: called as ``builder(spec, **context)``; or an import string, resolved by `build`.
        owner: the distribution that provides the kind.
        version: its version; by default that of the installed distribution.

    Raises:
        ValueError: the kind is taken, or spec class, family and builder are inconsistent.

    """
    entry = _checked_entry(family, spec_class, builder, owner, version or _version_of(owner))
    with _lock:
        # Load everything first, so that a clash is found here and not at a later lookup.
        _load()
        _refuse_clash(entry, _state.entries)
        _state.entries[family, entry.kind] = entry


def entry(family: str, kind: str) -> Entry:
    """Return the entry of a family and a kind.

    Raises:
        UnknownKindError: not registered; names the nearest known kind, and plugins that are not in use.

    """
    _load()
    found = _state.entries.get((family, kind))
    if found is None:
        raise UnknownKindError(
            f"unknown {family} {kind!r}; {did_you_mean(kind, kinds(family))}{absent_plugins()}"
        )
    return found


def kinds(family: str) -> list[str]:
    """Return the kinds of a family, sorted; empty for an unknown family."""
    _load()
    return sorted(kind for known, kind in _state.entries if known == family)


def families() -> list[str]:
    """Return the families with at least one kind, sorted."""
    _load()
    return sorted({family for family, _ in _state.entries})


def failures() -> list[PluginFailure]:
    """Return the plugins that could not be used, each with the reason."""
    _load()
    return list(_state.failures)


def switched_off() -> list[str]:
    """Return the names of the installed plugins that `IMPLICIT_BLOCKS_PLUGINS` disables."""
    _load()
    return list(_state.switched_off)


def plugin_modules() -> dict[str, str]:
    """Return the modules of the third-party plugins in use, by entry-point name."""
    _load()
    return dict(_state.modules)


def absent_plugins() -> str:
    """Return a note in brackets on plugins that are not in use, which may explain an unknown name."""
    _load()
    notes = [
        f"{'package' if failure.owner == OWN_DISTRIBUTION else 'plugin'} {failure.name!r} could not be used: "
        f"{failure.reason}"
        for failure in _state.failures
    ]
    if _state.switched_off:
        notes.append(f"{PLUGINS_VARIABLE} disables: {', '.join(_state.switched_off)}")
    return f" ({'; '.join(notes)})" if notes else ""


def build(spec: Any, **context: Any) -> Any:
    """Build the component that a spec describes: ``builder(spec, **context)``.

    Raises:
        UnknownKindError: the spec's kind is not registered.
        ContractError: the builder does not accept these arguments, or does not return a component of the
            family.
        ValueError: the spec's class is not the registered one, or the spec is that of a run.

    """
    family, kind = getattr(type(spec), "family", None), getattr(spec, "kind", None)
    if not isinstance(family, str) or not isinstance(kind, str):
        raise ValueError(f"build() expects a component's spec, such as PicardSpec(); got {spec!r}")
    if family == "run":
        raise ValueError("build() expects a component's spec, not that of a run; pass its model: spec.model")
    found = entry(family, kind)
    if found.spec is not type(spec):
        raise ValueError(
            f"{family} {kind!r} is registered with {found.spec.__qualname__}, not {type(spec).__qualname__}; "
            "choose another kind for the plugin's class"
        )
    builder, base = found.resolve_builder(), type(spec).builds
    try:
        built = builder(spec, **context)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # raised inside the builder
        arguments = ", ".join(["spec", *(f"{name}=…" for name in context)])
        raise _broken(found, f"its builder cannot be called as builder({arguments}): {error}") from error
    if base is not None and not isinstance(built, _imported(base)):
        returned = f"its builder returned a {type(built).__name__}"
        raise _broken(found, f"{returned}; return an instance of {base.replace(':', '.')}")
    return built


def _imported(path: str) -> Any:
    """Return the object at ``"package.module:Class.method"``."""
    module, _, names = path.partition(":")
    target: Any = importlib.import_module(module)
    for name in names.split("."):
        target = getattr(target, name)
    return target


def _broken(entry: Entry, found: str) -> ValueError:
    return ContractError(
        f"{entry.family} {entry.kind!r} of {entry.owner} {entry.version} breaks the contract 'builds its "
        f"family': {found}"
    )


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Start with an empty registry, which loads plugins again, and restore the old one on exit; for tests."""
    global _state
    with _lock:
        before, _state = _state, _State()
    try:
        yield
    finally:
        with _lock:
            _state = before


def _load() -> None:
    """Load the built-in kinds, then this distribution's plugins, then third-party ones; once."""
    with _lock:
        if _state.loaded:
            return
        _state.loaded = True  # set first: a plugin may look up kinds while it is imported
        own = _version_of(OWN_DISTRIBUTION)
        for module in BUILT_IN:
            _register(importlib.import_module(module), module, OWN_DISTRIBUTION, own)
        allowed = _allowed_names()
        found = sorted(entry_points(group=GROUP), key=lambda point: (not _is_own(point), point.name))
        for point in found:
            if _is_own(point) or allowed is None or point.name in allowed:
                _load_entry_point(point)
            else:
                _state.switched_off.append(point.name)
        for name in sorted((allowed or set()) - {point.name for point in found}):
            reason = f"listed in {PLUGINS_VARIABLE}, but no plugin of that name is installed"
            _state.failures.append(PluginFailure(name, "not installed", "", reason))


def _allowed_names() -> set[str] | None:
    """Return the third-party entry points to load; None for all."""
    value = os.environ.get(PLUGINS_VARIABLE, "").strip()
    if not value:
        return None
    return set() if value == "none" else {name.strip() for name in value.split(",") if name.strip()}


def _load_entry_point(point: EntryPoint) -> None:
    owner, version = (point.dist.name, point.dist.version) if point.dist else ("unknown", "unknown")
    try:
        if _is_own(point):
            load_own(point.module.partition(".")[0])
        stated = stated_api_version(point.module)
        if stated is not None:
            check_api_version(stated, point.name)  # before the import, which may fail for another interface
        plugin = point.load()
        if stated is None and not _is_own(point):
            check_api_version(getattr(plugin, "api_version", None), point.name)
        _register(plugin, point.name, owner, version)
        if not _is_own(point):
            _state.modules[point.name] = point.module
    except (KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:  # even SystemExit: one plugin must not affect the others
        reason = f"{type(error).__name__}: {error}"
        _state.failures.append(PluginFailure(point.name, owner, version, reason))


def _hidden_by_a_folder(plugin: object) -> str:
    """Return a note if a plain directory, such as one in the working directory, hides the plugin."""
    if not isinstance(plugin, ModuleType) or getattr(plugin, "__file__", None) is not None:
        return ""
    folders = ", ".join(map(str, getattr(plugin, "__path__", ())))
    return f" (the directory {folders} was imported instead; run from another directory)"


def _register(plugin: object, name: str, owner: str, version: str) -> None:
    """Register all of a plugin's kinds, or none."""
    manager = pluggy.PluginManager(GROUP)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, name)
        manager.check_pending()  # a hook of an unknown name
    except pluggy.PluginValidationError as error:
        message = " ".join(str(error).partition(" in plugin ")[0].split())
        raise ValueError(f"{message}; the hook is `register_components(add)`") from None
    if not manager.hook.register_components.get_hookimpls():
        raise ValueError(
            "it registers nothing; decorate a function `register_components(add)` with "
            "implicit_blocks.hookimpl" + _hidden_by_a_folder(plugin)
        )
    staged: dict[tuple[str, str], Entry] = {}

    def add(family: str, spec_class: type[Any], builder: Builder) -> None:
        new = _checked_entry(family, spec_class, builder, owner, version)
        _refuse_clash(new, {**_state.entries, **staged})
        staged[family, new.kind] = new

    manager.hook.register_components(add=add)
    _state.entries.update(staged)


def _checked_entry(family: str, spec_class: type[Any], builder: Builder, owner: str, version: str) -> Entry:
    declared = getattr(spec_class, "family", None)
    is_spec = isinstance(spec_class, type) and issubclass(spec_class, BaseModel) and isinstance(declared, str)
    if not is_spec:
        raise ValueError(
            f"{spec_class!r} is not a ComponentSpec; derive it from the family's base, such as MixerSpec"
        )
    if declared != family:
        raise ValueError(
            f"{spec_class.__qualname__} is a spec of family {declared!r}, not {family!r}; "
            "derive it from that family's base class"
        )
    kind = spec_class.model_fields["kind"].default
    if not (isinstance(kind, str) and kind):
        raise ValueError(f'{spec_class.__qualname__} has no kind; add a field `kind: Literal["…"] = "…"`')
    if not (callable(builder) or (isinstance(builder, str) and re.fullmatch(r"[\w.]+:[\w.]+", builder))):
        raise ValueError(
            f"the builder of {family} {kind!r} is {builder!r}; pass a callable or 'package.module:Name'"
        )
    return Entry(family, kind, spec_class, builder, owner, version)


def _refuse_clash(new: Entry, entries: dict[tuple[str, str], Entry]) -> None:
    taken = entries.get((new.family, new.kind))
    if taken is not None:
        raise ValueError(
            f"{new.family} {new.kind!r} is already registered by {taken.owner} {taken.version}; "
            f"choose another kind, such as '{new.owner.replace('-', '_')}.{new.kind}'"
        )


def _is_own(point: EntryPoint) -> bool:
    return point.dist is not None and re.sub(r"[-_.]+", "_", point.dist.name).lower() == OWN_DISTRIBUTION


def _version_of(owner: str) -> str:
    try:
        return distribution_version(owner)
    except PackageNotFoundError:
        return "unknown"

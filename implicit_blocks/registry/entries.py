"""Which kinds there are: (family, kind) → spec class and builder, for built-ins and plugins alike.

Plugins are found by the entry-point group `implicit_blocks` and loaded at the first lookup, in the order of
their names. One that can't be used is named in `failures()` and takes nothing else down; so is one that
says, by ``api_version = "…"`` in its module, that it was written for another plugin interface. The
environment variable `IMPLICIT_BLOCKS_PLUGINS` switches third parties off (``none``) or allows some
(``acme,other``).
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

from implicit_blocks._utils.hints import did_you_mean
from implicit_blocks._utils.own_parts import load_own
from implicit_blocks.registry import hooks as hookspecs
from implicit_blocks.registry.api_version import check_api_version, stated_api_version
from implicit_blocks.registry.hooks import GROUP, Builder

PLUGINS_VARIABLE = "IMPLICIT_BLOCKS_PLUGINS"
"""Environment variable: ``none``, or a comma-separated list of the entry-point names that may load."""

OWN_DISTRIBUTION = "implicit_blocks"


class UnknownKindError(ValueError):
    """No such family or kind is registered."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered kind: its spec class, what builds it, and the distribution that it came from."""

    family: str
    kind: str
    spec: type[Any]
    builder: Builder
    owner: str
    version: str

    def resolve_builder(self) -> Callable[..., Any]:
        """Give the builder itself, imported now if it was registered by name.

        Raises:
            ImportError: there is nothing of that name; says which kind needs it.

        """
        if not isinstance(self.builder, str):
            return self.builder
        try:
            target = _imported(self.builder)
        except (ImportError, AttributeError) as error:
            raise ImportError(
                f"{self.family} {self.kind!r} of {self.owner} is built by {self.builder!r}, "
                f"which can't be imported: {error}"
            ) from error
        return cast(Callable[..., Any], target)


@dataclass(frozen=True, slots=True)
class PluginFailure:
    """A plugin that is not in use, and why."""

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
    """Register one kind, named by the default of the spec class's `kind`.

    Args:
        family: the family, equal to ``spec_class.family``.
        spec_class: a `ComponentSpec` subclass.
        builder: called as ``builder(spec, **context)``; or an import string, resolved when it is called for.
        owner: the distribution that brings the kind.
        version: its version; looked up where absent.

    Raises:
        ValueError: the kind is taken, or spec class, family and builder don't fit.

    """
    entry = _checked_entry(family, spec_class, builder, owner, version or _version_of(owner))
    with _lock:
        # Built-ins and plugins come first, so that a clash with them is found here and not at a later lookup.
        _load()
        _refuse_clash(entry, _state.entries)
        _state.entries[family, entry.kind] = entry


def entry(family: str, kind: str) -> Entry:
    """Look up what is registered under a family and a kind.

    Raises:
        UnknownKindError: nothing is; names the nearest known kind, and plugins that failed or are off.

    """
    _load()
    found = _state.entries.get((family, kind))
    if found is None:
        raise UnknownKindError(
            f"unknown {family} {kind!r}; {did_you_mean(kind, kinds(family))}{absent_plugins()}"
        )
    return found


def kinds(family: str) -> list[str]:
    """Kinds of a family, sorted; none for a family that nobody registered anything in."""
    _load()
    return sorted(kind for known, kind in _state.entries if known == family)


def families() -> list[str]:
    """Families with at least one kind, sorted."""
    _load()
    return sorted({family for family, _ in _state.entries})


def failures() -> list[PluginFailure]:
    """Plugins that could not be used, each with its reason."""
    _load()
    return list(_state.failures)


def switched_off() -> list[str]:
    """Names of the installed plugins that `IMPLICIT_BLOCKS_PLUGINS` keeps out."""
    _load()
    return list(_state.switched_off)


def plugin_modules() -> dict[str, str]:
    """Modules of the third parties' plugins in use, by the names of their entry points."""
    _load()
    return dict(_state.modules)


def absent_plugins() -> str:
    """Name, in brackets, what may explain that something is unknown: plugins installed but not in use."""
    _load()
    notes = [
        f"{'package' if failure.owner == OWN_DISTRIBUTION else 'plugin'} {failure.name!r} could not be used: "
        f"{failure.reason}"
        for failure in _state.failures
    ]
    if _state.switched_off:
        notes.append(f"{PLUGINS_VARIABLE} switches off: {', '.join(_state.switched_off)}")
    return f" ({'; '.join(notes)})" if notes else ""


def build(spec: Any, **context: Any) -> Any:
    """Make what a spec describes: ``builder(spec, **context)``.

    Raises:
        UnknownKindError: the spec's kind is not registered.
        ValueError: the spec is of another class than the registered one; a ``ContractError``, which is one
            too: the builder can't be called so, or what it returned is no component of the family.

    """
    family, kind = getattr(type(spec), "family", None), getattr(spec, "kind", None)
    if not isinstance(family, str) or not isinstance(kind, str):
        raise ValueError(f"build() takes a component's spec, such as PicardSpec(), not {spec!r}")
    found = entry(family, kind)
    if found.spec is not type(spec):
        raise ValueError(
            f"{family} {kind!r} is registered with {found.spec.__qualname__}, not {type(spec).__qualname__}; "
            "give the plugin's class a kind of its own"
        )
    builder, base = found.resolve_builder(), type(spec).builds
    try:
        built = builder(spec, **context)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # from within the builder
        arguments = ", ".join(["spec", *(f"{name}=…" for name in context)])
        raise _broken(found, f"its builder can't be called as builder({arguments}): {error}") from error
    if base is not None and not isinstance(built, _imported(base)):
        returned = f"its builder returned a {type(built).__name__}"
        raise _broken(found, f"{returned}; return a {base.replace(':', '.')}")
    return built


def _imported(path: str) -> Any:
    """Return what ``"package.module:Class.method"`` names."""
    module, _, names = path.partition(":")
    target: Any = importlib.import_module(module)
    for name in names.split("."):
        target = getattr(target, name)
    return target


def _broken(entry: Entry, found: str) -> ValueError:
    from implicit_blocks.registry.contracts import ContractError  # which asks us who brings what

    return ContractError(
        f"{entry.family} {entry.kind!r} of {entry.owner} {entry.version} breaks the contract 'builds a "
        f"{entry.family}': {found}"
    )


@contextlib.contextmanager
def isolated() -> Iterator[None]:
    """Undo on leaving whatever was registered inside, and load plugins anew inside: for tests."""
    global _state
    with _lock:
        before, _state = _state, _State()
    try:
        yield
    finally:
        with _lock:
            _state = before


def _load() -> None:
    """Load built-ins, then our own distribution's plugins, then third parties', once."""
    with _lock:
        if _state.loaded:
            return
        _state.loaded = True  # first: a plugin may look kinds up while it is imported
        from implicit_blocks.registry import builtins

        own = _version_of(OWN_DISTRIBUTION)
        _register(builtins, "builtins", OWN_DISTRIBUTION, own)
        allowed = _allowed_names()
        found = sorted(entry_points(group=GROUP), key=lambda point: (not _is_own(point), point.name))
        for point in found:
            if _is_own(point) or allowed is None or point.name in allowed:
                _load_entry_point(point)
            else:
                _state.switched_off.append(point.name)
        for name in sorted((allowed or set()) - {point.name for point in found}):
            reason = f"{PLUGINS_VARIABLE} names it, but no plugin of that name is installed"
            _state.failures.append(PluginFailure(name, "not installed", "", reason))


def _allowed_names() -> set[str] | None:
    """Third-party entry points that may load; None for all."""
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
            check_api_version(stated, point.name)  # first: for another interface it may not even import
        plugin = point.load()
        if stated is None and not _is_own(point):
            check_api_version(getattr(plugin, "api_version", None), point.name)
        _register(plugin, point.name, owner, version)
        if not _is_own(point):
            _state.modules[point.name] = point.module
    except (KeyboardInterrupt, MemoryError):
        raise
    except (
        BaseException
    ) as error:  # a plugin may raise anything, SystemExit too, and must not take others down
        reason = f"{type(error).__name__}: {error}"
        _state.failures.append(PluginFailure(point.name, owner, version, reason))


def _hidden_by_a_folder(plugin: object) -> str:
    """Say so where a plain folder was imported: one of the module's name, in the working directory."""
    if not isinstance(plugin, ModuleType) or getattr(plugin, "__file__", None) is not None:
        return ""
    folders = ", ".join(map(str, getattr(plugin, "__path__", ())))
    return f" (what was imported is the folder {folders}, which hides it: run from elsewhere)"


def _register(plugin: object, name: str, owner: str, version: str) -> None:
    """Take all of a plugin's kinds, or none."""
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
            "it registers nothing; mark a function `register_components(add)` with implicit_blocks.hookimpl"
            + _hidden_by_a_folder(plugin)
        )
    staged: dict[tuple[str, str], Entry] = {}

    def stage(family: str, spec_class: type[Any], builder: Builder) -> None:
        new = _checked_entry(family, spec_class, builder, owner, version)
        _refuse_clash(new, {**_state.entries, **staged})
        staged[family, new.kind] = new

    manager.hook.register_components(add=stage)
    _state.entries.update(staged)


def _checked_entry(family: str, spec_class: type[Any], builder: Builder, owner: str, version: str) -> Entry:
    from implicit_blocks.specs.base import ComponentSpec

    if not (isinstance(spec_class, type) and issubclass(spec_class, ComponentSpec)):
        raise ValueError(
            f"{spec_class!r} is no ComponentSpec; derive it from the family's base, such as MixerSpec"
        )
    declared = getattr(spec_class, "family", None)
    if declared != family:
        raise ValueError(
            f"{spec_class.__qualname__} is a spec of family {declared!r}, not {family!r}; "
            "derive it from that family's base class"
        )
    kind = spec_class.model_fields["kind"].default
    if not (isinstance(kind, str) and kind):
        raise ValueError(
            f'{spec_class.__qualname__} names no kind; give it a field `kind: Literal["…"] = "…"`'
        )
    if not (callable(builder) or (isinstance(builder, str) and re.fullmatch(r"[\w.]+:[\w.]+", builder))):
        raise ValueError(
            f"the builder of {family} {kind!r} is {builder!r}; give a callable or 'package.module:Name'"
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

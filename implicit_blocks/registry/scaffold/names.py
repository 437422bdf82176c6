"""The names in a new plugin, and checks that they are not taken."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution, entry_points

from implicit_blocks import registry
from implicit_blocks.registry.hooks import GROUP

FAMILIES = ("mixer", "solver", "gradient")
"""The families with templates."""

LONGEST_NAME = 30
"""Maximum number of characters; generated lines then have at most 110 characters."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class PluginNames:
    """All names derived from a plugin's name: ``acme_shift`` provides the kind ``acme_shift``."""

    name: str
    """Name of the entry point and of the kind."""
    family: str

    @property
    def distribution(self) -> str:
        """Name of the distribution: ``implicit-blocks-acme-shift``."""
        return "implicit-blocks-" + self.name.replace("_", "-")

    @property
    def module(self) -> str:
        """Name of the Python package: ``implicit_blocks_acme_shift``."""
        return f"implicit_blocks_{self.name}"

    @property
    def class_name(self) -> str:
        """Name of the component's class, ``AcmeShift``; the spec is ``AcmeShiftSpec``."""
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def run_spec(self) -> str:
        """Name of the run spec in the plugin's zoo."""
        return f"word_problem_s3_{self.name}"


def choose_names(name: str, family: str) -> PluginNames:
    """Check a plugin's name against the rules and against all installed names, and return the derived names.

    Raises:
        ValueError: the family is unknown; the name is not a lower-case identifier, too long, reserved, or
            taken by a kind, a plugin, a distribution, a module or a spec of the zoo.

    """
    if family not in FAMILIES:
        raise ValueError(f"no template for family {family!r}; choose one of {', '.join(FAMILIES)}")
    _check_form(name)
    names = PluginNames(name, family)
    if taken := _taken_by(names):
        raise ValueError(f"the plugin name {name!r} is taken: {taken}; choose another, such as 'my_{name}'")
    return names


def _check_form(name: str) -> None:
    if not _NAME.fullmatch(name):
        near = re.sub(r"[^a-z0-9]+", "_", name.casefold()).strip("_")
        near = f"p_{near}" if near[:1].isdigit() else near
        example = near[:LONGEST_NAME].strip("_") or "acme_shift"
        raise ValueError(
            f"the plugin name {name!r} is not a lower-case identifier; use letters, digits and single "
            f"underscores between them, such as {example!r}"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ValueError(f"the plugin name {name!r} is a Python keyword; choose another, such as 'my_{name}'")
    if len(name) > LONGEST_NAME:
        raise ValueError(
            f"the plugin name {name!r} has {len(name)} characters; choose at most {LONGEST_NAME}"
        )


def _taken_by(names: PluginNames) -> str | None:
    """Return what already uses one of the names, or None."""
    from implicit_blocks.specs.loading import zoo_names

    for family in registry.families():
        if names.name in registry.kinds(family):
            entry = registry.entry(family, names.name)
            return f"{family} {names.name!r} is registered by {entry.owner} {entry.version}"
    for point in entry_points(group=GROUP):
        if point.name == names.name:
            owner = f"{point.dist.name} {point.dist.version}" if point.dist else "a distribution"
            return f"{owner} has a plugin of this name"
    if names.name in sys.stdlib_module_names:
        return f"Python's standard library has a module {names.name!r}"
    for module in (names.module, names.name):
        if _is_module(module):
            return f"a module {module!r} is installed"
    try:
        return f"distribution {distribution(names.distribution).name!r} is installed"
    except PackageNotFoundError:
        pass
    if names.run_spec in zoo_names():
        return f"the zoo has a spec {names.run_spec!r}, the name of the plugin's run spec"
    return None


def _is_module(name: str) -> bool:
    """Whether an import would find a module of this name; directories without code do not count."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # loaded without an ordinary spec: it exists
        return True
    return found is not None and found.origin is not None

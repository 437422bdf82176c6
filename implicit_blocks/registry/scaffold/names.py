"""What a new plugin's parts are called, and whether anything else is called that already."""

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
"""The families that there are templates for."""

LONGEST_NAME = 30
"""Characters: what is written keeps its lines under 110 with any such name."""

_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")


@dataclass(frozen=True)
class PluginNames:
    """Everything that follows from a plugin's name: ``acme_shift`` brings the kind ``acme_shift``."""

    name: str
    """Of the entry point and of the kind."""
    family: str

    @property
    def distribution(self) -> str:
        """Name to install it by: ``implicit-blocks-acme-shift``."""
        return "implicit-blocks-" + self.name.replace("_", "-")

    @property
    def module(self) -> str:
        """Name to import it by: ``implicit_blocks_acme_shift``."""
        return f"implicit_blocks_{self.name}"

    @property
    def class_name(self) -> str:
        """Name of the component's class, ``AcmeShift``; its spec's is ``AcmeShiftSpec``."""
        return "".join(part.capitalize() for part in self.name.split("_"))

    @property
    def run_spec(self) -> str:
        """Name of the run spec in the plugin's zoo."""
        return f"word_problem_s3_{self.name}"


def choose_names(name: str, family: str) -> PluginNames:
    """Check a plugin's name against the rules and against everything installed.

    Raises:
        ValueError: the family is unknown; the name is no identifier in lower case, too long, reserved, or
            taken by a kind, a plugin, a distribution, a module or a spec of the zoo. Says by which, and what
            to do.

    """
    if family not in FAMILIES:
        raise ValueError(f"there is no template for family {family!r}; choose one of {', '.join(FAMILIES)}")
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
            f"the plugin name {name!r} is no identifier in lower case; choose letters, digits and single "
            f"underscores between them, such as {example!r}"
        )
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ValueError(f"the plugin name {name!r} is a word of Python; choose another, such as 'my_{name}'")
    if len(name) > LONGEST_NAME:
        raise ValueError(
            f"the plugin name {name!r} has {len(name)} characters; choose at most {LONGEST_NAME}"
        )


def _taken_by(names: PluginNames) -> str | None:
    """Say what has one of the names already, or None."""
    from implicit_blocks.specs.loading import zoo_names

    for family in registry.families():
        if names.name in registry.kinds(family):
            entry = registry.entry(family, names.name)
            return f"{family} {names.name!r} is registered by {entry.owner} {entry.version}"
    for point in entry_points(group=GROUP):
        if point.name == names.name:
            owner = f"{point.dist.name} {point.dist.version}" if point.dist else "a distribution"
            return f"{owner} has a plugin of that name"
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
        return f"the zoo has a spec {names.run_spec!r}, which its run spec would be called"
    return None


def _is_module(name: str) -> bool:
    """Whether an import would find code of that name; a mere folder beside us is none."""
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):  # a module that is loaded in an odd way: it is there
        return True
    return found is not None and found.origin is not None

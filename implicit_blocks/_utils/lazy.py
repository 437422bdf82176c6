"""Names of a package that are imported on first use, so that importing the package imports no torch."""

from __future__ import annotations

import ast
import pkgutil
import sys
from collections.abc import Callable, Mapping
from functools import cache
from importlib import import_module
from typing import Any

GetAttribute = Callable[[str], Any]


def names_of_stub(package: str) -> GetAttribute:
    """Return a package's ``__getattr__`` for the names that its stub imports.

    The stub, ``__init__.pyi``, is the only place where the names are written: type checkers read it as usual,
    and here it is parsed for the module that each name comes from. ``from module import *`` stands for the
    module's ``__all__``.

    Args:
        package: the package's ``__name__``.

    """

    @cache
    def statements() -> list[tuple[str, str]]:
        stub = pkgutil.get_data(package, "__init__.pyi")
        assert stub is not None
        imports = [node for node in ast.parse(stub).body if isinstance(node, ast.ImportFrom)]
        return [(alias.name, str(node.module)) for node in imports for alias in node.names]

    @cache
    def explicit() -> dict[str, str]:
        return {name: module for name, module in statements() if name != "*"}

    @cache
    def complete() -> dict[str, str]:
        starred = [module for name, module in statements() if name == "*"]
        return {name: module for module in starred for name in import_module(module).__all__} | explicit()

    def home(name: str) -> str | None:
        # Starred modules export classes. A lower-case name may be a submodule, and this lookup a part of the
        # import of a starred module.
        return explicit().get(name) or (complete().get(name) if name[:1].isupper() else None)

    return _lazy_attributes(package, home, lambda: sorted(complete()))


def names_of_components(
    package: str, register_components: Callable[[Any], None], **others: str
) -> GetAttribute:
    """Return a package's ``__getattr__`` for the components that it registers.

    Each registration gives two names: the spec class, and the class that its import string names.

    Args:
        package: the package's ``__name__``.
        register_components: its hook.
        others: further names, each with the module that defines it.

    """

    @cache
    def homes() -> Mapping[str, str]:
        found = dict(others)

        def add(family: str, spec_class: type[Any], builder: str) -> None:
            module, _, target = builder.partition(":")
            found[spec_class.__name__] = spec_class.__module__
            found[target.partition(".")[0]] = module

        register_components(add)
        return found

    return _lazy_attributes(package, lambda name: homes().get(name), lambda: sorted(homes()))


def _lazy_attributes(
    package: str, home: Callable[[str], str | None], names: Callable[[], list[str]]
) -> GetAttribute:
    def get_attribute(name: str) -> Any:
        if name == "__all__":
            return names()
        module = None if name.startswith("__") else home(name)
        if module is None:
            # With name and obj, Python appends the nearest name that the package has.
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}", name=name, obj=sys.modules[package]
            )
        value = getattr(import_module(module), name)
        setattr(sys.modules[package], name, value)
        return value

    return get_attribute

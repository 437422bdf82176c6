"""The registry of components: kinds, plugins, and the hook through which both register. Imports no torch.

``contracts`` (which component breaks a contract) and ``scaffold`` (writing a new plugin) build on it.
"""

from implicit_blocks.registry.entries import (
    OWN_DISTRIBUTION,
    PLUGINS_VARIABLE,
    ContractError,
    Entry,
    PluginFailure,
    UnknownKindError,
    absent_plugins,
    add,
    build,
    entry,
    failures,
    families,
    isolated,
    kinds,
    plugin_modules,
    switched_off,
)

__all__ = [
    "OWN_DISTRIBUTION",
    "PLUGINS_VARIABLE",
    "ContractError",
    "Entry",
    "PluginFailure",
    "UnknownKindError",
    "absent_plugins",
    "add",
    "build",
    "entry",
    "failures",
    "families",
    "isolated",
    "kinds",
    "plugin_modules",
    "switched_off",
]

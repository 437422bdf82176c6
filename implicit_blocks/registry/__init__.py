"""The registry of components: kinds, plugins, contracts and the hook through which both register.

Imports no torch.
"""

from implicit_blocks.registry.entries import (
    OWN_DISTRIBUTION,
    PLUGINS_VARIABLE,
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

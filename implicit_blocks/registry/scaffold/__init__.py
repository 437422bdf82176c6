"""Creating a new plugin: an installable distribution, written from templates, that works unchanged."""

from implicit_blocks.registry.scaffold.names import FAMILIES, PluginNames, choose_names
from implicit_blocks.registry.scaffold.writing import create_plugin

__all__ = ["FAMILIES", "PluginNames", "choose_names", "create_plugin"]

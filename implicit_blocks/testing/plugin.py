"""The contract of a plugin's distribution: how its kinds are registered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

from implicit_blocks import registry
from implicit_blocks.registry.contracts import require
from implicit_blocks.registry.hooks import GROUP

_ASK = """
import json, sys
from implicit_blocks import registry
owners, by_name = {}, True
for family, kind in json.loads(sys.argv[1]):
    try:
        entry = registry.entry(family, kind)
        owners[f"{family} {kind}"], by_name = entry.owner, by_name and isinstance(entry.builder, str)
    except registry.UnknownKindError as error:
        owners[f"{family} {kind}"] = f"nobody: {error}"
print(json.dumps({"owners": owners, "torch": by_name and "torch" in sys.modules}))
"""


def check_plugin(distribution: str, *kinds: tuple[str, str]) -> None:
    """Check the registration of an installed plugin, in a process without other plugins.

    ```python
    check_plugin("acme-blocks", ("solver", "acme.halfway"), ("mixer", "acme.shift"))
    ```

    The entry point must load, and the kinds must belong to the plugin. If all builders are registered as
    strings, looking them up must not import torch, so that specs can be validated quickly and on machines
    without torch.

    Args:
        distribution: its name, as in its ``pyproject.toml``.
        *kinds: family and kind of each component of the plugin.

    Raises:
        ContractError: names the broken contract.

    """
    plugin = f"plugin {distribution}"
    points = [
        point.name for point in entry_points(group=GROUP) if point.dist and point.dist.name == distribution
    ]
    require(
        bool(points),
        plugin,
        "installed",
        f"no installed distribution of that name has an entry point in group {GROUP!r}; "
        "install it (python -m pip install -e FOLDER) and check the entry point",
    )
    done = subprocess.run(
        [sys.executable, "-c", _ASK, json.dumps(kinds)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, registry.PLUGINS_VARIABLE: ",".join(points)},
    )
    require(done.returncode == 0, plugin, "entry point loads", done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for kind, owner in found["owners"].items():
        require(owner == distribution, plugin, "owns its kinds", f"{kind} belongs to {owner}")
    require(
        not found["torch"],
        plugin,
        "looking up kinds imports no torch",
        'register the builder as a string, "package.module:Class", and keep torch out of the spec module',
    )

"""What a plugin's distribution must hold, whatever it brings: its kinds are known, and cheaply."""

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
owners = {}
for family, kind in json.loads(sys.argv[1]):
    try:
        owners[f"{family} {kind}"] = registry.entry(family, kind).owner
    except registry.UnknownKindError as error:
        owners[f"{family} {kind}"] = f"nobody: {error}"
print(json.dumps({"owners": owners, "torch": "torch" in sys.modules}))
"""


def check_plugin(distribution: str, *kinds: tuple[str, str]) -> None:
    """Check what an installed plugin promises, in a process in which no other plugin is in use.

    ```python
    check_plugin("acme-blocks", ("solver", "acme.halfway"), ("mixer", "acme.shift"))
    ```

    Its entry point loads, the kinds are registered as its own, and knowing them imports no torch: so specs
    can be read and checked in a moment, and on machines without it.

    Args:
        distribution: its name, as in its ``pyproject.toml``.
        *kinds: family and kind of each component that it brings.

    Raises:
        ContractError: naming what does not hold.

    """
    plugin = f"plugin {distribution}"
    points = [
        point.name for point in entry_points(group=GROUP) if point.dist and point.dist.name == distribution
    ]
    require(
        bool(points),
        plugin,
        "it is installed",
        f"no installed distribution of that name has an entry point in group {GROUP!r}; "
        "install it (python -m pip install -e FOLDER), and look at the entry point",
    )
    done = subprocess.run(
        [sys.executable, "-c", _ASK, json.dumps(kinds)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, registry.PLUGINS_VARIABLE: ",".join(points)},
    )
    require(done.returncode == 0, plugin, "its entry point loads", done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    for kind, owner in found["owners"].items():
        require(owner == distribution, plugin, "its kinds are its own", f"{kind} belongs to {owner}")
    require(
        not found["torch"],
        plugin,
        "knowing its kinds imports no torch",
        'give the builder as a string, "package.module:Class", and keep specs in a module that imports none',
    )

"""Third-party distributions, built as wheels and installed in a directory, for subprocesses."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DISTRIBUTIONS = Path(__file__).with_name("distributions")

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory, install_wheels: Callable[..., None]) -> Path:
    """Install every distribution of `distributions/` from a wheel; return the directory."""
    base = tmp_path_factory.mktemp("third_parties")
    sources = shutil.copytree(DISTRIBUTIONS, base / "sources")  # building writes into the source folder
    install_wheels(sorted(sources.iterdir()), base / "site")
    return base / "site"


@pytest.fixture
def run(site: Path, tmp_path: Path, python: Any) -> Run:
    """Run ``python …`` with the distributions installed; ``plugins`` sets the variable that selects them.

    Warnings are errors by default.
    """

    def start(*arguments: str, plugins: str | None = None, warnings: str = "error") -> Any:
        path = os.pathsep.join(filter(None, [str(site), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        environment.pop("IMPLICIT_BLOCKS_PLUGINS", None)
        if plugins is not None:
            environment["IMPLICIT_BLOCKS_PLUGINS"] = plugins
        return python.run(arguments, cwd=tmp_path, environment=environment, warnings=warnings)

    return start

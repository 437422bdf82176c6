"""Tests of a plugin that is not installed are skipped, with the reason, before they are imported."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent


class _Absent(pytest.Module):
    """A test file of a plugin that is not installed."""

    def collect(self):
        folder = HERE / self.path.relative_to(HERE).parts[0]
        pytest.skip(
            f"{folder.name} is not installed: pip install ./plugins/{folder.name}", allow_module_level=True
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the test files of plugins whose package can't be found."""
    folder = HERE / module_path.resolve().relative_to(HERE).parts[0]
    packages = [path.name for path in (folder / "src").iterdir() if (path / "__init__.py").is_file()]
    if all(importlib.util.find_spec(name) is not None for name in packages):
        return None
    return _Absent.from_parent(parent, path=module_path)

"""Strict arithmetic: one thread, NaN in uninitialized memory, the same seed for every test."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

PLUGIN = "implicit_blocks_rwkv7"
REASON = f"{PLUGIN} is not installed: pip install ./plugins/rwkv7"


class _Absent(pytest.Module):
    """A test file of a plugin that is not installed: skipped, with the reason, before it is imported."""

    def collect(self):
        pytest.skip(REASON, allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skip the test files where the plugin is not installed."""
    if importlib.util.find_spec(PLUGIN) is None:
        return _Absent.from_parent(parent, path=module_path)
    return None


@pytest.fixture(autouse=True)
def _strict_torch():
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)

"""What all tests share: strict arithmetic, poisoned memory, and where development data lies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"


@pytest.fixture(autouse=True)
def _strict_torch():
    """One thread a worker, NaN in uninitialized memory, the same seed for every test."""
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)


@pytest.fixture
def shared_data() -> Path:
    """Return the folder of development data beside the repository, or skip, saying so."""
    path = SHARED / "data"
    if not path.is_dir():
        pytest.skip(f"no development data at {path}")
    return path

"""Deterministic tests: one thread, NaN in uninitialized memory, the same seed for every test."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _strict_torch():
    torch.set_num_threads(1)
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.manual_seed(0)

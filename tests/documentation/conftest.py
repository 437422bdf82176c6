"""What tests of the pages share as fixtures."""

import runpy
from typing import Any

import pytest

from tests.documentation.equal_compute_pages import ROOT, SEEDS


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the program that makes the tables with half a token of text per parameter."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_averaged.py"))


@pytest.fixture
def leads(half: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the differences of the summary by setting, part and optimizer."""
    return {
        (setting, part, ours[0].optimizer): SEEDS["difference_of_runs"](ours[1], theirs[1])
        for setting, part, ours, theirs in half["compared"]()
    }

"""``implicit_blocks.testing.check_plugin``: plugins that pass, and violations of each contract."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from implicit_blocks.testing import ContractError, check_plugin

LIGHT = """
from typing import Literal
from implicit_blocks.registry.hooks import hookimpl
from implicit_blocks.specs import SolverSpec

class SlowSpec(SolverSpec):
    kind: Literal["heavy.slow"] = "heavy.slow"

@hookimpl
def register_components(add):
    add("solver", SlowSpec, "heavy:Slow")
"""


def install(source: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Install a distribution of one module."""
    (place / "heavy.py").write_text(source)
    information = place / "heavy-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: heavy\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[implicit_blocks]\nheavy = heavy\n")
    monkeypatch.syspath_prepend(place)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(place), os.environ.get("PYTHONPATH", "")]))


def test_a_plugin_passes_although_another_imports_torch(tmp_path, monkeypatch):
    install(LIGHT, tmp_path, monkeypatch)
    check_plugin("heavy", ("solver", "heavy.slow"))


def test_a_plugin_of_one_module_passes_with_its_class_as_the_builder(tmp_path, monkeypatch):
    solver = "import torch\nimport implicit_blocks as ib\nclass Slow(ib.Solver): ...\n"
    install(solver + LIGHT.replace('"heavy:Slow"', "Slow"), tmp_path, monkeypatch)
    check_plugin("heavy", ("solver", "heavy.slow"))


@pytest.mark.parametrize(
    ("source", "kinds", "message"),
    [
        ("import torch\n" + LIGHT, [("solver", "heavy.slow")], "looking up kinds imports no torch"),
        (LIGHT, [("solver", "heavy.fast")], "solver heavy.fast belongs to nobody: .*heavy.slow"),
        (LIGHT, [("solver", "picard")], "solver picard belongs to implicit_blocks"),
        ("raise RuntimeError('no')", [("solver", "heavy.slow")], "RuntimeError: no"),
    ],
    ids=["torch", "missing", "another's", "broken"],
)
def test_the_error_names_the_contract(source, kinds, message, tmp_path, monkeypatch):
    install(source, tmp_path, monkeypatch)
    with pytest.raises(ContractError, match=message) as error:
        check_plugin("heavy", *kinds)
    assert "plugin heavy breaks the contract" in str(error.value)


def test_a_plugin_that_is_not_installed_is_rejected():
    with pytest.raises(ContractError, match="no installed distribution of that name"):
        check_plugin("acme-of-nowhere", ("solver", "acme.halfway"))

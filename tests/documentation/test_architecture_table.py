"""The table of architectures on the zoo's page: its values are those of the specs."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from implicit_blocks.depths import FixedDepthSpec
from implicit_blocks.specs import AndersonSpec

PROGRAM = Path(__file__).resolve().parents[2] / "tools/docs/architecture_table.py"


@pytest.fixture(scope="module")
def table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("architecture_table", PROGRAM)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_component_is_its_kind_and_what_differs_from_the_defaults(table: ModuleType) -> None:
    assert table.component(AndersonSpec()) == "`anderson`"
    assert table.component(AndersonSpec(damping=0.5)) == "`anderson` (damping 0.5)"
    assert table.component(FixedDepthSpec(loops=4)) == "`fixed` (loops 4)"


def test_every_row_has_a_cell_for_every_architecture(table: ModuleType) -> None:
    rows = [line.split(" | ") for line in table.section().splitlines() if line.startswith("| ")]
    assert len(rows) == 2 + len(table.ROWS)
    assert {len(row) for row in rows} == {1 + len(table.COLUMNS)}


def test_architectures_have_the_stacks_and_injections_of_their_specs(table: ModuleType) -> None:
    rows = {line.split(" | ")[0]: line for line in table.section().splitlines() if line.startswith("| ")}
    assert (
        "0 / 12 / 0 | 7 / 1 / 0 | 2 / 2 / 2 | 2 / 4 / 2 | 0 / 24 / 0 | 4 / 4 / 4"
        in rows["| prelude / core / coda"]
    )
    for kind in ("projection", "attractor", "diagonal", "concat", "none", "residual"):
        assert f"`{kind}`" in rows["| `injection`"]

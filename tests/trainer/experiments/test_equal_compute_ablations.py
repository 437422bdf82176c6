"""Further changes of a recipe, and the rows of the ablations."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.experiments.equal_compute.flops import run_flops
from trainer.experiments.equal_compute.recipes import Recipe, model_of, spec_of

ROOT = Path(__file__).resolve().parents[3]
ROW: dict[str, Any] = {
    "family": "llama", "layers": (1, 1, 1), "loops": 3, "learning_rate": 1e-3, "weight_decay": 0.1,
    "petaflops": 1e-3, "width": 64, "batch_size": 4, "length": 32,
}  # fmt: skip
SEARCH = ("model.depth.kind=until_converged", "model.gradient.kind=phantom")


@pytest.fixture
def ablations(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.delitem(sys.modules, "equal_compute_ablations", raising=False)
    return importlib.import_module("equal_compute_ablations")


def test_changes_apply_to_the_spec_of_a_run_and_to_its_name() -> None:
    changes = ["model.residual_scaling={kind: layer_scale, init: 0.5}", "training.max_grad_norm=0.5"]
    recipe = Recipe(**ROW, changes=changes)  # type: ignore[arg-type]  # as JSON has them
    spec = spec_of(recipe, Path("tokens"))
    assert spec.training.max_grad_norm == 0.5
    assert model_of(recipe).residual_scaling.init == 0.5
    assert recipe == Recipe.of(recipe.as_row())
    assert recipe.name != Recipe(**ROW).name
    assert "layer_scale, init: 0.5" in recipe.shape
    assert "layer_scale" in Recipe(**{**ROW, "loops": 0, "layers": (0, 3, 0)}, changes=changes).shape


def test_long_changes_have_short_and_distinct_names() -> None:
    long = [Recipe(**ROW, changes=(f"phases=[{{name: {'a' * 300}, until: 0.{n}}}]",)).name for n in (5, 6)]
    assert len(set(long)) == 2
    assert max(map(len, long)) < 200


def test_an_unknown_change_is_refused_by_its_text() -> None:
    with pytest.raises(ValueError, match=r"model\.depht"):
        spec_of(Recipe(**ROW, changes=("model.depht=1",)), Path("tokens"))


def test_a_search_of_a_known_number_of_iterations_keeps_a_budget() -> None:
    known = Recipe(**ROW, changes=(*SEARCH, "model.stopping={tolerance: 0, max_iterations: 5}"))
    assert run_flops(spec_of(known, Path("tokens"))) == pytest.approx(1e12, rel=0.03)
    with pytest.raises(ValueError, match=r"stopping\.tolerance: 0"):
        spec_of(Recipe(**ROW, changes=SEARCH), Path("tokens"))
    bounded = spec_of(Recipe(**ROW, changes=SEARCH, bounded=True), Path("tokens"))
    assert run_flops(bounded, bound=True) == pytest.approx(1e12, rel=0.03)


def test_every_row_of_the_ablations_executes_the_same_flops(ablations: Any) -> None:
    rows = [(eager, row) for eager in (False, True) for row in ablations.runs(eager=eager)]
    recipes = [Recipe.of(row) for _, row in rows]
    assert len({recipe.name for recipe in recipes}) == len(recipes)
    assert max(len(recipe.name) for recipe in recipes) < 200
    for (eager, _), recipe in zip(rows, recipes, strict=True):
        spec = spec_of(recipe, Path("tokens"))
        assert run_flops(spec, bound=recipe.bounded) == pytest.approx(1.83e15, rel=0.001), recipe.shape
        kinds = {phase.model.depth.kind for phase in spec.phase_specs() if recipe.loops}
        assert eager == ("until_converged" in kinds), recipe.shape


def test_each_row_of_the_table_is_a_list_of_its_own(ablations: Any) -> None:
    from equal_compute_gpu import listed_runs

    page = (ROOT / "docs" / "equal_compute_tables.md").read_text(encoding="utf-8")
    names = {
        line.split(" | ")[0].removeprefix("| ")
        for line in page.partition("## Ablations")[2].partition("\n## ")[0].splitlines()
        if line.startswith("| ") and " mean of " not in line
    } - {"change", "---"}
    found = [run for name in sorted(names) for run in listed_runs(f"ablations/{name}")]
    every = [run for eager in (False, True) for run in ablations.runs(eager=eager)]
    assert sorted(map(str, found)) == sorted(map(str, every))
    with pytest.raises(ValueError, match="no row of the ablations is named 'damping'; choose one of base, "):
        listed_runs("ablations/damping")


def test_the_table_has_a_line_for_each_row_with_results(ablations: Any) -> None:
    rows = [{**row, "average": [0.9]} for row in ablations.runs(eager=False)[:4]]
    ablations.COMMON["average"] = [0.9]
    weights = {"last": {"report": 21.0}}
    found = [
        {
            "recipe": row,
            "parameters": 5.3e6,
            "epochs": 12.0,
            "choice": 10.0,
            "report": 20.0,
            "weights": weights,
        }
        for row in rows
    ]
    for run in found:
        run["fixed_point"] = None
    lines = ablations.table(found).splitlines()
    assert lines[2] == "| base | 5.3 M | 12.0 | 10.00 | 20.00 | 21.00 |  |  |"
    assert lines[3].startswith("| base, mean of 3 seeds | 5.3 M |")
    assert lines[4].startswith("| explicit, 4 layers | 5.3 M |")
    assert len(lines) == 5

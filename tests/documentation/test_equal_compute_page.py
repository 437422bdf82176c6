"""The page on equal compute says what the result file has."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from trainer.experiments.equal_compute.compare import require_same_text
from trainer.experiments.equal_compute.tables import at_fixed_point, runs_table

ROOT = Path(__file__).resolve().parents[2]
PAGE = " ".join((ROOT / "docs" / "equal_compute.md").read_text(encoding="utf-8").split())


@pytest.fixture(scope="module")
def runs() -> list[dict[str, Any]]:
    """Return the runs of the result file."""
    path = ROOT / "benchmarks" / "results" / "equal_compute_gpu.json"
    found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["runs"]
    return found


def chosen(runs: list[dict[str, Any]], shape: str, **fields: float) -> dict[str, Any]:
    """Return the run of a shape with the lowest perplexity on the text of the choice."""
    found = [
        run
        for run in runs
        if run["shape"] == shape and all(run["recipe"][key] == value for key, value in fields.items())
    ]
    return min(found, key=lambda run: run["choice"])


def test_the_table_of_the_page_is_that_of_the_result_file(runs: list[dict[str, Any]]) -> None:
    assert " ".join(runs_table(runs).split()) in PAGE


def test_the_differences_of_the_page_are_those_of_the_chosen_recipes(runs: list[dict[str, Any]]) -> None:
    ours, four, eight = (
        chosen(runs, shape)["report"] for shape in ("1-2-1, 3 loops", "4 layers", "8 layers")
    )
    assert f"{1 - ours / four:.1%}".replace("%", " %") + " below" in PAGE
    assert f"{ours / eight - 1:.1%}".replace("%", " %") + " above" in PAGE
    ours, four, eight = (
        chosen(runs, shape, share=0.6)["report"] for shape in ("1-2-1, 3 loops", "4 layers", "8 layers")
    )
    assert f"the lead is {1 - ours / four:.1%}, and {1 - ours / eight:.1%}".replace("%", " %") in PAGE


def test_the_convergence_of_the_page_is_that_of_the_result_file(runs: list[dict[str, Any]]) -> None:
    changes, shares = zip(*filter(None, map(at_fixed_point, runs)), strict=True)
    assert f"{min(shares) * 100:.0f} to {max(shares):.0%} of the tokens".replace("%", " %") in PAGE
    assert f"{min(changes) * 100:.1f} to {max(changes):.1%} above".replace("%", " %") in PAGE


def test_all_runs_had_one_seed_and_steps_that_were_captured(runs: list[dict[str, Any]]) -> None:
    assert {run["recipe"]["seed"] for run in runs} == {0}
    assert all(run["captured"] for run in runs)


def test_runs_on_other_text_are_not_summarized_together() -> None:
    runs = [{"name": "a", "text": 1, "windows": 1}, {"name": "b", "text": 2, "windows": 1}]
    with pytest.raises(ValueError, match="a and b were trained on different text"):
        require_same_text(runs)


def test_further_seeds_are_those_of_the_recipe_that_the_text_of_the_choice_prefers() -> None:
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_gpu.py"))
    listed = [one for one in benchmark["plans"]()["mamba2"] if one["layers"] != [0, 12, 0]]
    losses = dict(zip((2.0, 1.0), (4.0, 3.9), strict=True))
    rows = [
        {
            "recipe": {**one, "seed": 0},
            "side": "implicit" if one.get("loops") else "explicit",
            "measured": {"choice": {"loss": losses[one["weight_decay"]]}, "report": {"loss": 1 / (1 + n)}},
        }
        for n, one in enumerate(listed)
    ]
    found = benchmark["chosen_seeds"](rows, (0, 1, 2))
    assert [(one["layers"], one["weight_decay"], one["seed"]) for one in found] == [
        (layers, 1.0, seed) for seed in (1, 2) for layers in ([0, 8, 0], [2, 4, 2])
    ]


def test_a_run_that_ended_early_is_said_in_the_table(runs: list[dict[str, Any]]) -> None:
    early = {**runs[0], "choice": None, "report": None, "fixed_point": None, "trained_loops_few": None}
    assert "| ended early | ended early |" in runs_table([early])

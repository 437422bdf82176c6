"""The figures of inference on the page on equal compute equal those of the result file."""

import json
import runpy
from typing import Any

import pytest

from tests.documentation.equal_compute_pages import PAGE, ROOT


@pytest.fixture
def inference(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the program that measures inference."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_inference.py"))


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_the_tables_of_inference_are_those_of_the_result_file(family: str, inference: dict[str, Any]) -> None:
    path = ROOT / "benchmarks" / "results" / "equal_compute_inference.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert " ".join(inference["table"](rows, family).split()) in PAGE
    for row in rows:
        known = inference["counted"](
            inference["model_of"](inference["Recipe"].of(row["recipe"])), row["loops"]
        )
        assert known.items() <= row.items()  # FLOPs and bytes, which need no measurement


def test_generation_with_looped_models_takes_longer_than_their_flops_suggest() -> None:
    path = ROOT / "benchmarks" / "results" / "equal_compute_inference.json"
    rows = {
        (row["recipe"]["family"], sum(row["recipe"]["layers"]), row["loops"]): row
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    }
    llama, eight = rows["llama", 4, 3], rows["llama", 8, None]
    assert llama["flops_per_token"] == eight["flops_per_token"]
    slower = llama["generated"]["1"] / eight["generated"]["1"]
    assert f"a token of the looped Llama takes {slower:.1f} times as long as one of 8 explicit layers" in PAGE
    mamba2, explicit = rows["mamba2", 8, 3], rows["mamba2", 8, None]
    slower = mamba2["generated"]["1"] / explicit["generated"]["1"]
    dearer = mamba2["flops_per_token"] / explicit["flops_per_token"]
    text = f"takes {slower:.1f} times as long as one of the explicit model of its size"
    assert f"one of the looped Mamba2 {text}, for {dearer:.1f} times the FLOPs" in PAGE


def test_a_pass_costs_what_the_layers_that_it_runs_cost(inference: dict[str, Any]) -> None:
    cost = {
        (recipe.side + recipe.shape[:3], loops): inference["counted"](inference["model_of"](recipe), loops)
        for recipe in inference["recipes"]()
        if recipe.family == "llama"
        for loops in ((1, 3) if recipe.loops else (None,))
    }
    looped = cost["implicit1-2", 3]
    assert cost["implicit1-2", 1] == cost["explicit4 l", None]  # as an explicit stack
    assert looped["flops_per_token"] == cost["explicit8 l", None]["flops_per_token"]  # 1 + 3 · 2 + 1 layers
    assert 2 * looped["state_bytes"] == cost["explicit8 l", None]["state_bytes"]

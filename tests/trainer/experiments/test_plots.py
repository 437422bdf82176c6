"""The experiments' plots are complete and their labels do not overlap."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("matplotlib", reason="the plot needs the extra 'train'")

import itertools

from trainer.data.babi import TASKS
from trainer.experiments.catbabi.plot import draw as draw_catbabi
from trainer.experiments.solvers import plot as solvers_plot
from trainer.experiments.word_problem import hard_tokens, layers


def catbabi(model: str, length: int) -> dict[str, Any]:
    by_task = dict.fromkeys(map(str, TASKS), 0.5)
    return {"model": model, "scoring": "answers", "length": length, "accuracy": 0.87, "by_task": by_task}


@pytest.mark.parametrize(("models", "turned"), [(3, False), (9, True)])
def test_labels_of_many_bars_are_rotated_and_published_names_do_not_overlap(
    models: int, turned: bool
) -> None:
    published = {"Mamba, 1 layer": 0.783, "2 layers": 0.871, "4 layers": 0.865, "FP-Mamba-H": 0.8955}
    rows = [catbabi(f"explicit-{n}", 200) for n in range(1, models + 1)]
    bars, _ = draw_catbabi({"models": rows, "split": "test", "published": published}).axes
    assert {text.get_rotation() for text in bars.texts if text.get_text() == "87.0"} == {90.0 * turned}
    above = sorted(
        text.get_position()[1]
        for text in bars.texts
        if text.get_text() in published and text.get_va() == "bottom"
    )
    assert len(above) == 3
    assert min(high - low for low, high in itertools.pairwise(above)) >= 3.5


def test_bars_of_searches_that_did_not_converge_are_hatched() -> None:
    rows = [
        {**catbabi("implicit-1", 200), "search": {"converged": 0.95}},
        {**catbabi("implicit-2", 200), "search": {"converged": 0.95}},
        {**catbabi("implicit-2", 200), "search": {"converged": 0.67}},  # one seed of two
        {**catbabi("explicit-1", 200), "search": None},
    ]
    written = {"models": rows, "split": "test", "published": {}}
    bars = draw_catbabi(written).axes[0]
    assert [bool(bar.get_hatch()) for bar in bars.patches] == [False, True, False]
    assert [bool(shown.get_hatch()) for shown in bars.get_legend().get_patches()] == [False, True]
    whole = draw_catbabi({**written, "models": [rows[0], rows[3]]}).axes[0]
    assert not any(bar.get_hatch() for bar in whole.patches)


def test_every_probability_that_was_tested_is_drawn() -> None:
    probabilities = (0.9, 0.7, 0.5, 0.3, 0.0)
    rows = [
        {
            "group": "S3", "seed": 0, "training_p": 0.9, "training_iterations": 4, "length": 2, "mode": mode,
            "identity_probability": p, "iterations_by_position": [1.0, 2.0],
            "iterations_by_hard_tokens": [{"hard_tokens": 1, "iterations": 2.0}],
        }
        for p in probabilities
        for mode in ("simultaneous", "sequential")
    ]  # fmt: skip
    figure = hard_tokens.draw({"settings": {"test_p": probabilities}, "tests": rows})
    assert [len(axes.lines) for axes in figure.axes] == [10, 10]


def test_baselines_have_colors_of_their_own() -> None:
    models = ("implicit-mamba2", "transformers:mamba2", "llama", "transformers:rwkv", "transformers:gpt2")
    assert len({layers._color(model, models) for model in models}) == 5


@pytest.mark.parametrize("penalties", [0, 2])
@pytest.mark.parametrize("tolerances", [(1e-3,), (0.05, 1e-3)])
def test_solvers_are_drawn_against_the_tolerance_where_there_are_several(
    tmp_path, monkeypatch: pytest.MonkeyPatch, tolerances: tuple[float, ...], penalties: int
) -> None:
    figures: list[Any] = []
    monkeypatch.setattr(solvers_plot, "write_picture", lambda figure, path: figures.append(figure))
    rows = [
        {
            "config": "Picard", "scope": scope, "tolerance": tolerance, "iterations_mean": 7.0, "work": 8.0,
            "seconds": 0.1, "converged": 1.0,
        }
        for scope in ("prefix", "sequence")
        for tolerance in tolerances
    ]  # fmt: skip
    weights = [{"weight": weight, "loss": 1.0, "iterations": {"0.05": 3.0}} for weight in (None, 1.0)]
    one = {
        "run": "mine", "sequences": 2, "length": 4, "rows": rows, "spectrum": {"radii": [0.5, 0.6]},
        "penalties": weights[:penalties],
    }  # fmt: skip
    solvers_plot.draw(one, {"device_name": "CPU"}, tmp_path / "x.png")
    (figure,) = figures
    assert len(figure.axes) == 2 + 2 * (len(tolerances) > 1) + (penalties > 0)
    assert len(figure.legends) == (len(tolerances) > 1)

"""The figures of the pages on equal compute equal those of the result files."""

import json
import runpy
from typing import Any

import pytest

from tests.documentation.equal_compute_pages import LAST, MAIN, PAGE, ROOT, SEEDS, percent, read
from trainer.experiments.equal_compute.compare import require_same_text
from trainer.experiments.equal_compute.experiment import LAPTOP
from trainer.experiments.equal_compute.plot import draw
from trainer.experiments.equal_compute.recipes import Recipe
from trainer.experiments.equal_compute.tables import at_fixed_point

PICTURED = ("averaged", "averaged_mamba2")


@pytest.fixture(scope="module")
def seeds() -> dict[str, dict[str, list[Any]]]:
    """Return the runs with several seeds of both families, by shape."""
    return {name: several_seeds(read(name)) for name in ("llama", "mamba2")}


def several_seeds(runs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    found = {
        recipe.side + recipe.shape[:3]: rows
        for recipe, rows in SEEDS["by_recipe"](runs).items()
        if len(rows) > 1
    }
    assert {"explicit8 l", "implicit1-2"} <= set(found) or {"explicit8 l", "implicit2-4"} <= set(found)
    return found


@pytest.mark.parametrize("name", ["gpu", "llama", "llama_rates", "llama_late", "mamba2", "fresh"])
def test_the_tables_of_seeds_are_those_of_the_result_files(name: str) -> None:
    assert " ".join(SEEDS["seeds_table"](read(name)).split()) in LAST


def test_the_differences_of_the_page_have_the_intervals_of_the_seeds(seeds: Any) -> None:
    llama, mamba2 = seeds["llama"], seeds["mamba2"]
    equal = SEEDS["difference_of_runs"](llama["implicit1-2"], llama["explicit4 l"])
    low, high = (percent(-end, sign=False) for end in reversed(equal["interval"]))
    assert equal["below_with_every_seed"]
    assert f"{percent(-equal['difference'], sign=False)} % below.** Every seed" in LAST
    assert f"95 % interval: {low} to {high} %)" in LAST
    free = SEEDS["difference_of_runs"](llama["implicit1-2"], llama["explicit8 l"])
    low, high = map(percent, free["interval"])
    assert f"it is {percent(-free['difference'], sign=False)} % below, which is not significant" in LAST
    assert f"interval of the difference is {low} to {high} %" in LAST
    small, large = (
        SEEDS["difference_of_runs"](mamba2["implicit2-4"], mamba2[f"explicit{size}"])
        for size in ("8 l", "12 ")
    )
    low, high = map(percent, small["interval"])
    level = f"is {percent(small['difference'], sign=False)} % above the explicit one ({low} to {high} %)"
    assert level in LAST
    low, high = map(percent, large["interval"])
    below = f"{percent(-large['difference'], sign=False)} % below one of 7.7 M parameters ({low} to {high} %)"
    assert below in LAST


def test_scaled_rotary_frequencies_keep_the_perplexity_of_long_text() -> None:
    runs = read("llama_late")
    assert " ".join(SEEDS["lengths_table"](runs).split()) in LAST
    ratios = [
        row["perplexity"] / run["lengths"][1]["perplexity"]
        for run in runs
        for row in run["lengths_scaled"]
        if row["scaling"] == "llama3"
    ]
    plain = [run["lengths"][0]["perplexity"] / run["lengths"][1]["perplexity"] for run in runs]
    assert f"instead of {min(plain):.2f} to {max(plain):.2f}." in LAST
    assert f"[{min(ratios):.2f} to {max(ratios):.2f}](#llama-longer-text)" in LAST


def test_sixteen_loops_at_the_end_let_all_tokens_converge() -> None:
    (late,) = (run for run in read("llama_late") if run["recipe"]["end_loops"] == 16)
    (before,) = (run for run in read("llama_rates") if run["recipe"]["loops"] == 4)
    change, share = at_fixed_point(late)
    others = late["lengths_fixed_point"][1]
    text = f"converges for {percent(share, sign=False)} % of the tokens of 32 sequences and"
    assert others["sequences"] == 64
    assert f"{text} {percent(others['token_converged'], sign=False)} % of 64 others" in LAST
    assert abs(change) < 1e-4
    assert f"perplexity of {late['report']:.2f} is above the {before['report']:.2f} of the same model" in LAST


def test_the_differences_on_text_seen_once() -> None:
    by_recipe = SEEDS["by_recipe"](read("fresh"))
    rows = {(one.shape, one.learning_rate): runs for one, runs in by_recipe.items() if len(runs) > 1}
    ours, four, eight = (rows[shape, 1e-3] for shape in ("1-2-1, 3 loops", "4 layers", "8 layers"))
    found = SEEDS["difference_of_runs"](ours, four)
    low, high = (percent(end, sign=False) for end in found["interval"])
    above = f"{percent(found['difference'], 0, sign=False)} % above the explicit one at equal FLOPs"
    assert f"{above} ({low} to {high} %)" in LAST
    assert f"{above} ({low} to {high} %)" in PAGE
    assert f"loops leave FLOPs for {ours[0]['epochs']:.2f} of the text" in LAST
    assert f"leave FLOPs for {ours[0]['epochs']:.2f} of the text" in PAGE
    found = SEEDS["difference_of_runs"](ours, eight)
    low, high = map(percent, found["interval"])
    assert f"between them is not significant ({percent(found['difference'])} %, {low} to {high} %)" in LAST


def test_the_picture_has_all_runs_on_the_text_of_the_seeds() -> None:
    runs = [run for name in PICTURED for run in read(name)]
    written = SEEDS["pictured"](runs)
    filled = {
        name for one in written["comparisons"] for side in one["sides"].values() for name in side["runs"]
    }
    figure = draw(written)
    points = [line for axes in figure.axes for line in axes.lines if line.get_linestyle() == "None"]
    assert len(points) == 3 * len(runs)
    marked = sum(line.get_markersize() == 7 for line in points)
    assert marked == 3 * len(filled)


def test_the_convergence_of_the_page_is_that_of_the_result_files(seeds: Any) -> None:
    changes, shares = zip(*map(at_fixed_point, seeds["llama"]["implicit1-2"]), strict=True)
    assert f"{percent(min(shares), 0, sign=False)} to {percent(max(shares), 0, sign=False)} % of the" in LAST
    assert f"point is {percent(min(changes))} to {percent(max(changes))} % above" in LAST
    changes, shares = zip(*map(at_fixed_point, seeds["mamba2"]["implicit2-4"]), strict=True)
    assert f"{percent(min(shares), sign=False)} % converge, and the perplexity stays the same" in LAST
    assert max(map(abs, changes)) < 5e-4


def test_perplexities_at_eight_times_the_length(seeds: Any) -> None:
    def ratios(family: str) -> list[float]:
        pairs = [run["lengths"] for rows in seeds[family].values() for run in rows]
        return [long["perplexity"] / short["perplexity"] for long, short in pairs]

    assert min(ratios("llama")) > 1.5
    assert max(ratios("mamba2")) < 1.0


def test_all_steps_were_captured_and_the_choice_had_one_seed() -> None:
    runs = read("gpu")
    assert {run["recipe"]["seed"] for run in runs} == {0}
    assert all(run["captured"] for run in [*runs, *read("llama"), *read("mamba2")])


def test_the_laptop_setting_shows_the_order_of_the_larger_models() -> None:
    path = ROOT / "benchmarks" / "results" / "equal_compute_laptop.json"
    written = json.loads(path.read_text(encoding="utf-8"))
    ours = {"shares": (0.6, 1.0)}  # the setting has the whole budget alone, which both sides choose
    for name, value in {**LAPTOP, **ours}.items():
        kept = written["settings"][name]
        assert (tuple(kept) if isinstance(kept, list) else kept) == value, name
    (comparison,) = written["comparisons"]
    result, sides = comparison["result"], comparison["sides"].values()
    assert result["seeds"] == [5, 5]
    low, high = map(percent, result["interval"])
    below = f"{percent(-result['difference'], sign=False)} % below 3 explicit layers"
    assert f"{below} (95 % interval: {low} to {high} %), five seeds each" in PAGE
    chosen = [(side["recipe"]["learning_rate"], side["recipe"]["weight_decay"]) for side in sides]
    assert len(set(chosen)) == 1
    assert all(side["recipe"]["share"] == 1 for side in sides)
    assert not any(side["marks"] for side in sides)
    runs = {run["name"]: run for run in written["runs"]}
    choices = [SEEDS["mean_perplexity"]([runs[name] for name in side["runs"]], "choice") for side in sides]
    above = percent(choices[0] / choices[1] - 1, sign=False)
    assert f"the end of the same book, it is {above} % above" in PAGE
    epochs = [runs[side["runs"][0]]["epochs"] for side in sides]
    assert f"which they see {epochs[0]:.0f} and {epochs[1]:.0f} times" in PAGE


def test_runs_on_other_text_are_not_summarized_together() -> None:
    runs = [{"name": "a", "text": 1, "windows": 1}, {"name": "b", "text": 2, "windows": 1}]
    with pytest.raises(ValueError, match="a and b were trained on different text"):
        require_same_text(runs)


def test_the_lists_of_runs_are_recipes() -> None:
    lists = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_gpu.py"))["lists"]()
    for name, runs in lists.items():
        recipes = [Recipe.of(run) for run in runs]
        assert len({recipe.name for recipe in recipes}) == len(runs), name
        ours_alone = name in ("attractor", "attractor_longest", "random_depth")
        assert {recipe.side for recipe in recipes} == {"implicit"} | (set() if ours_alone else {"explicit"})


def test_further_seeds_are_those_of_the_recipe_that_the_text_of_the_choice_prefers() -> None:
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_gpu.py"))
    known = benchmark["listed_runs"](str(ROOT / "benchmarks" / "results" / "equal_compute_mamba2.json"))
    listed = [one for one in known if one["seed"] == 0 and one["layers"] != [0, 12, 0]]
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


def test_every_family_of_a_list_has_its_own_choice() -> None:
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_gpu.py"))
    measured = {"choice": {"loss": 4.0}, "report": {"loss": 4.0}}
    rows = [
        {"recipe": Recipe.of(one).as_row(), "side": Recipe.of(one).side, "measured": measured}
        for one in benchmark["lists"]()["tiny"]
    ]
    found = benchmark["chosen_seeds"](rows, (1,))
    assert len({(one["family"], one["loops"]) for one in found}) == len(found) == 4


def test_the_residual_shape_solves_s3_with_damping_in_training() -> None:
    path = ROOT / "benchmarks" / "results" / "demo_residual.json"
    stored = json.loads(path.read_text(encoding="utf-8"))

    def ends(rows: list[Any], p: float, key: str = "accuracy_last") -> tuple[str, str]:
        found = [
            row[key]
            for one in rows
            for row in one["implicit"]["evaluation"]
            if (row["identity_probability"], row["length"]) == (p, 128)
        ]
        assert len(found) == 3
        return percent(min(found), sign=False), percent(max(found), sign=False)

    half, none = (ends(stored["rows"], p) for p in (0.5, 0.0))
    assert f"reach {half[0]} to {half[1]} % (p = 0.5) and {none[0]} to {none[1]} % (p = 0)" in PAGE
    lost = [100 - float(value) for value in ends(stored["rows"], 0.0, "non_converged")]
    assert f"where {lost[1]:.1f} to {lost[0]:.1f} % of the sequences with p = 0 converge" in PAGE
    half, none = (ends(stored["undamped"], p) for p in (0.5, 0.0))
    assert f"the lowest of three seeds has {half[0]} and {none[0]} %" in PAGE


def test_the_residual_shape_solves_a5_at_four_times_the_length() -> None:
    path = ROOT / "benchmarks" / "results" / "word_problem_a5_residual.json"
    (row,) = json.loads(path.read_text(encoding="utf-8"))["rows"]
    for test in row["tests"]:
        assert test["accuracy"] == test["converged"] == 1.0
    assert f"{row['training_minutes']:.1f} minutes on an H200" in PAGE
    assert f"{row['parameters'] / 1e6:.1f} M parameters instead of 1.5 M" in PAGE
    at_1024 = [test["identity_probability"] for test in row["tests"] if test["length"] == 1024]
    assert f"correct on all tokens of {test['sequences']} sequences each with p = 0.5 and p = 0" in PAGE
    assert at_1024 == [0.5, 0.0]


def test_state_tracking_with_gates() -> None:
    path = ROOT / "benchmarks" / "results" / "word_problem_s3_gates.json"
    rows = {
        row["identity_probability"]: row
        for row in json.loads(path.read_text(encoding="utf-8"))["evaluation"]
        if row["length"] == 128
    }
    half, none = (percent(rows[p]["accuracy_last"], sign=False) for p in (0.5, 0))
    share = percent(1 - rows[0]["non_converged"], sign=False)
    text = f"one seed reaches {half} % (p = 0.5) and {none} % (p = 0), where {share} % converge in"
    assert f"{text} {rows[0]['iterations_max']} iterations" in MAIN

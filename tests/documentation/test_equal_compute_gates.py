"""Statements on Llamas with gates on several texts, their search and Muon equal those of the result files."""

import math
import runpy
from typing import Any

from tests.documentation.equal_compute_pages import (
    MAIN,
    PARTS,
    ROOT,
    SEEDS,
    TABLES,
    below,
    best,
    choice,
    chosen_by_seed_0,
    converged,
    ends,
    implicit,
    interval,
    models,
    on_choice,
    percent,
)
from trainer.experiments.equal_compute.tables import at_fixed_point

END, END_THIRD, SMALLEST, STAGED, THIRD, SMALL_THIRD, MUON = (
    PARTS[name]
    for name in (
        *("GATED", "GATED_THIRD", "GATED_2M", "STAGED", "STAGED_THIRD"),
        *("MAMBA2_STAGES_THIRD", "GATED_MUON"),
    )
)
difference = SEEDS["difference_of_runs"]


def test_llama_of_5_3_m(half: dict[str, Any], leads: Any) -> None:
    plain = models(half, END, STAGED, PARTS["ABLATED"])
    gated = models(half, END)["explicit 4 w256 gates"]
    text = f"without gates ({choice(plain['explicit 4 w256']):.2f}) to those with them ({choice(gated):.2f})"
    assert text in TABLES
    assert [run["recipe"]["seed"] for run in plain["explicit 4 w256"]] == [1, 2, 3, 4, 5]
    end, staged = (leads["a", part, "adamw"] for part in (END, STAGED))
    assert end["seeds"] == [5, 5]
    assert end["below_with_every_seed"]
    assert staged["below_with_every_seed"]
    text = f"{below(end)} % below with 8 loops at the end and {below(staged)} % below with stages, every seed"
    assert f"{text} below every explicit one. With 8 loops" in TABLES
    text = f"With 8 loops at the end {ends(converged(implicit(half, END)))} % of the tokens converge in 32"
    within = half["own_residual"](implicit(half, STAGED), max_iterations=16)
    text = f"{text} iterations. With stages {ends(converged(implicit(half, STAGED)))} % do, and"
    assert f"{text} {ends(within, 2)} % are within the tolerance in 16 iterations" in TABLES
    runs = models(half, THIRD)
    four, eight, own = [], [], []
    for part in (END_THIRD, THIRD):
        ours = implicit(half, part)
        four.append(below(difference(ours, runs["explicit 4 w256"])))
        own.append(below(difference(on_choice(ours), on_choice(runs["explicit 4 w256"]))))
        eight.append(below(difference(ours, runs["explicit 8 w256"])))
    text = f"is {four[0]} % below with 8 loops at the end and {four[1]} % below with stages; on the text of"
    text = f"{text} the choice {own[0]} and {own[1]} %. Beside 8 explicit layers of 8.5 M parameters it is"
    assert f"{text} {eight[0]} and {eight[1]} % below" in TABLES
    deep = [difference(implicit(half, part), plain["explicit 8 w256"]) for part in (END, STAGED)]
    text = f"Beside 8 explicit layers of 8.5 M parameters 8 loops at the end are {below(deep[0])} % below and"
    assert f"{text} stages {below(deep[1])} % (95 % interval: {interval(deep[1])})" in TABLES
    for part, kinds in ((END, (STAGED, PARTS["ABLATED"])), (END_THIRD, (THIRD,))):
        grids = chosen_by_seed_0(half, part, *kinds)
        for kind in (("implicit", 4, 3), ("explicit", 4, 0), ("explicit", 8, 0)):
            assert {(2e-3, 1.5), (1e-3, 1.5), (4e-3, 1.5), (2e-3, 0.75), (2e-3, 3)} <= set(grids[kind])
            lighter = (part, kind[0]) == (END_THIRD, "implicit")
            assert best(grids[kind]) == (2e-3, 0.75 if lighter else 1.5)
    own = chosen_by_seed_0(half, END_THIRD)["implicit", 4, 3]
    text = f"chose a decay of 0.75 ({own[2e-3, 0.75]['choice']:.2f}, and {own[2e-3, 1.5]['choice']:.2f} with"
    assert text in TABLES
    by_decay = {
        recipe.weight_decay: rows
        for recipe, rows in half["several_seeds"](END_THIRD)
        if recipe.side == "implicit"
    }
    assert implicit(half, END_THIRD) == by_decay[1.5]
    means = [SEEDS["mean_perplexity"](by_decay[decay]) for decay in (1.5, 0.75)]
    assert {f"{choice(rows):.2f}" for rows in by_decay.values()} == {"43.01"}
    assert f"on the held-out books {means[0]:.2f} with 1.5 and {means[1]:.2f} with 0.75" in TABLES
    grids = chosen_by_seed_0(half, SMALL_THIRD)
    for kind in (("implicit", 4, 4), ("explicit", 4, 0), ("explicit", 8, 0)):
        assert set(grids[kind]) == {(2e-3, 2), (2e-3, 1), (4e-3, 1), (1e-3, 2), (2e-3, 4)}
        assert best(grids[kind]) == (2e-3, 2)


def test_more_text_per_parameter(half: dict[str, Any], leads: Any) -> None:
    more, most, few = (leads["a", part, "adamw"] for part in PARTS["PER_PARAMETER"])
    least = leads["a", SMALLEST, "adamw"]
    text = f"from {below(least)} % with half a token per parameter to {below(more)} % with 2.7 (95 % interval"
    text = f"{text}: {interval(more)}) and {below(most)} % with 7.4 (95 % interval: {interval(most)}, two"
    assert f"{text} seeds); every implicit seed is below every explicit one" in TABLES
    assert more["below_with_every_seed"]
    assert most["below_with_every_seed"]
    above = percent(few["difference"], sign=False)
    assert f"is {above} % above the explicit one (95 % interval: {interval(few)})" in TABLES
    found = [models(half, part) for part in PARTS["PER_PARAMETER"]]
    own = [
        below(difference(on_choice(one["implicit 4"]), on_choice(one["explicit 4 w128"])))
        for one in found[:2]
    ]
    assert f"On the text of the choice it is {own[0]} and {own[1]} %." in TABLES
    runs = [run for one in found for run in one["implicit 4"]]
    assert f"by their own residual {ends(half['own_residual'](runs), 2)} % of the tokens" in TABLES
    sides = (
        [run for one in found for name, rows in one.items() if name.startswith(side) for run in rows]
        for side in ("implicit", "explicit")
    )
    scaled = [SEEDS["length_ratios"](side, "llama3") for side in sides]
    assert f"is {min(scaled[0]):.2f} to {max(scaled[0]):.2f} times that at the training length" in TABLES
    assert f"and {min(scaled[1]):.2f} to {max(scaled[1]):.2f} times for the explicit models" in TABLES
    for part, points in zip(PARTS["PER_PARAMETER"], (3, 2, 3), strict=True):
        (row,) = (row for row in half["compared"]() if row[1] == part)
        assert [len(half["points_tried"](part, side[0])) for side in row[2:]] == [points, points]


def test_the_search_for_a_better_recipe(half: dict[str, Any]) -> None:
    families = [half["by_recipe"](runs) for runs in half["search"]()]
    assert all(
        [run["recipe"]["seed"] for run in rows] == [0, 6, 7] for one in families for rows in one.values()
    )
    llama, mamba2 = (
        sorted((choice(rows), half["model_of"](recipe)) for recipe, rows in one.items()) for one in families
    )
    end = "implicit, 1-2-1, 3 loops, 8 from 80%, penalty 4, gates of at most 0.75"
    staged = "implicit, 1-2-1, 4 loops, gates of at most 0.75, in stages of 1 to 4 loops, penalty 4"
    of = [{name.removesuffix(", weight norm"): mean for mean, name in one} for one in (llama, mamba2)]
    text = f"For Llama 8 loops at the end ({of[0][end]:.2f}) come before stages ({of[0][staged]:.2f}), for"
    text = f"{text} Mamba2 stages ({of[1][staged]:.2f}) before 8 loops at the end ({of[1][end]:.2f})"
    assert text in TABLES
    gains = [
        percent(1 - one[best] / one[other], sign=False)
        for one, best, other in zip(of, (end, staged), (staged, end), strict=True)
    ]
    assert f"prefers the first recipe by {gains[0]} %, and Mamba2 the second by {gains[1]} %" in MAIN
    assert llama[4][0] / llama[0][0] < 1.0051
    assert mamba2[3][0] / mamba2[0][0] < 1.0041
    for one, low, high in ((llama, 0.005, 0.009), (mamba2, 0.0095, 0.014)):
        changed = [mean / one[0][0] - 1 for mean, name in one if "2-1-1" in name or "1-1-1" in name]
        assert len(changed) == 3
        assert low <= min(changed)
        assert math.isclose(max(changed), high, abs_tol=5e-4)
    assert "up to 0.9 % worse for Llama and 1.0 to 1.4 % for Mamba2" in TABLES


def test_gates_with_muon(half: dict[str, Any], leads: Any) -> None:
    runs = models(half, MUON)
    explicit = runs["explicit 4 w256 gates"]
    three, stages = (difference(runs[f"implicit 4{kind}"], explicit) for kind in ("", " stages"))
    assert three == leads["a", MUON, "muon"]
    assert three["below_with_every_seed"]
    own = [
        below(difference(on_choice(runs[f"implicit 4{kind}"]), on_choice(explicit)))
        for kind in ("", " stages")
    ]
    text = (
        f"are {below(three)} % below the explicit model with gates (95 % interval: {interval(three)}), every"
    )
    assert f"{text} seed below every explicit one, and {own[0]} % on the text of the choice" in TABLES
    above = percent(stages["difference"], sign=False)
    text = f"Llama is {above} % above it (95 % interval: {interval(stages)}), although the text of the choice"
    assert f"{text} prefers it by {own[1]} %" in TABLES


def test_ablations_of_mamba2_and_of_a_search_to_a_tolerance(half: dict[str, Any]) -> None:
    ablations = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_ablations.py"))
    results = {half["recipe_of"](run): run for run in half["read"](PARTS["ABLATED"])}

    def row(group: str, label: str) -> dict[str, Any]:
        recipe = half["Recipe"].of({**ablations["COMMON"], **ablations["GROUPS"][group][label]})
        found: dict[str, Any] = results[recipe]
        return found

    def share(run: dict[str, Any]) -> str:
        return percent(at_fixed_point(run)[1], sign=False)

    searched = row("convergence", "to a tolerance of 0.01 from 95%, 3 phantom steps")
    fixed = row("gradient", "3 phantom steps")
    assert abs(searched["choice"] / fixed["choice"] - 1) < 0.003
    assert f"number of iterations; {share(searched)} instead of {share(fixed)} % of the tokens" in TABLES
    base = row("Mamba2", "3 loops, 8 from 80%")
    damped = [row("Mamba2", f"damping {value}") for value in (0.8, 0.5)]
    gains = [[percent(1 - run[on] / base[on], sign=False) for run in damped] for on in ("choice", "report")]
    assert gains[1][0] == gains[1][1]
    text = f"by {gains[0][0]} and {gains[0][1]} % on the text of the choice and by {gains[1][0]} % on the"
    text = f"{text} held-out books, and fewer tokens converge: {share(damped[0])} and {share(damped[1])}"
    assert f"{text} instead of {share(base)} %" in TABLES
    gated, phantom = row("Mamba2", "gates of at most 0.75"), row("Mamba2", "3 phantom steps")
    anderson = row("Mamba2", "Anderson acceleration, 3 phantom steps")
    lower = [percent(1 - gated[on] / base[on], sign=False) for on in ("choice", "report")]
    assert f"Gates lower it by {lower[0]} and {lower[1]} %." in TABLES
    worse = [
        percent(run[on] / base[on] - 1, sign=False)
        for run in (phantom, anderson)
        for on in ("choice", "report")
    ]
    text = f"Three phantom steps after 3 iterations are {worse[0]} and {worse[1]} % worse, and with Anderson"
    assert f"{text} acceleration in training {worse[2]} and {worse[3]} %." in TABLES


def test_text_seen_once_by_mamba2_and_by_explicit_models_of_other_sizes(
    half: dict[str, Any], leads: Any
) -> None:
    lead = leads["c", PARTS["ONCE_MAMBA2"], "adamw"]
    for text in (
        f"{below(lead)} % below ({interval(lead)})",
        f"{below(lead)} % below it (95 % interval: {interval(lead)})",
    ):
        assert text in f"{MAIN} {TABLES}"
    runs = models(half, PARTS["ONCE_MAMBA2"])
    changes = [change for change, _ in map(at_fixed_point, runs["implicit 4"])]
    text = f"a search raises its perplexity by {percent(min(changes), sign=False)} to"
    assert f"{text} {percent(max(changes), sign=False)} %" in TABLES
    zero = half["choosing"](half["read"](PARTS["ONCE_MAMBA2"]))
    undamped, explicit = (
        min(found, key=lambda run: run["choice"])
        for found in (
            [run for run in zero if run["side"] == "implicit" and run["recipe"]["damping"] == 1],
            [run for run in zero if run["recipe"]["layers"] == [0, 4, 0]],
        )
    )
    grids = chosen_by_seed_0(half, PARTS["ONCE_MAMBA2"])
    kinds = (("explicit", 4, 0), ("implicit", 4, 2))
    assert {best(grids[kind]) for kind in kinds} == {(4e-3, 0.3)}
    higher, chosen = (
        [f"{grids[kind][point]['choice']:.2f}" for kind in kinds] for point in ((8e-3, 0.1), (4e-3, 0.3))
    )
    text = f"with 8e-3 seed 0 has {higher[0]} (explicit) and {higher[1]} (implicit) on the text of the"
    assert f"{text} choice, where 4e-3 has {chosen[0]} on both sides" in TABLES
    assert chosen[0] == chosen[1]
    above = percent(undamped["report"] / explicit["report"] - 1, sign=False)
    assert f"all tokens converge, and seed 0 is {above} % above the explicit one" in TABLES
    assert at_fixed_point(undamped)[1] > 0.999
    least: dict[tuple[int, int], float] = {}
    for run in half["choosing"](half["read"](PARTS["ONCE_DAMPED"])):
        recipe = run["recipe"]
        if run["side"] == "explicit" and recipe["optimizer"] == "adamw":
            key = (recipe["layers"][1], recipe["width"])
            least[key] = min(run["choice"], least.get(key, math.inf))
    text = "8 narrower layers have {:.2f} on the text of the choice, 3 wider ones {:.2f}, and larger models,"
    assert text.format(least[8, 192], least[3, 320]) in TABLES
    text = "{:.2f} and {:.2f}, where 4 layers of 5.3 M parameters have {:.2f}"
    assert text.format(least[4, 384], least[8, 256], least[4, 256]) in TABLES

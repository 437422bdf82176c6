"""Statements on Mamba2 with 4 layers, and on the injection attractor with a penalty, equal the results."""

from typing import Any

from tests.documentation.equal_compute_pages import (
    PAGE,
    PARTS,
    SEEDS,
    below,
    choice,
    ends,
    interval,
    on_choice,
    percent,
    words,
)
from trainer.experiments.equal_compute.tables import at_fixed_point

FOUR, LONGER, WIDE, PENALIZED = (
    PARTS[name] for name in ("MAMBA2_FOUR", "MAMBA2_FOUR_LONG", "MAMBA2_FOUR_10M", "PENALIZED")
)
Runs = list[dict[str, Any]]


def reported(half: dict[str, Any], part: str) -> dict[str, Runs]:
    """Return the reported runs of a part by side, layers and, if they grow in stages, loops."""
    return {
        f"{recipe.side} {sum(recipe.layers)}{' stages' if recipe.loops == 4 else ''}": list(rows)
        for recipe, rows in half["several_seeds"](part)
    }


def converged(runs: Runs) -> list[float]:
    return [share for _, share in map(at_fixed_point, runs)]


def of_seed_0(half: dict[str, Any], part: str, model: str, **recipe: float) -> dict[str, Any]:
    """Return the run of seed 0 of a model with these values in its recipe."""
    (found,) = (
        run
        for run in half["choosing"](half["read"](part))
        if half["model_of"](half["recipe_of"](run)) == model and recipe.items() <= run["recipe"].items()
    )
    return dict(found)


def test_mamba2_of_5_5_m(half: dict[str, Any], leads: Any) -> None:
    runs, difference = reported(half, FOUR), SEEDS["difference_of_runs"]
    ours, four = runs["implicit 4"], runs["explicit 4"]
    eight, fast = (
        rows
        for recipe, rows in sorted(half["several_seeds"](FOUR), key=lambda one: one[0].learning_rate)
        if recipe.layers == (0, 8, 0)
    )
    lead, beside = leads["a", FOUR, "adamw"], leads["b", FOUR, "adamw"]
    assert (lead, beside) == (difference(ours, four), difference(ours, eight))
    assert lead["below_with_every_seed"]
    assert lead["difference"] <= -0.05
    text = f"4 layers** is {below(lead)} % below the explicit one with the same layers on the other text,"
    assert f"{text} without additional FLOPs (95 % interval: {interval(lead)})" in PAGE
    text = f"{below(beside)} % below ({interval(beside)}), and beside 8 narrower ones, 5.8 M parameters,"
    lone = of_seed_0(half, FOUR, "implicit, 1-2-1, 3 loops from 50%, 8 from 80%, weight norm",
                     learning_rate=2e-3, weight_decay=2.0)  # fmt: skip
    narrow = of_seed_0(half, FOUR, "explicit, 8 layers, weight norm", width=256)
    less = percent(1 - lone["report"] / narrow["report"], sign=False)
    assert f"8.3 M parameters, it is {text} {less} % (one seed of each side)" in PAGE
    text = (
        f"have {narrow['report']:.2f} with seed 0 and one learning rate; the implicit model is {less} % below"
    )
    assert text in PAGE
    assert [f"{rows[0]['parameters'] / 1e6:.1f}" for rows in (ours, four, eight)] == ["5.5", "5.5", "8.3"]
    own = difference(on_choice(ours), on_choice(four))
    text = f"is {below(lead)} % below the explicit one of equal size (95 % interval: {interval(lead)}), every"
    assert f"{text} seed below every explicit one, and {below(own)} % on the text of the choice" in PAGE
    deep = difference(eight, four)
    text = (
        f"are {below(deep)} % below 4 of them, and the implicit model, with as many FLOPs and two thirds of"
    )
    text = f"{text} the parameters, is {below(beside)} % below those (95 % interval: {interval(beside)})"
    former = difference(ours, fast)
    assert f"{text}, and {below(former)} % below the same model with a rate of 4e-3" in PAGE
    assert choice(eight) < choice(fast)
    longer = [
        of_seed_0(half, LONGER, model, learning_rate=2e-3)["report"]
        for model in ("implicit, 1-2-1, 3 loops from 50%, 8 from 80%, weight norm",
                      "explicit, 4 layers, weight norm")
    ]  # fmt: skip
    text = (
        f"is {percent(1 - longer[0] / longer[1], sign=False)} % below ({longer[0]:.2f} and {longer[1]:.2f})"
    )
    assert f"With twice the FLOPs, seed 0, it {text}" in PAGE
    for side in (ours, four):
        points = {
            (run["recipe"]["learning_rate"], run["recipe"]["weight_decay"]): run["choice"]
            for run in half["choosing"](half["read"](FOUR))
            if half["recipe_of"](run).with_seed(1).shape == half["recipe_of"](side[0]).shape
            and run["recipe"]["share"] == 1
        }
        assert {rate for rate, _ in points} == {1e-3, 2e-3, 4e-3, 8e-3}
        assert {decay for _, decay in points} == {1, 2, 4}
        assert min(points, key=lambda point: points[point]) == (2e-3, 2)


def test_mamba2_of_11_1_m(half: dict[str, Any], leads: Any) -> None:
    runs, difference = reported(half, WIDE), SEEDS["difference_of_runs"]
    ours, four, eight = (runs[name] for name in ("implicit 4", "explicit 4", "explicit 8"))
    same, narrow = difference(ours, four), difference(ours, eight)
    assert (same, narrow) == (leads["a", WIDE, "adamw"], leads["b", WIDE, "adamw"])
    assert narrow["difference"] > 0
    assert same["below_with_every_seed"]
    above = percent(narrow["difference"], sign=False)
    text = f"parameters it is {below(same)} % below 4 explicit layers and {above} % above 8 narrower ones"
    assert f"{text} of equal size ({interval(narrow)})" in PAGE
    text = (
        f"it is {below(same)} % below 4 explicit layers (95 % interval: {interval(same)}), every seed below"
    )
    assert f"{text} every explicit one, and {above} % above 8 explicit layers of width 384" in PAGE
    own = difference(on_choice(ours), on_choice(eight))
    assert f"On the text of the choice it is {below(own)} % below these" in PAGE
    changed = [run for run in half["choosing"](half["read"](WIDE)) if run["recipe"]["changes"]]
    plain = {"implicit": 4e-3, "explicit": 2e-3}
    assert len(changed) == 4
    for run in changed:
        (base,) = (
            other["choice"]
            for other in half["choosing"](half["read"](WIDE))
            if {**other["recipe"], "changes": run["recipe"]["changes"]} == run["recipe"]
            and not other["recipe"]["changes"]
            and other["recipe"]["learning_rate"] == plain[run["side"]]
        )
        assert abs(run["choice"] / base - 1) < 0.002
    middle = of_seed_0(half, WIDE, "implicit, 1-1-2, 3 loops from 50%, 8 from 80%, weight norm")
    assert f"1-1-2 has {middle['report']:.2f} with seed 0" in PAGE


def test_convergence_of_mamba2_with_four_layers(half: dict[str, Any]) -> None:
    small, wide = (reported(half, part)["implicit 4"] for part in (FOUR, WIDE))
    own = [ends(half["own_residual"](runs), 2) for runs in (small, wide)]
    text = (
        f"by their own residual {own[0]} % of the tokens are within the tolerance in 32 iterations at 5.5 M"
    )
    text = (
        f"{text} parameters, and {own[1]} % at 11.1 M; with all tokens before them {ends(converged(small))} %"
    )
    assert f"{text} and {ends(converged(wide))} %" in PAGE


def test_the_attractor_injection_with_a_penalty(half: dict[str, Any], leads: Any) -> None:
    lead, runs = leads["a", PENALIZED, "adamw"], reported(half, PENALIZED)
    text = (
        f"It is {below(lead)} % below the explicit model with half of the FLOPs ({interval(lead)}), but one"
    )
    twice = reported(half, "Llama, other text, twice the FLOPs")["explicit 4"]
    highest = max(run["report"] for run in runs["implicit 4"])
    least, second = sorted(run["report"] for run in twice)[:2]
    assert max(least, *sorted(run["report"] for run in runs["implicit 4"])[:-1]) < highest < second
    text = f"{text} seed of three ({highest:.2f}) is above one explicit seed ({least:.2f})"
    assert text.replace("It is", "it is") in PAGE.replace("It is", "it is")
    assert f"with a penalty {below(lead)} % below with four times ({interval(lead)}), and all tokens" in PAGE
    kind = "penalty 4"
    zero = {
        injection: of_seed_0(half, PENALIZED, f"implicit, 1-2-1{name}, 3 loops, 8 from 80%, {kind}{gates}")
        for injection, name, gates in (
            ("attractor", " attractor", ""),
            ("residual", "", ", gates of at most 0.75"),
        )
    }
    every = [zero["attractor"], *runs["implicit 4"]]
    assert {percent(share, sign=False) for share in converged(every)} == {"100.0"}
    changes = [change for change, _ in map(at_fixed_point, every)]
    text = f"is {percent(min(changes))} to {percent(max(changes))} % from that with the loops of training"
    assert f"the perplexity at the fixed point {text}" in PAGE
    text = f"({zero['residual']['choice']:.2f} instead of {zero['attractor']['choice']:.2f}), and"
    assert f"{text} {ends(converged([zero['residual']]))[:4]} % of its tokens converge" in PAGE
    mean = SEEDS["mean_perplexity"](runs["explicit 4"])
    assert f"Explicit models with gates ({mean:.2f}) are no better than with half of the FLOPs" in PAGE
    beside = leads["b", PENALIZED, "adamw"]
    assert f"with a penalty {below(beside)} % ({interval(beside)})" in PAGE


def test_the_statements_of_other_pages(half: dict[str, Any], leads: Any) -> None:
    notes, changes = (words(name) for name in ("benchmarks/NOTES.md", "CHANGELOG.md"))
    four, eight = leads["a", FOUR, "adamw"], leads["b", FOUR, "adamw"]
    wide = leads["b", WIDE, "adamw"]
    assert eight["interval"][0] < 0 < eight["interval"][1]
    text = f"4 layers and 5.5 M parameters is {below(four)} % below on the other text ({interval(four)}), but"
    text = f"{text} {below(eight)} % beside 8 explicit layers of 8.3 M ({interval(eight)}); at 11.1 M it is"
    assert (
        f"{text} {percent(wide['difference'], sign=False)} % above 8 explicit layers of equal size" in notes
    )
    assert f"or {below(four)} % with 4 layers (5.5 M)" in changes

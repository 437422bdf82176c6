"""Statements on models with gates and a number of loops that grows in stages equal those of the results."""

import json
from typing import Any

import pytest

from tests.documentation.equal_compute_pages import (
    MAIN,
    PARTS,
    ROOT,
    SEEDS,
    TABLES,
    below,
    choice,
    ends,
    interval,
    on_choice,
    percent,
    read,
    words,
)
from trainer.experiments.equal_compute.tables import at_fixed_point

GATED, THIRD, LARGE, MUON, ONCE = (
    PARTS[name] for name in ("GATED", "GATED_THIRD", "GATED_30M", "GATED_MUON", "ONCE_GATED")
)
SMALL, SMALL_THIRD, WIDE = (
    PARTS[name] for name in ("MAMBA2_STAGES", "MAMBA2_STAGES_THIRD", "MAMBA2_STAGES_10M")
)
SEVERAL = (GATED, THIRD, SMALL, SMALL_THIRD, WIDE)
Runs = list[dict[str, Any]]
difference = SEEDS["difference_of_runs"]


def _kind(recipe: Any) -> str:
    return f" w{recipe.width}" if recipe.side == "explicit" else " stages" if recipe.loops == 4 else ""


def models(half: dict[str, Any], part: str) -> dict[str, Runs]:
    """Return the reported runs of a part by side, layers, stages and, of explicit models, width."""
    return {
        f"{recipe.side} {sum(recipe.layers)}{_kind(recipe)}": rows
        for recipe, rows in half["several_seeds"](part)
    }


def converged(runs: Runs) -> list[float]:
    return [share for _, share in map(at_fixed_point, runs)]


def test_the_headline(half: dict[str, Any], leads: Any) -> None:
    found = {part: leads["a", part, "adamw"] for part in (*SEVERAL, LARGE)}
    assert all(one["below_with_every_seed"] for one in found.values())
    assert "Every implicit seed is below every explicit one" in MAIN
    text = f"Llama, 5.3 M parameters: {below(found[GATED])} % below on the other text (95 % interval: "
    text = f"{text}{interval(found[GATED])}), on which the recipe was chosen, and {below(found[THIRD])} %"
    assert f"{text} below on the third text ({interval(found[THIRD])})" in MAIN
    assert f"29.9 M parameters: {below(found[LARGE])} % below, with one seed of each side" in MAIN
    assert found[LARGE]["seeds"] == [1, 1]
    text = f"5.5 M parameters in 4 layers: {below(found[SMALL])} % below on the other text"
    text = f"{text} ({interval(found[SMALL])}) and {below(found[SMALL_THIRD])} % below on the third text"
    assert f"{text} ({interval(found[SMALL_THIRD])})" in MAIN
    text = f"11.1 M parameters in 4 layers: {below(found[WIDE])} % below ({interval(found[WIDE])})"
    assert text in MAIN
    assert {part for part in found if found[part]["difference"] > -0.05} == {THIRD, LARGE}
    assert f"**A lead of 5 % with every seed** by Llama on the third text ({below(found[THIRD])} %)." in MAIN
    assert 0 < found[LARGE]["difference"] + 0.05 < 0.0001
    assert "it is missed by less than 0.01 percentage points" in MAIN
    three = difference(models(half, GATED)["implicit 4"], models(half, PARTS["ABLATED"])["explicit 4 w256"])
    runs = models(half, THIRD)
    other = difference(runs["implicit 4"], runs["explicit 4 w256"])
    text = f"Llama is {below(three)} % below on the other text and {below(other)} % on the third"
    assert text in MAIN
    assert three["below_with_every_seed"]
    assert other["below_with_every_seed"]


def test_beside_explicit_models_of_any_depth_and_width(half: dict[str, Any], leads: Any) -> None:
    llama, small, wide = (leads["b", part, "adamw"] for part in (THIRD, SMALL, WIDE))
    assert f"Llama is {below(llama)} % below 8 explicit layers of 8.5 M parameters" in MAIN
    assert f"on the third text ({interval(llama)})" in MAIN
    deep = difference(
        models(half, SMALL)["implicit 4 stages"], models(half, PARTS["MAMBA2_FOUR"])["explicit 8 w320"]
    )
    text = f"{below(small)} % below 8 narrower explicit layers of equal size ({interval(small)}) and"
    assert f"{text} {below(deep)} % below 8 of the same width, 8.3 M parameters ({interval(deep)})" in MAIN
    assert (
        f"and {below(deep)} % below 8 of the same width, 8.3 M parameters (95 % interval: {interval(deep)})"
        in TABLES
    )
    text = f"11.1 M is {below(wide)} % below 8 layers of equal size ({interval(wide)})"
    assert text in MAIN
    readme = words("README.md")
    text = f"Llama 5M {below(llama)} % ({interval(llama)}, not significant), Mamba2 {below(small)} % (5M) and"
    assert f"{text} {below(wide)} % (11M)" in readme
    notes = words("benchmarks/NOTES.md")
    text = f"Llama {below(llama)} % ({interval(llama)}), Mamba2 {below(small)} and {below(wide)} %."
    assert text in notes


def test_llama_on_the_other_text(half: dict[str, Any], leads: Any) -> None:
    runs, plain = models(half, GATED), models(half, PARTS["ABLATED"])
    stages, gates, gated = (runs[name] for name in ("implicit 4 stages", "implicit 4", "explicit 4 w256"))
    text = (
        f"stages ({choice(stages):.2f}) to gates with 3 loops and 8 at the end ({choice(gates):.2f}) and to"
    )
    text = f"{text} the recipe without gates ({choice(plain['implicit 4']):.2f}), and explicit models"
    text = f"{text} without gates ({choice(plain['explicit 4 w256']):.2f}) to those with them"
    assert f"{text} ({choice(gated):.2f})" in TABLES
    lead, other = (difference(ours, plain["explicit 4 w256"]) for ours in (stages, gates))
    assert lead == leads["a", GATED, "adamw"]
    text = f"{below(lead)} % below with stages ({interval(lead)}) and {below(other)} % below with 3 loops"
    assert f"{text} (95 % interval: {interval(other)}), every seed below every explicit one" in TABLES
    seed_0 = [run for run in half["choosing"](half["read"](GATED)) if run["recipe"]["loops"] == 4]
    residual = [run for run in seed_0 if run["recipe"]["injection"] == "residual"]
    every = [*residual, *stages]
    assert len(every) == 4
    assert {percent(share, sign=False) for share in converged(every)} == {"100.0"}
    within = half["own_residual"](every, max_iterations=16)
    assert min(within) >= 0.99
    assert (
        f"and {ends(within, 2)} % are within the tolerance in 16 iterations by their own residual" in TABLES
    )
    assert f"With 3 loops {ends(converged(gates))} % converge in 32 iterations" in TABLES


def test_llama_on_the_third_text(half: dict[str, Any]) -> None:
    runs = models(half, THIRD)
    four, eight = (
        [difference(runs[ours], runs[f"explicit {n} w256"]) for ours in ("implicit 4 stages", "implicit 4")]
        for n in (4, 8)
    )
    text = f"Llama is {below(four[0])} % below with stages ({interval(four[0])}) and {below(four[1])} % below"
    assert f"{text} with 3 loops (95 % interval: {interval(four[1])}), every seed below" in TABLES
    own = [
        below(difference(on_choice(runs[ours]), on_choice(runs["explicit 4 w256"])))
        for ours in ("implicit 4 stages", "implicit 4")
    ]
    assert own[0] == own[1]
    assert f"on the text of the choice both are {own[0]} % below" in TABLES
    text = (
        f"they are {below(eight[0])} % ({interval(eight[0])}) and {below(eight[1])} % below (95 % interval:"
    )
    assert f"{text} {interval(eight[1])})" in TABLES
    assert not half["choosing"](half["read"](THIRD) + half["read"](SMALL_THIRD))


def test_mamba2(half: dict[str, Any]) -> None:
    small, before = models(half, SMALL), models(half, PARTS["MAMBA2_FOUR"])
    mean = SEEDS["mean_perplexity"]
    text = f"from {mean(before['implicit 4']):.2f} ([one loop, then 3](#mamba2-with-4-layers)) to"
    assert f"{text} {mean(small['implicit 4 stages']):.2f}" in TABLES
    for side in ("implicit", "explicit"):
        points = {
            (run["recipe"]["learning_rate"], run["recipe"]["weight_decay"]): run["choice"]
            for run in half["choosing"](half["read"](SMALL))
            if run["side"] == side
        }
        assert {rate for rate, _ in points} == {1e-3, 2e-3, 4e-3}
        assert {decay for _, decay in points} == {1, 2, 4}
        assert min(points, key=lambda point: points[point]) == (2e-3, 2)
    (plain,) = (
        run
        for run in half["choosing"](half["read"](WIDE))
        if run["side"] == "implicit"
        and run["recipe"]["learning_rate"] == 2e-3
        and run["recipe"]["weight_decay"] == 2
    )
    assert f"Without gates and stages seed 0 has {plain['report']:.2f}" in TABLES
    explicit = [run["recipe"] for run in half["choosing"](half["read"](WIDE)) if run["side"] == "explicit"]
    assert {recipe["learning_rate"] for recipe in explicit} == {2e-3, 4e-3}


def test_llama_of_29_9_m(half: dict[str, Any], leads: Any) -> None:
    ours, theirs = (rows[1] for rows in half["single_seeds"](LARGE, "adamw"))
    own = difference(on_choice(ours), on_choice(theirs))
    lead = leads["a", LARGE, "adamw"]
    text = f"{below(lead)} % below the explicit one and {below(own)} % on the text of the choice, and 100.0 %"
    assert text in TABLES
    assert {run["recipe"]["learning_rate"] for run in (*ours, *theirs)} == {1e-3}
    assert min(converged(ours)) > 0.9995
    assert below(leads["a", "Llama, 30 M", "adamw"]) == "0.7"


def test_convergence(half: dict[str, Any]) -> None:
    every = {part: models(half, part)["implicit 4 stages"] for part in SEVERAL}
    every[LARGE] = half["single_seeds"](LARGE, "adamw")[0][1]
    runs = [run for rows in every.values() for run in rows]
    own = half["own_residual"](runs)
    assert own[0] >= 0.99
    assert f"by their own residual {ends(own, 2)} % of the tokens of every model" in MAIN
    changes = [change for change, _ in map(at_fixed_point, runs)]
    text = f"changes the perplexity by {percent(min(changes))} to {percent(max(changes))} %"
    assert text in MAIN
    reaching = {part for part, rows in every.items() if min(converged(rows)) >= 0.99}
    assert reaching == {GATED, LARGE}
    others = [share for part, rows in every.items() if part not in reaching for share in converged(rows)]
    assert f"{ends(others)} % of the tokens converge in 32 iterations" in TABLES
    missing = {part: sum(share < 0.99 for share in converged(rows)) for part, rows in every.items()}
    assert {count for part, count in missing.items() if part not in reaching} == {1, 2}
    lowest, *_, highest = sorted(share for share in others if share < 0.99)
    assert f"with {ends([lowest, highest])} %. By their own residual all models reach it" in MAIN
    rest = [run for part, rows in every.items() if part not in reaching for run in rows]
    within = half["own_residual"](rest, max_iterations=16)
    assert f"Within 16 iterations {ends(within, 2)} % are within the tolerance" in TABLES


def test_gates_with_muon(half: dict[str, Any], leads: Any) -> None:
    runs = models(half, MUON)
    three, stages = (
        difference(runs[f"implicit 4{kind}"], runs["explicit 4 w256"]) for kind in ("", " stages")
    )
    assert three == leads["a", MUON, "muon"]
    assert three["below_with_every_seed"]
    own = [
        below(difference(on_choice(runs[f"implicit 4{kind}"]), on_choice(runs["explicit 4 w256"])))
        for kind in ("", " stages")
    ]
    text = (
        f"are {below(three)} % below the explicit model with gates (95 % interval: {interval(three)}), every"
    )
    assert f"{text} seed below every explicit one, and {own[0]} % on the text of the choice" in TABLES
    above = percent(stages["difference"], sign=False)
    text = f"Llama is {above} % above it (95 % interval: {interval(stages)}), although the text of the choice"
    assert f"{text} prefers it by {own[1]} %" in TABLES


def test_text_seen_once_with_gates(half: dict[str, Any], leads: Any) -> None:
    adamw, muon = (leads["c", ONCE, optimizer] for optimizer in ("adamw", "muon"))
    above = [percent(found["difference"], sign=False) for found in (adamw, muon)]
    text = (
        f"{above[0]} % above the explicit one with AdamW ({interval(adamw)}) and {above[1]} % above with Muon"
    )
    assert f"{text} ({interval(muon)})" in MAIN
    text = (
        f"{above[0]} % above the explicit one with AdamW (95 % interval: {interval(adamw)}) and {above[1]} %"
    )
    assert f"{text} above with Muon (95 % interval: {interval(muon)})" in TABLES
    notes = words("benchmarks/NOTES.md")
    assert f"missed with AdamW ({above[0]} % above) and Muon ({above[1]} %)" in notes
    runs = read("once_gates")
    assert all(run["epochs"] < 1 for run in runs)
    seed_0 = half["best_of_each_model"](half["choosing"](runs))

    def of(optimizer: str, model: str) -> Any:
        (found,) = (
            run
            for run in seed_0
            if (half["model_of"](half["recipe_of"](run)), run["recipe"]["optimizer"]) == (model, optimizer)
        )
        return found

    gates = ", gates of at most 0.75"
    plain, gated = of("adamw", "explicit, 4 layers"), of("adamw", f"explicit, 4 layers{gates}")
    assert f"explicit model from {plain['report']:.2f} to {gated['report']:.2f}" in TABLES
    assert (plain["recipe"]["learning_rate"], gated["recipe"]["learning_rate"]) == (1e-3, 2e-3)
    early, late = (of("muon", f"implicit, 1-2-1, 2 loops from {when}%{gates}") for when in (50, 97))
    text = f"{early['choice']:.2f} from half of the steps and {late['choice']:.2f} from 97 %"
    assert text in TABLES
    assert {run["recipe"]["learning_rate"] for run in (early, late)} == {2e-3}


@pytest.mark.parametrize("page", ["README.md", "docs/language.md", "benchmarks/NOTES.md", "CHANGELOG.md"])
def test_the_statements_of_other_pages(page: str, leads: Any) -> None:
    text = words(page)
    llama, third, large, small, small_third, wide = (
        leads["a", part, "adamw"] for part in (GATED, THIRD, LARGE, SMALL, SMALL_THIRD, WIDE)
    )
    wanted = {
        "README.md": (
            f"Llama 5M: {below(llama)} % on one text (95 % interval: {interval(llama)}) and {below(third)} %"
            f" on another ({interval(third)}). Llama 30M: {below(large)} %, one seed. - Mamba2 5M:"
            f" {below(small)} % ({interval(small)}) and {below(small_third)} % ({interval(small_third)})."
            f" Mamba2 11M: {below(wide)} % ({interval(wide)})."
        ),
        "docs/language.md": (
            f"the lead is {below(llama)} and {below(third)} % for Llama on two texts, without additional"
            f" FLOPs, and {below(small)} and {below(small_third)} % for Mamba2"
        ),
        "benchmarks/NOTES.md": (
            f"Llama of 5.3 M parameters has {below(llama)} % on one text ({interval(llama)}) and"
            f" {below(third)} % on another ({interval(third)}), of 29.9 M {below(large)} % (one seed); Mamba2"
            f" of 5.5 M {below(small)} and {below(small_third)} %, of 11.1 M {below(wide)} %."
        ),
        "CHANGELOG.md": (
            f"Llama (`books_5m_residual`) is {below(llama)} % below its explicit twin on the second text"
            f" without additional FLOPs and {below(third)} % on a third, and Mamba2 with 4 layers"
            f" (`books_5m_mamba2_residual`) {below(small)} and {below(small_third)} %, {below(wide)} % at"
        ),
    }
    assert wanted[page] in text


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


@pytest.mark.parametrize(
    ("name", "parts"), [("residual", (GATED, THIRD)), ("mamba2_residual", (SMALL, SMALL_THIRD))]
)
def test_the_comments_of_the_zoo(name: str, parts: tuple[str, str], leads: Any) -> None:
    text = (ROOT / "zoo" / f"books_5m_{name}.yaml").read_text(encoding="utf-8").replace("\n#", "")
    chosen, other = (below(leads["a", part, "adamw"]) for part in parts)
    wanted = f"is {chosen} % below that of the explicit twin for the same FLOPs, and {other} % on a text on"
    assert wanted in " ".join(text.split())

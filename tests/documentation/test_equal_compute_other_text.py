"""Statements on the other text, on Mamba2 of 9.6 M and on other pages equal those of the result files."""

import math
import statistics
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

OTHER = "Llama, other text, twice the FLOPs"
MORE = "Llama, other text, four times the FLOPs"
MAMBA2 = "Mamba2, 10 M, twice the FLOPs"


def by_penalty(half: dict[str, Any]) -> dict[float, list[dict[str, Any]]]:
    """Return the reported runs on the other text by penalty; 0: 4 explicit layers."""
    return {
        recipe.residual_weight: rows
        for recipe, rows in half["several_seeds"](OTHER)
        if sum(recipe.layers) == 4
    }


def test_the_lead_on_the_other_text(half: dict[str, Any], leads: Any) -> None:
    runs = by_penalty(half)
    assert min(runs, key=lambda penalty: choice(runs[penalty])) == 4
    difference = SEEDS["difference_of_runs"]
    four, one = (difference(runs[penalty], runs[0]) for penalty in (4, 1))
    assert four == leads["a", OTHER, "adamw"]
    text = f"the implicit model is {below(four)} % below the explicit one; with a penalty of 1 it is"
    assert f"{text} {below(one)} % below (95 % interval: {interval(one)})" in PAGE
    own = [difference(on_choice(runs[penalty]), on_choice(runs[0])) for penalty in (4, 1)]
    assert all(found["below_with_every_seed"] for found in own)
    text = " and ".join(map(below, own))
    assert f"they are {text} % below, every seed below every explicit one" in PAGE
    ours, theirs = ([run["report"] for run in runs[penalty]] for penalty in (4, 0))
    ends = [f"{min(side):.2f} to {max(side):.2f}" for side in (ours, theirs)]
    first = half["several_seeds"]("Llama, twice the FLOPs")
    before = [
        [run["report"] for recipe, rows in first if recipe.side == side for run in rows]
        for side in ("implicit", "explicit")
    ]
    spread = [percent(statistics.stdev(map(math.log, side)), sign=False) for side in (*before, ours, theirs)]
    text = f"the standard deviations are {spread[0]} % (implicit) and {spread[1]} % (explicit); here they are"
    assert f"{text} {spread[2]} % (penalty 4, {ends[0]}) and {spread[3]} % ({ends[1]})" in PAGE
    assert four["interval"][0] < leads["a", "Llama, twice the FLOPs", "adamw"]["interval"][1]
    assert [sum(mine > other for mine in ours) for other in sorted(theirs)] == [4, 0, 0, 0, 0]
    text = "One explicit seed is below four of the five implicit ones, which are all below the other four"
    assert text in PAGE
    tokens = {
        round(run["tokens"] / run["epochs"] / 1e6, 2)
        for part in (OTHER, MAMBA2)
        for run in half["read"](part)
    }
    assert f"on {tokens.pop()} M tokens of 20 other books" in PAGE
    assert not tokens


def test_the_recipes_on_the_other_text_are_not_at_an_edge_of_the_averages(half: dict[str, Any]) -> None:
    runs = by_penalty(half)
    assert {half["average_of"](run) for run in runs[0]} == {"0.9995"}
    assert {half["average_of"](run) for penalty in (1, 4) for run in runs[penalty]} == {"0.998"}
    assert all(max(run["recipe"]["average"]) == 0.9998 for run in runs[0])
    assert (
        "all explicit seeds chose 0.9995 and all implicit ones 0.998, so that neither is at an edge" in PAGE
    )
    zero = {
        run["recipe"]["residual_weight"]: run["choice"]
        for run in half["choosing"](half["read"](OTHER))
        if run["side"] == "implicit"
    }
    assert set(zero) == {1, 4, 16}
    assert f"({min(zero.values()):.2f} to {max(zero.values()):.2f})" in PAGE


def test_weight_norm_on_the_other_text(half: dict[str, Any], leads: Any) -> None:
    normed = {recipe.side: rows for recipe, rows in half["several_seeds"](PARTS["NORMED"])}
    ours, theirs = normed["implicit"], normed["explicit"]
    plain = by_penalty(half)
    values = [f"{choice(runs):.2f}" for runs in (ours, plain[1], theirs, plain[0])]
    text = f"({values[0]} instead of {values[1]}) and the explicit one loses"
    assert f"{text} ({values[2]} instead of {values[3]})" in PAGE
    assert choice(ours) < min(choice(plain[1]), choice(plain[4])) < choice(plain[0]) < choice(theirs)
    difference = SEEDS["difference_of_runs"]
    found = difference(ours, plain[0])
    assert found == leads["a", PARTS["NORMED"], "adamw"]
    assert (
        f"without it: {below(found)} % below (95 % interval: {interval(found)}), with three implicit" in PAGE
    )
    assert f"the implicit model is {below(found)} % below the explicit one ({interval(found)})" in PAGE
    notes = words("benchmarks/NOTES.md")
    assert f"({interval(found)}), but the same explicit seed is below two of its three" in PAGE
    assert (
        f"With weight norm it is {below(found)} % on the other text, with three seeds, two of which" in notes
    )
    above = [sum(mine["report"] > other["report"] for other in plain[0]) for mine in ours]
    assert sorted(above) == [0, 1, 1]
    own = difference(on_choice(ours), on_choice(plain[0]))
    assert own["below_with_every_seed"]
    assert (
        f"On the text of the choice it is {below(own)} % below, every seed below every explicit one" in PAGE
    )
    both = difference(ours, theirs)
    assert f"With weight norm on both sides it is {below(both)} % below" in PAGE
    zero = {
        (run["side"], run["recipe"]["learning_rate"]): run
        for run in half["choosing"](half["read"](PARTS["NORMED"]))
    }
    assert set(zero) == {(side, rate) for side in ("implicit", "explicit") for rate in (2e-3, 4e-3)}
    chosen = {
        side: min((rate for one, rate in zero if one == side), key=lambda rate: zero[side, rate]["choice"])
        for side in ("implicit", "explicit")
    }
    assert chosen == {"implicit": 2e-3, "explicit": 4e-3}
    text = f"its seed 0 has {zero['explicit', 4e-3]['report']:.2f} on the held-out books, the three others"
    values = sorted(run["report"] for run in theirs)
    assert f"{text} {values[0]:.2f} to {values[-1]:.2f}" in PAGE


def test_eight_explicit_layers_on_the_other_text(half: dict[str, Any], leads: Any) -> None:
    (deep,) = (rows for recipe, rows in half["several_seeds"](OTHER) if sum(recipe.layers) == 8)
    plain, difference = by_penalty(half), SEEDS["difference_of_runs"]
    less = [difference(*pair) for pair in ((deep, plain[0]), (on_choice(deep), on_choice(plain[0])))]
    text = f"are {below(less[0])} % below 4 layers, and {below(less[1])} % on the text of the choice"
    assert text in PAGE
    four, one = (difference(plain[penalty], deep) for penalty in (4, 1))
    normed = leads["b", PARTS["NORMED"], "adamw"]
    assert four == leads["b", OTHER, "adamw"]
    text = f"is {below(four)} % below them with a penalty of 4, {percent(one['difference'], sign=False)} %"
    text = f"{text} above with a penalty of 1 (95 % interval: {interval(one)}), and {below(normed)} % below"
    assert f"{text} with weight norm: level" in PAGE
    notes = words("benchmarks/NOTES.md")
    text = f"{below(four)} % over 8 explicit layers ({interval(four)}), {below(normed)} % with weight norm"
    assert text in notes


def test_four_times_the_flops_on_the_other_text(half: dict[str, Any], leads: Any) -> None:
    more = {recipe.side: rows for recipe, rows in half["several_seeds"](MORE)}
    ours, theirs = more["implicit"], more["explicit"]
    plain, difference = by_penalty(half), SEEDS["difference_of_runs"]
    (deep,) = (rows for recipe, rows in half["several_seeds"](OTHER) if sum(recipe.layers) == 8)
    seen = [f"{rows[0]['epochs']:.0f}" for rows in (ours, plain[4], theirs, plain[0])]
    gain = difference(ours, plain[4])
    assert choice(ours) < choice(plain[4])
    text = (
        f"sees the text {seen[0]} times instead of {seen[1]}. It improves on both texts, by {below(gain)} %"
    )
    assert f"{text} on the held-out books (95 % interval: {interval(gain)})" in PAGE
    text = f"sees the text {seen[2]} times instead of {seen[3]}, does not: the text of the choice prefers it"
    assert f"{text} with twice the FLOPs ({choice(plain[0]):.2f} instead of {choice(theirs):.2f})" in PAGE
    lead, own = difference(ours, plain[0]), difference(on_choice(ours), on_choice(plain[0]))
    assert lead == leads["a", MORE, "adamw"]
    assert lead["below_with_every_seed"]
    text = f"is {below(lead)} % below that ({interval(lead)}), every seed below every explicit one, and"
    assert f"{text} {below(own)} % on the text of the choice" in PAGE
    assert {half["average_of"](run) for run in ours} == {"0.9995"}
    equal, last = difference(ours, theirs), sorted(run["report"] for run in theirs)
    text = f"scatter from {last[0]:.2f} to {last[-1]:.2f}; the implicit model is {below(equal)} % below their"
    assert f"{text} mean (95 % interval: {interval(equal)})" in PAGE
    for rows in (ours, theirs):
        grid = rows[0]["recipe"]["average"]
        assert not {half["average_of"](run) for run in rows} & {f"{grid[0]:g}", f"{grid[-1]:g}"}
    free, own = difference(ours, deep), difference(on_choice(ours), on_choice(deep))
    assert free == leads["b", MORE, "adamw"]
    text = (
        f"With four times the FLOPs it is {below(free)} % below them ({interval(free)}), and {below(own)} %"
    )
    assert f"{text} on the text of the choice; 8 layers were trained with twice the FLOPs alone" in PAGE
    notes = words("benchmarks/NOTES.md")
    assert (
        f"it is {below(lead)} % with four times the FLOPs ({interval(lead)}; three seeds), of which" in notes
    )
    assert f"with four times the FLOPs {below(free)} %" in notes


def test_convergence_on_the_other_text(half: dict[str, Any]) -> None:
    runs = [run for run in half["read"](OTHER) if run["side"] == "implicit"]
    own = half["own_residual"]
    damped = [one for run in runs for one in run["fixed_point"] if one["solver"] == "picard 0.8"]
    few, many = ([one for one in damped if one["max_iterations"] == count] for count in (16, 32))
    assert [one["token_within"] for one in many] == [share for run in runs for share in own([run])]
    within = ends([one["token_within"] for one in many], 2)
    text = f"{within} % of the tokens of the 13 implicit models without weight norm, seed 0 included, within"
    assert f"with a damping of 0.8 brings {text}" in PAGE
    assert f"{ends([share for _, share in map(at_fixed_point, runs)])} % with all tokens before them" in PAGE
    (strong,) = (run for run in runs if run["recipe"]["residual_weight"] == 16)
    (plain,) = (
        one for one in strong["fixed_point"] if (one["solver"], one["max_iterations"]) == ("picard 1", 16)
    )
    text = f"In 16 iterations it brings {ends([one['token_within'] for one in few])} % within it"
    text = (
        f"{text}; with the penalty of 16 and without damping {percent(plain['token_within'], sign=False)} %"
    )
    assert text in PAGE


def test_mamba2_of_9_6_m(half: dict[str, Any], leads: Any) -> None:
    runs = {
        (recipe.side, recipe.petaflops): rows
        for recipe, rows in half["several_seeds"](MAMBA2)
        if sum(recipe.layers) == 8
    }
    ours, less, more = (runs[key] for key in (("implicit", 4.8), ("explicit", 2.4), ("explicit", 4.8)))
    difference = SEEDS["difference_of_runs"]
    half_as_many, equal = difference(ours, less), difference(ours, more)
    assert half_as_many == leads["a", MAMBA2, "adamw"]
    assert half_as_many["below_with_every_seed"]
    assert equal["below_with_every_seed"]
    text = (
        f"is {below(half_as_many)} % below the explicit one with half of them, which the text of the choice"
    )
    text = f"{text} prefers ({choice(less):.2f} instead of {choice(more):.2f}), and {below(equal)} % below"
    assert f"{text} the one with as many (95 % interval: {interval(equal)}). Every seed is below" in PAGE
    small = leads["a", "Mamba2, twice the FLOPs", "adamw"]
    assert half_as_many["difference"] < small["difference"] < half_as_many["interval"][1]
    assert (
        f"larger than at 5.8 M, {below(small)} %, but the text differs too, and the intervals overlap" in PAGE
    )
    for rows in (ours, less):
        grid = rows[0]["recipe"]["average"]
        assert not {half["average_of"](run) for run in rows} & {f"{grid[0]:g}", f"{grid[-1]:g}"}
    assert "not at an edge for either side with 8 layers" in PAGE
    within = [ends(half["own_residual"](ours, max_iterations=count), 2) for count in (32, 16)]
    text = f"{within[0]} % of the tokens are within the tolerance in 32 iterations, and {within[1]} % in 16"
    converged = [
        [
            one["token_converged"]
            for run in ours
            for one in run["fixed_point"]
            if key == (one["solver"], one["max_iterations"])
        ]
        for key in (("picard 0.8", 32), ("picard 0.8", 16))
    ]
    assert converged[0] == [share for _, share in map(at_fixed_point, ours)]
    assert sum(share < 0.99 for share in converged[0]) == 1
    text_of_all = "so does one seed of three of Mamba2 of 9.6 M with weight norm, one of three without"
    assert text_of_all in PAGE
    assert f"{text}; with all tokens before them {ends(converged[0])} % and {ends(converged[1])} %" in PAGE


def test_mamba2_beside_a_larger_explicit_model(half: dict[str, Any]) -> None:
    runs = {
        (sum(recipe.layers), recipe.side, recipe.petaflops): rows
        for recipe, rows in half["several_seeds"](MAMBA2)
    }
    ours, less = runs[8, "implicit", 4.8], runs[8, "explicit", 2.4]
    (large,) = (rows for (layers, *_), rows in runs.items() if layers == 12)
    assert large[0]["recipe"]["petaflops"] == 2.4
    assert choice(less) < choice(large)
    text = f"prefers 8 explicit layers to 12, of {large[0]['parameters'] / 1e6:.1f} M parameters"
    assert f"{text} ({choice(less):.2f} and {choice(large):.2f})" in PAGE
    difference = SEEDS["difference_of_runs"]
    found = difference(ours, large)
    assert found["below_with_every_seed"]
    text = (
        f"which are {below(difference(large, less))} % below 8 on the held-out books, the implicit model is"
    )
    assert f"{text} {below(found)} % below (95 % interval: {interval(found)}), every seed below" in PAGE
    notes = words("benchmarks/NOTES.md")
    assert f"without, where it is {below(found)} % below 12 explicit layers" in notes


def test_mamba2_of_9_6_m_with_weight_norm(half: dict[str, Any], leads: Any) -> None:
    part, difference = PARTS["MAMBA2_NORMED"], SEEDS["difference_of_runs"]
    normed = {recipe.side: rows for recipe, rows in half["several_seeds"](part)}
    ours, theirs = normed["implicit"], normed["explicit"]
    plain = {
        (recipe.side, recipe.petaflops): rows
        for recipe, rows in half["several_seeds"](MAMBA2)
        if sum(recipe.layers) == 8
    }
    before, less = plain["implicit", 4.8], plain["explicit", 2.4]
    gains = [below(difference(*pair)) for pair in ((ours, before), (theirs, less))]
    own = [below(difference(*map(on_choice, pair))) for pair in ((ours, before), (theirs, less))]
    text = f"by {gains[0]} % (implicit) and {gains[1]} % (explicit) on the held-out books and by {own[0]} and"
    assert f"{text} {own[1]} % on the text of the choice" in PAGE
    lead, on_own = difference(ours, theirs), difference(on_choice(ours), on_choice(theirs))
    assert lead == leads["a", part, "adamw"]
    assert lead["below_with_every_seed"]
    text = f"is {below(lead)} % below the explicit one, which has half of the FLOPs, every seed below every"
    text = f"{text} explicit one; the interval, {interval(lead)}, includes 0. On the text of the choice it is"
    assert f"{text} {below(on_own)} % below" in PAGE
    mixed = difference(before, theirs)
    text = f"without weight norm is {below(mixed)} % below the explicit one with it (95 % interval:"
    assert f"{text} {interval(mixed)})" in PAGE
    assert [sum(share < 0.99 for _, share in map(at_fixed_point, rows)) for rows in (ours, before)] == [1, 1]
    within = [ends(half["own_residual"](ours, max_iterations=count), 2) for count in (32, 16)]
    assert f"With weight norm it is slower: {within[0]} % in 32 iterations and {within[1]} % in 16" in PAGE
    zero = {
        (run["side"], run["recipe"]["weight_norm"], run["recipe"]["learning_rate"], run["shape"]): run[
            "choice"
        ]
        for run in half["choosing"](half["read"](part))
    }
    for side, rows in (("implicit", before), ("explicit", less)):
        shape = rows[0]["shape"]
        assert min(zero[side, False, rate, shape] for rate in (2e-3, 8e-3)) > choice(rows)
        assert zero[side, True, 8e-3, shape] > zero[side, True, 4e-3, shape]
    others = {
        shape: value for (side, *_, shape), value in zero.items() if shape[0] in "23" and side == "implicit"
    }
    assert others["3-2-3, 3 loops, 8 from 80%"] > choice(before)
    (two,) = (value for shape, value in others.items() if shape.startswith("2-4-2"))
    assert f"is level ({two:.2f} and {choice(before):.2f}, the latter over the reported seeds)" in PAGE
    notes = words("benchmarks/NOTES.md")
    assert f"{below(lead)} % at 9.6 M with weight norm on both sides (not significant) and" in notes


def test_the_statements_of_other_pages(leads: Any, half: dict[str, Any]) -> None:
    notes, changes = (words(name) for name in ("benchmarks/NOTES.md", "CHANGELOG.md"))
    small, wide, mamba2 = (
        leads["a", part, "adamw"] for part in (*list(PARTS["HALF"])[:2], "Mamba2, twice the FLOPs")
    )
    muon = [leads["a", f"Llama, Muon{budget}", "muon"] for budget in ("", ", twice the FLOPs")]
    once, free = leads["a", "Llama", "adamw"], leads["b", "Llama", "adamw"]
    other, more, large = (leads["a", part, "adamw"] for part in (OTHER, MORE, PARTS["MAMBA2_NORMED"]))
    wide_plain = leads["a", MAMBA2, "adamw"]
    assert all(found["interval"][1] > 0 for found in (mamba2, large))
    text = f"at 5.3 M parameters {below(small)} % over the explicit model of equal size on one text"
    text = f"{text} (95 % interval: {interval(small)}), but {below(other)} % on another ({interval(other)})"
    assert f"{text}, where not every seed is below every explicit one; there it is" in notes
    text = f"At 10.2 M it is {below(wide)} % with twice the FLOPs ({interval(wide)}; recipe of 5.3 M)"
    assert text in notes
    assert not other["below_with_every_seed"]
    half_as_many = f"Llama has {below(once)} and {below(leads['a', 'Llama, 10 M', 'adamw'])} %"
    assert f"{half_as_many}, and {below(free)} % over the best explicit model" in notes
    assert f"With Muon Llama has {below(muon[0])} %, and {below(muon[1])} % with twice the FLOPs" in notes
    less = below(leads["a", "Mamba2", "adamw"])
    assert f"Mamba2 is {less} % below, and {below(mamba2)} % with twice the FLOPs (neither" in notes
    assert f"(neither significant), {below(large)} % at 9.6 M" in notes
    assert f"and {below(wide_plain)} % without, where" in notes
    text = f"5.3 M parameters is {below(small)} % below the explicit one on one text (95 % interval:"
    text = f"{text} {interval(small)}) and {below(other)} % on another ({interval(other)}), {below(more)} %"
    text = f"{text} there with four times the FLOPs ({interval(more)}), that of 10.2 M {below(wide)} %"
    text = f"{text} ({interval(wide)}), with Muon {below(muon[0])} to {below(muon[1])} %, and"
    assert f"{text} the implicit Mamba2 {below(mamba2)} % (5.8 M) and {below(large)} % (9.6 M)" in changes

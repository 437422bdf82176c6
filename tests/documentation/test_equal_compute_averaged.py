"""The figures with averaged weights on the pages on equal compute equal those of the result files."""

import importlib
import json
import math
import runpy
from functools import partial
from typing import Any

import pytest

from tests.documentation.equal_compute_pages import (
    PAGE,
    PARTS,
    ROOT,
    SEEDS,
    below,
    choice,
    interval,
    percent,
    read,
    words,
)
from trainer.experiments.equal_compute.recipes import Recipe
from trainer.experiments.equal_compute.tables import at_fixed_point


def test_the_tables_of_muon_and_averages_are_those_of_the_result_files(half: dict[str, Any]) -> None:
    found = dict(half["tables"]())
    assert {"averaged weights", "summary", "convergence", "once: reported seeds"} <= found.keys()
    for title, text in found.items():
        assert " ".join(text.split()) in PAGE, title


def test_the_differences_with_averaged_weights(half: dict[str, Any]) -> None:
    summary = [(ours[0], theirs[0]) for _, _, ours, theirs in half["compared"]()]
    others = [(ours, theirs) for _, ours, theirs in half["pairs"]() if (ours[0], theirs[0]) not in summary]
    assert others
    for ours, theirs in others:
        low, high = SEEDS["difference_of_runs"](ours[1], theirs[1])["interval"]
        assert f"(95 % interval: {percent(low)} to {percent(high)} %)" in PAGE, ours[0].shape


def test_the_headline_is_that_of_the_summary(leads: Any) -> None:
    small, other, wide = (
        leads["a", f"Llama, {part}twice the FLOPs", "adamw"] for part in ("", "other text, ", "10 M, ")
    )
    more = leads["a", "Llama, other text, four times the FLOPs", "adamw"]
    text = f"first text: {below(small)} % below with twice the FLOPs (95 % interval: {interval(small)})"
    assert text in PAGE
    text = f"{below(other)} % below with twice the FLOPs ({interval(other)}) and {below(more)} % below with"
    assert f"two seeds), {text} four times ({interval(more)})" in PAGE
    assert f"- 10.2 M parameters: {below(wide)} % below with twice the FLOPs ({interval(wide)})" in PAGE
    text = (
        "is reached on the first text, at 10.2 M parameters and, on the other text, without additional FLOPs"
    )
    text = f"The target, 5 % with every seed below every explicit one, {text} and with four times as many"
    assert text in PAGE
    assert max(small["difference"], wide["difference"]) <= -0.05 < other["difference"]
    assert other["interval"][0] < 0 < other["interval"][1]
    large = {key for key, found in leads.items() if key[0] == "a" and found["difference"] <= -0.05}
    reaching = {key for key in large if leads[key]["below_with_every_seed"]}
    assert large - reaching == {("a", PARTS[name], "adamw") for name in ("NORMED", "PENALIZED")}
    largest = leads["a", "Llama, 30 M", "adamw"]
    assert f"29.9 M parameters: {below(largest)} % below, with one seed of each side" in PAGE
    assert largest["seeds"] == [1, 1]
    parts = ("twice the FLOPs", "10 M, twice the FLOPs", "other text", "other text, four times the FLOPs")
    parts += ("attractor, other text, four times the FLOPs",)
    names = (
        "GATED",
        "GATED_10M",
        "GATED_30M",
        *(f"MAMBA2_{one}" for one in ("STAGES", "STAGES_THIRD", "STAGES_10M", "FOUR", "FOUR_LONG")),
    )
    also = {PARTS[name] for name in names}
    assert reaching == {("a", part, "adamw") for part in {f"Llama, {part}" for part in parts} | also}
    muon = [leads["a", f"Llama, Muon{budget}", "muon"] for budget in ("", ", twice the FLOPs")]
    assert f"Muon are {below(muon[0])} to {below(muon[1])} % below" in PAGE
    mamba2, large, normed = (
        leads["a", f"Mamba2, {part}twice the FLOPs", "adamw"]
        for part in ("", "10 M, ", "10 M, weight norm, ")
    )
    text = f"is {below(mamba2)} % below at 5.8 M parameters ({interval(mamba2)}). At 9.6 M it is"
    text = f"{text} {below(normed)} % below with weight norm ({interval(normed)}), which lowers"
    assert text in PAGE
    text = f"and {below(large)} % without it ({interval(large)}). In these comparisons every seed is below"
    assert text in PAGE
    every = (small, wide, more, *muon, mamba2, large, normed)
    assert all(found["below_with_every_seed"] for found in every)
    none = [leads["a", "Llama, 0.7 M", "adamw"], leads["a", "Mamba2, Muon", "muon"]]
    level = leads["c", PARTS["ONCE_MAMBA2"], "adamw"]
    none += [found for (setting, *_), found in leads.items() if setting == "c" and found != level]
    assert min(found["difference"] for found in none) > 0
    assert abs(level["difference"]) < 0.001


def test_which_leads_every_seed_has(leads: Any, half: dict[str, Any]) -> None:
    several = {key[1]: found for key, found in leads.items() if key[0] == "a" and min(found["seeds"]) > 1}
    every = {part for part, found in several.items() if found["below_with_every_seed"]}
    large = {part for part, found in several.items() if found["difference"] < -0.03}
    other = {f"Llama, {name}other text, twice the FLOPs" for name in ("", "attractor, ")}
    other |= {PARTS["NORMED"], PARTS["PENALIZED"]}
    assert other <= large
    small = {"Mamba2, twice the FLOPs", PARTS["MAMBA2_NORMED"], PARTS["MAMBA2_FOUR_10M"]}
    other.add(PARTS["STAGED_THIRD"])
    assert every == large - other | small
    assert {part for part in several if "Mamba2" in part} - every == {"Mamba2"}
    text = "except those of Llama on the other text with twice the FLOPs and the one with `attractor` and a"
    assert f"{text} penalty, and in those of Mamba2 with 8 layers and twice the FLOPs and with 11.1 M" in PAGE


def test_both_sides_may_use_half_of_the_flops(half: dict[str, Any]) -> None:
    preferred, gains = {}, {}
    for part, less in PARTS["HALF"].items():
        for side in ("explicit", "implicit"):
            means = [
                [choice(rows) for one, rows in half["several_seeds"](name) if one.side == side]
                for name in (part, less)
            ]
            if all(means):  # the explicit models beside the injection `attractor` are of other parts
                found = list(map(min, means))
                preferred[part, side], gains[part, side] = found[0] < found[1], 1 - found[0] / found[1]
    assert all(preferred[part, "implicit"] for part in PARTS["HALF"])
    lesser = {part for (part, side), whole in preferred.items() if side == "explicit" and not whole}
    parts = ("Mamba2, twice", "Llama, Muon, twice", "Llama, other text, four times")
    assert lesser == {f"{part} the FLOPs" for part in parts}
    assert gains["Mamba2, twice the FLOPs", "implicit"] < 0.001
    assert "that of [Mamba2](#mamba2) of 5.8 M by less than 0.1 %" in PAGE


def test_the_lead_grows_with_the_passes(leads: Any, half: dict[str, Any]) -> None:
    parts = ("Llama, penalty", "Llama, twice the FLOPs", "Llama, 10 M", "Llama, 10 M, twice the FLOPs")
    runs = {
        (part, side): [run for run in half["reported"](half["read"](part)) if run["side"] == side]
        for part in parts
        for side in ("implicit", "explicit")
    }
    lead = [below(leads["a", part, "adamw"]) for part in parts]
    seen = {key: f"{found[0]['epochs']:.0f}" for key, found in runs.items()}
    mean = {key: f"{SEEDS['mean_perplexity'](found):.2f}" for key, found in runs.items()}
    (once, twice, wide, wider) = parts
    assert f"is {lead[0]} % below the explicit one when it sees the text {seen[once, 'implicit']} ti" in PAGE
    text = f"{lead[1]} % below at {seen[twice, 'implicit']} times ({seen[twice, 'explicit']} times)"
    assert f"(the explicit one {seen[once, 'explicit']} times), and {text}" in PAGE
    text = f"that of the explicit model from {mean[once, 'explicit']} to {mean[twice, 'explicit']}"
    assert f"from {mean[once, 'implicit']} to {mean[twice, 'implicit']}, {text}" in PAGE
    text = f"from {seen[wide, 'implicit']} to {seen[wider, 'implicit']} passes"
    assert f"the lead grows from {lead[2]} to {lead[3]} %, {text}" in PAGE
    assert f"(explicit: from {seen[wide, 'explicit']} to {seen[wider, 'explicit']})" in PAGE
    first, second = (
        " instead of ".join(f"{choice(runs[part, 'explicit']):.2f}" for part in pair)
        for pair in ((twice, once), (wider, wide))
    )
    assert f"better with twice the FLOPs, {first} and {second}" in PAGE
    tokens = {part: runs[part, "explicit"][0] for part in (once, wide)}
    small, large = (f"{run['tokens'] / run['epochs'] / 1e6:.2f} M" for run in tokens.values())
    assert f"5.3 M parameters on {small} tokens of other books, 10.2 M on {large} tokens" in PAGE


def test_the_recipes_with_twice_the_flops_are_at_edges(leads: Any, half: dict[str, Any]) -> None:
    for run in half["best_of_each_model"](half["choosing"](half["read"]("Llama, twice the FLOPs"))):
        assert (run["recipe"]["learning_rate"], run["recipe"]["weight_decay"]) == (2e-3, 1.5)
    for size in ("", "10 M, "):
        part = f"Llama, {size}twice the FLOPs"
        explicit = [run for run in half["reported"](half["read"](part)) if run["side"] == "explicit"]
        assert {half["average_of"](run) for run in explicit} == {"0.9995"}
        assert leads["a", part, "adamw"]["interval"][1] > -0.05
    assert "longest average, 0.9995, at both sizes; on the other text they prefer it to 0.9998" in PAGE
    assert "the intervals include leads below 5 %" in PAGE


def test_the_penalty_lets_one_seed_of_five_converge(half: dict[str, Any]) -> None:
    shares = {
        part: [
            at_fixed_point(run)[1]
            for run in half["reported"](half["read"](part))
            if run["side"] == "implicit"
        ]
        for part in ("Llama, penalty", "Llama, Muon", "Llama, Muon, twice the FLOPs")
    }
    penalty, muon, longer = shares.values()
    assert (len(penalty), sum(share >= 0.99 for share in penalty)) == (5, 1)
    least, most = (percent(end(muon), sign=False) for end in (min, max))
    assert f"Without it and with Muon {least} to {most} % converge" in PAGE
    (single,) = half["single_seeds"]("Mamba2, Muon", "muon")[0][1]
    text = f"with twice the FLOPs {percent(min(longer), sign=False)} to {percent(max(longer), sign=False)} %"
    text = f"{text}, and {percent(at_fixed_point(single)[1], sign=False)} % of Mamba2"
    assert f"{least} to {most} % of the tokens of Llama converge in 32 iterations, {text}" in PAGE


def test_more_tokens_are_within_the_tolerance_than_converge() -> None:
    path = ROOT / "benchmarks" / "results" / "equal_compute_within.json"
    (run,) = json.loads(path.read_text(encoding="utf-8"))["runs"]
    assert (run["recipe"]["width"], run["recipe"]["seed"], run["recipe"]["precision"]) == (64, 1, "float32")
    assert run["recipe"]["residual_weight"] == 0
    best = max(
        (one for one in run["fixed_point"] if one["max_iterations"] == 32),
        key=lambda one: one["token_converged"],
    )
    few, many = (one for one in run["fixed_point"] if one["solver"] == best["solver"])
    own = f"{few['token_within']:.1%} within 16 iterations and {many['token_within']:.2%} within 32"
    share = f"{100 * few['token_converged']:.1f} and {many['token_converged']:.1%} converge"
    assert f"{own}, where {share}".replace("%", " %") in PAGE


def test_the_lead_of_llama_grows_with_size(half: dict[str, Any]) -> None:
    (slope,) = (line for line in half["lines"](PARTS["SIZES"]).splitlines() if "per factor of 10" in line)
    low, high = slope.replace("\N{MINUS SIGN}", "-").partition("(")[2].rstrip(")").split(" to ")
    assert (low[0], high[0]) == ("-", "-")
    assert "Over the five sizes the interval of the slope excludes zero" in PAGE
    ours, theirs = (
        next(run for run in half["read"]("Llama, 30 M") if run["side"] == side)
        for side in ("implicit", "explicit")
    )
    lead, above = 1 - ours["report"] / theirs["report"], ours["choice"] / theirs["choice"] - 1
    text = f"is {percent(lead, sign=False)} % below the explicit one (and {percent(above, sign=False)} %"
    assert f"{text} above on the text of the choice)" in PAGE
    fitted = importlib.import_module("equal_compute_scaling").fitted
    sizes = half["series"]([run for part in PARTS["SIZES"] for run in half["read"](part)], layers=[1, 2, 1])
    mean, *ends = map(math.expm1, fitted(sizes)["difference"].at(math.log(ours["parameters"])))
    assert -lead > ends[1]  # above the line's interval
    text = f"where the line gives {percent(mean)} % ({percent(ends[0])} to {percent(ends[1])} %)"
    del sizes[ours["parameters"]]
    slope = math.expm1(fitted(sizes)["difference"].slope * math.log(10))
    assert f"{text}. Without this size the slope is {percent(slope)} % per factor of 10" in PAGE
    runs = [run for part in PARTS["SIZES"] for run in half["reported"](half["read"](part))]
    sides = {
        "explicit": [run for run in runs if run["recipe"]["layers"] == [0, 4, 0]],
        "implicit": [run for run in runs if run["recipe"]["end_loops"]],
    }
    epochs = {side: [run["epochs"] for run in found] for side, found in sides.items()}
    seen = {side: f"{min(counts):.0f} to {max(counts):.0f} times" for side, counts in epochs.items()}
    assert (
        f"The explicit models see the text {seen['explicit']}, the implicit ones {seen['implicit']}" in PAGE
    )
    runs = [
        run
        for part in PARTS["FILES"]
        if part.startswith("Llama") and part not in PARTS["PER_PARAMETER"]
        for run in half["reported"](half["read"](part))
    ]
    scaled = {
        side: [
            row["perplexity"] / run["lengths"][1]["perplexity"]
            for run in runs
            if run["side"] == side
            for row in run["lengths_scaled"] or []
            if row["scaling"] == "llama3"
        ]
        for side in sides
    }
    ratios = {side: f"{min(found):.2f} to {max(found):.2f}" for side, found in scaled.items()}
    assert f"the ratio is {ratios['implicit']} (implicit) and {ratios['explicit']} (explicit)" in PAGE
    trained = half["length_ratios"]([run for run in runs if run["side"] == "implicit"])
    attention = words("docs/attention.md")
    text = f"is then {ratios['implicit']} times that at the training length in implicit models, instead of"
    assert f"{text} {min(trained):.1f} to {max(trained):.1f} times" in attention
    assert sum(ratio > 1.1 for ratio in scaled["implicit"]) == 1
    assert max(*scaled["implicit"], *scaled["explicit"]) <= half["LONGER"]["llama"]
    assert "all implicit ones but one of 1.9 M the stretch target of 1.1" in PAGE
    main = [
        row["perplexity"] / run["lengths"][1]["perplexity"]
        for setting, part, ours, _ in half["compared"]()
        if setting == "a" and part in PARTS["MAIN"]
        for run in ours[1]
        for row in run["lengths_scaled"] or []
        if row["scaling"] == "llama3"
    ]
    assert max(main) <= 1.1


@pytest.mark.parametrize(("part", "edges"), [("Llama, 0.7 M", (8e-3, 0.75)), ("Llama, 2 M", (4e-3, 1.5))])
def test_both_sides_of_the_small_llamas_chose_the_edges_of_the_grid(
    part: str, edges: tuple[float, float], half: dict[str, Any]
) -> None:
    for run in half["best_of_each_model"](half["choosing"](half["read"](part))):
        assert (run["recipe"]["learning_rate"], run["recipe"]["weight_decay"]) == edges, run["name"]


def test_averages_make_the_lead_of_llama_smaller(half: dict[str, Any]) -> None:
    small = [run for run in half["choosing"](half["read"]("Llama")) if run["parameters"] < 5.4e6]
    pairs = []
    for weights in ("last", "averaged"):
        best_of = partial(min, key=lambda one: one["choice"])
        found = {
            side: best_of(run["weights"][weights] for run in small if run["side"] == side)["report"]
            for side in ("implicit", "explicit")
        }
        pairs.append((found["implicit"], found["explicit"], 1 - found["implicit"] / found["explicit"]))
    (ours, theirs, lead), (better, best, left) = pairs
    assert f"perplexity of {ours:.2f} and the explicit one {theirs:.2f}" in PAGE
    assert f"({percent(lead, sign=False)} % below), and {better:.2f} and {best:.2f} with averaged" in PAGE
    assert f"ones ({percent(left, sign=False)} % below)" in PAGE


def test_a_penalty_on_the_residual_lets_the_averaged_weights_converge(half: dict[str, Any]) -> None:
    runs = half["read"]("Llama")
    looped = [run for run in runs if run["recipe"]["end_loops"] and run["recipe"]["weight_decay"] == 1.5]
    looped = [run for run in looped if run["shape"].startswith("1-2-1, 3 loops, 8 from 80%")]
    (penalized,) = (run for run in looped if run["recipe"]["residual_weight"])
    (plain,) = (
        run
        for run in half["choosing"](looped)
        if (run["recipe"]["share"], run["recipe"]["learning_rate"], run["recipe"]["damping"]) == (1, 2e-3, 1)
        and not run["recipe"]["residual_weight"]
    )
    shares = [percent(at_fixed_point(run)[1], sign=False) for run in (penalized, plain)]
    assert f"lets {shares[0]} % of the tokens converge in 32 iterations, instead of {shares[1]} %" in PAGE
    assert f"at the same perplexity ({penalized['report']:.2f} and {plain['report']:.2f})" in PAGE


def test_late_loops_make_mamba2_as_good_as_the_explicit_model(half: dict[str, Any]) -> None:
    found = {ours[0].shape: (ours, theirs) for part, ours, theirs in half["pairs"]() if part == "Mamba2"}
    late, early = found["3-2-3, 3 loops from 50%, 8 from 80%"], found["3-2-3, 3 loops, 8 from 80%"]
    low, high = SEEDS["difference_of_runs"](late[0][1], late[1][1])["interval"]
    assert low < 0 < high
    for (ours, theirs), text in ((late, "as good as the explicit one: "), (early, "it is ")):
        assert text + half["phrase"](ours, theirs) in PAGE
    mean = SEEDS["mean_perplexity"]
    last = [mean([run["weights"]["last"] for run in side[1]]) for side in late]
    assert f"both sides are level as well ({last[0]:.2f} and {last[1]:.2f})" in PAGE
    ours, theirs = (1 - mean(side[1]) / one for side, one in zip(late, last, strict=True))
    lower = f"implicit model by {percent(ours, sign=False)} % and that of the explicit one by"
    assert f"{lower} {percent(theirs, sign=False)} %" in PAGE
    shares = [share for _, share in map(at_fixed_point, late[0][1])]
    text = f"{percent(min(shares), sign=False)} to {percent(max(shares), sign=False)} % of the tokens of the"
    assert f"with 8 loops at the end {text} reported seeds" in PAGE
    best = {one["shape"]: one for one in half["best_of_each_model"](half["choosing"](half["read"]("Mamba2")))}
    change, share = at_fixed_point(best["2-4-2, 2 loops"])
    assert f"converge ({percent(share, sign=False)} %)" in PAGE
    assert f"fixed point is {percent(change, sign=False)} % higher" in PAGE
    chosen = {(one["recipe"]["learning_rate"], one["recipe"]["weight_decay"]) for one in best.values()}
    assert chosen == {(4e-3, 2.0)}


def test_mamba2_with_more_flops(leads: Any, half: dict[str, Any]) -> None:
    names = ("Mamba2", "Mamba2, twice the FLOPs")
    best: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for part in names:
        for recipe, rows in half["several_seeds"](part):
            key = (part, recipe.side)
            if key not in best or choice(rows) < choice(best[key]):
                best[key] = rows
    mean = {key: f"{SEEDS['mean_perplexity'](rows):.2f}" for key, rows in best.items()}
    less, more = names
    for side, text in (("implicit", "gains, "), ("explicit", "does not, ")):
        assert f"{text}{mean[more, side]} instead of {mean[less, side]}" in PAGE
    halves = [f"{choice(best[part, 'explicit']):.2f}" for part in names]
    assert f"with half of the FLOPs ({halves[0]} instead of {halves[1]})" in PAGE
    lead = leads["a", more, "adamw"]
    assert f"the implicit one is {below(lead)} % below that, every seed below every explicit one" in PAGE
    found = SEEDS["difference_of_runs"](best[more, "implicit"], best[more, "explicit"])
    assert f"Beside the explicit model with as many FLOPs it is {below(found)} % below" in PAGE
    level = " and ".join(f"{choice(best[part, 'implicit']):.2f}" for part in (more, less))
    assert f"level with its own half ({level})" in PAGE
    seed0 = {
        part: {run["side"]: run for run in sorted(half["choosing"](half["read"](part)), key=minus_choice)}
        for part in (*names, "Mamba2, four times the FLOPs")
    }
    level = " and ".join(f"{seed0[part]['implicit']['choice']:.2f}" for part in (more, less))
    lead = leads["a", less, "adamw"]
    assert f"seed 0 prefers the half ({level}), whose lead is {below(lead)} %" in PAGE
    epochs = [f"{best[more, side][0]['epochs']:.0f} times" for side in ("explicit", "implicit")]
    assert f"sees the text {epochs[0]} and the implicit one {epochs[1]}" in PAGE
    most = seed0["Mamba2, four times the FLOPs"]
    assert all(most[side][text] > seed0[more][side][text] for side in most for text in ("choice", "report"))
    lead = percent(1 - most["implicit"]["report"] / most["explicit"]["report"], sign=False)
    assert f"the implicit model is {lead} % below: the lead does not grow further" in PAGE


def minus_choice(run: dict[str, Any]) -> float:
    return -float(run["choice"])


def test_longer_averages_do_not_change_the_choice_of_the_explicit_mamba2(half: dict[str, Any]) -> None:
    runs = half["reported"](half["read"]("Mamba2, longer averages"))
    assert {half["average_of"](run) for run in runs} == {"0.998"}
    assert f"it chooses 0.998 again ({' '.join(format(run['report'], '.2f') for run in runs)})" in PAGE


def test_averaging_reverses_the_order_of_mamba2(half: dict[str, Any]) -> None:
    runs = read("quarter_mamba2")
    ours, theirs = (half["last_weights"](runs, side) for side in ("implicit", "explicit"))
    assert max(ours) < min(theirs)
    left, right = (f"({min(side):.1f} to {max(side):.1f})" for side in (ours, theirs))
    assert f"{left} than all explicit ones {right}" in PAGE
    by_side = {run["side"]: [] for run in runs}
    for run in half["reported"](runs):
        by_side[run["side"]].append(run)
    found = SEEDS["difference_of_runs"](by_side["implicit"], by_side["explicit"])
    low, high = found["interval"]
    assert low < 0 < high
    above = f"by {percent(found['difference'], sign=False)} % on average (95 % interval: {percent(low)} to"
    assert f"{above} {percent(high)} %), which is not significant" in PAGE


def test_llama_with_muon(half: dict[str, Any]) -> None:
    parts = ("Llama, Muon", "Llama, Muon, twice the FLOPs")
    once, twice = (
        {(one.side, one.learning_rate): rows for one, rows in half["several_seeds"](part)} for part in parts
    )
    assert f"({choice(once['explicit', 4e-3]):.2f} instead of {choice(twice['explicit', 2e-3]):.2f})" in PAGE
    assert min(once, key=lambda key: choice(once[key])) == ("implicit", 4e-3)
    found = SEEDS["difference_of_runs"](once["implicit", 2e-3], once["explicit", 4e-3])
    low, high = map(percent, found["interval"])
    assert (
        f"With 2e-3 the implicit model is {below(found)} % below (95 % interval: {low} to {high} %)" in PAGE
    )
    penalty = {one.side: rows for one, rows in half["several_seeds"]("Llama, penalty")}
    mean = SEEDS["mean_perplexity"]
    text = f"Muon {mean(once['implicit', 4e-3]):.2f} and {mean(once['explicit', 4e-3]):.2f}"
    assert f"{mean(penalty['explicit']):.2f} (explicit), {text}" in PAGE
    assert f"reaches {mean(penalty['implicit']):.2f} (implicit, with the penalty)" in PAGE
    seed0 = {
        (run["recipe"]["learning_rate"], run["recipe"]["weight_decay"]): run["choice"]
        for run in half["choosing"](half["read"]("Llama, Muon"))
        if run["side"] == "explicit"
    }
    assert f"({seed0[2e-3, 1.5]:.2f} and {seed0[4e-3, 1.5]:.2f})" in PAGE
    assert min(seed0, key=lambda key: seed0[key]) == (2e-3, 1.5)
    assert {half["average_of"](run) for run in once["implicit", 4e-3]} == {"0.997"}


def test_mamba2_with_muon(half: dict[str, Any]) -> None:
    (ours, (run,)), (theirs, (other,)) = half["single_seeds"]("Mamba2, Muon", "muon")
    assert (ours.learning_rate, theirs.learning_rate) == (8e-3, 4e-3)
    above = percent(run["report"] / other["report"] - 1, sign=False)
    text = f"chose 4e-3 ({other['report']:.2f}), the implicit one 8e-3, the highest rate"
    assert f"{text} ({run['report']:.2f}, {above} % above)" in PAGE
    (four,) = (
        one
        for one in half["read"]("Mamba2, Muon")
        if one["side"] == "implicit" and one["recipe"]["learning_rate"] == 4e-3
    )
    less = percent(1 - four["report"] / other["report"], sign=False)
    assert f"with 4e-3 it has {four['report']:.2f}, {less} % below" in PAGE


def test_the_earlier_figures_with_muon() -> None:
    llama, mamba2 = (
        {
            (run["side"], run["parameters"]): run
            for run in read(name)
            if run["recipe"]["optimizer"] == "muon" and not run["recipe"]["seed"]
        }
        for name in ("half", "quarter_mamba2")
    )
    implicit, explicit, deep = (
        llama[key] for key in (("implicit", 5311232), ("explicit", 5311232), ("explicit", 8525056))
    )
    above = [percent(implicit["report"] / explicit["report"] - 1, sign=False)]
    (size,) = {size for _, size in mamba2}
    ours, theirs = (mamba2[side, size] for side in ("implicit", "explicit"))
    above.append(percent(ours["report"] / theirs["report"] - 1, sign=False))
    assert f"{above[0]} % above for Llama and {above[1]} % above for Mamba2" in PAGE
    decays = [run["recipe"]["weight_decay"] for run in (implicit, explicit)]
    assert f"implicit Llama had a weight decay of {decays[0]} and the explicit one of {decays[1]}" in PAGE
    assert {run["recipe"]["learning_rate"] for run in (*llama.values(), *mamba2.values())} == {2e-3}
    assert ours["recipe"]["layers"] == [2, 4, 2]
    less = percent(1 - deep["report"] / explicit["report"], sign=False)
    assert f"8 layers were {less} % below 4" in PAGE


@pytest.mark.parametrize(
    ("part", "lists"),
    [
        ("penalty", ("penalty",)),
        ("other_text", ("longer_other_text",)),
        ("weight_norm", ("weight_norm",)),
        ("longest", ("longest",)),
        ("10m_longer", ("10m_longer",)),
        ("30m", ("30m",)),
        ("mamba2_longer", ("mamba2_longer", "mamba2_longer_seeds")),
        ("mamba2_10m", ("mamba2_10m_longer",)),
        ("mamba2_weight_norm", ("mamba2_weight_norm",)),
        ("muon", ("muon", "muon_seeds")),
        ("muon_longer", ("muon_longer",)),
        ("mamba2_muon", ("mamba2_muon",)),
    ],
)
def test_the_lists_are_what_was_run(part: str, lists: tuple[str, ...]) -> None:
    known = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_gpu.py"))["lists"]()
    listed = {Recipe.of(run).name for name in lists for run in known[name]}
    assert {run["name"] for run in read(f"averaged_{part}")} == listed


@pytest.mark.parametrize("name", ["MAIN", "OTHERS"])
def test_the_pictures_have_all_rows_of_settings_a_and_b_with_several_seeds(
    name: str, half: dict[str, Any]
) -> None:
    parts = PARTS[name]
    rows = [one for one in half["compared"]() if one[0] in "ab" and one[1] in parts and len(one[2][1]) > 1]
    (axes,) = half["draw"](parts).axes
    means = [line.get_xdata()[0] for line in axes.lines if line.get_marker() == "o"]
    found = [SEEDS["difference_of_runs"](ours[1], theirs[1])["difference"] for _, _, ours, theirs in rows]
    assert sorted(means) == pytest.approx(sorted(100 * value for value in found))

"""The figures with averaged weights on the page on equal compute equal those of the result files."""

import runpy
from functools import partial
from typing import Any

import pytest

from tests.documentation.equal_compute_pages import PAGE, ROOT, SEEDS, percent
from trainer.experiments.equal_compute.tables import at_fixed_point


@pytest.fixture
def half(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the program that makes the tables with half a token of text per parameter."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_averaged.py"))


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


def test_the_headline_is_that_of_the_summary(half: dict[str, Any]) -> None:
    leads = {
        (setting, part): -SEEDS["difference_of_runs"](ours[1], theirs[1])["difference"]
        for setting, part, ours, theirs in half["compared"]()
        if ours[0].optimizer == "adamw"
    }
    sizes = {part: percent(leads["a", part], sign=False) for part in half["SIZES"]}
    assert leads["a", "Llama, 0.7 M"] < 0
    small, middle, large = (sizes[part] for part in half["SIZES"][1:])
    assert f"none at 0.7 M parameters, {small} % at 1.9 M, {middle} % at 5.3 M, {large} % at 10.2 M" in PAGE
    free = percent(leads["b", "Llama"], sign=False)
    assert f"At 5.3 M it is {free} % below the best explicit model of any size" in PAGE
    assert f"equals the explicit one ({percent(leads['a', 'Mamba2'], sign=False)} % below, not" in PAGE
    assert max(leads.values()) == leads["a", "Llama"] < 0.05
    assert leads["c", "once"] < 0


def test_which_leads_every_seed_has(half: dict[str, Any]) -> None:
    every = {
        part
        for setting, part, ours, theirs in half["compared"]()
        if setting == "a" and SEEDS["difference_of_runs"](ours[1], theirs[1])["below_with_every_seed"]
        and len(ours[1]) > 1
    }  # fmt: skip
    assert every == {"Llama", "Llama, 10 M"}
    assert "below every explicit one, as it is for Llama of 5.3 and 10.2 M parameters" in PAGE


def test_the_lead_of_llama_grows_with_size(half: dict[str, Any]) -> None:
    (slope,) = (line for line in half["sizes"]()[1].splitlines() if "per factor of 10" in line)
    low, high = slope.partition("(")[2].rstrip(")").split(" to ")
    assert (low[0], high[0]) == ("-", "-")
    assert "the interval of the slope excludes zero" in PAGE
    runs = [run for part in half["SIZES"] for run in half["reported"](half["read"](part))]
    sides = {
        "explicit": [run for run in runs if run["recipe"]["layers"] == [0, 4, 0]],
        "implicit": [run for run in runs if run["recipe"]["end_loops"]],
    }
    epochs = {side: [run["epochs"] for run in found] for side, found in sides.items()}
    seen = {side: f"{min(counts):.0f} to {max(counts):.0f} times" for side, counts in epochs.items()}
    assert (
        f"The explicit models see the text {seen['explicit']}, the implicit ones {seen['implicit']}" in PAGE
    )
    scaled = {
        side: [
            row["perplexity"] / run["lengths"][1]["perplexity"]
            for run in found
            for row in run["lengths_scaled"] or []
            if row["scaling"] == "llama3"
        ]
        for side, found in sides.items()
    }
    ratios = {side: f"{min(found):.2f} to {max(found):.2f}" for side, found in scaled.items()}
    assert f"the ratio is {ratios['implicit']} (implicit) and {ratios['explicit']} (explicit)" in PAGE


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


def test_mamba2_with_twice_the_flops(half: dict[str, Any]) -> None:
    once, twice = (
        {
            run["side"]: run
            for run in sorted(half["choosing"](half["read"](part)), key=lambda run: -run["choice"])
        }
        for part in ("Mamba2", "Mamba2, twice the FLOPs")
    )
    pairs = ((twice[side]["report"], once[side]["report"]) for side in ("implicit", "explicit"))
    assert ", and ".join(f"{more:.2f} instead of {less:.2f}" for more, less in pairs) in PAGE
    below = 1 - twice["implicit"]["report"] / twice["explicit"]["report"]
    assert f"It is {percent(below, sign=False)} % below, with one seed" in PAGE
    epochs = [f"{twice[side]['epochs']:.0f} times" for side in ("explicit", "implicit")]
    assert f"sees the text {epochs[0]} and the implicit one {epochs[1]}" in PAGE


def test_averaging_reverses_the_order_of_mamba2(half: dict[str, Any]) -> None:
    runs = half["read"]("mamba2")
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
    muon = {
        (run["side"], run["recipe"]["optimizer"]): run["report"]
        for run in half["choosing"](runs)
    }  # fmt: skip
    worse = muon["implicit", "muon"] / muon["implicit", "adamw"] - 1
    assert f"is {percent(worse, 0, sign=False)} % worse for the implicit one" in PAGE


def test_the_choices_with_muon_equal_the_results(half: dict[str, Any]) -> None:
    found = {(run["side"], run["parameters"]): run["report"] for run in half["choosing"](half["read"]("5 M"))}
    behind = [found["implicit", size] / found["explicit", size] - 1 for size in (5311232, 8525056)]
    small, large = (percent(value, sign=False) for value in behind)
    assert f"the implicit models are {small} % (5.3 M parameters) and {large} % (8.5 M) behind" in PAGE
    (more,) = half["reported"](half["read"]("5 M"))
    assert f"One more seed of the larger implicit model has {more['report']:.2f}" in PAGE
    long = [run["lengths"] for run in [more, *half["reported"](half["read"]("once"))] if run["lengths"]]
    ratios = [whole["perplexity"] / cut["perplexity"] for whole, cut in long]
    assert f"{min(ratios):.2f} to {max(ratios):.2f} times that at the training length" in PAGE


def test_text_seen_once_with_late_loops(half: dict[str, Any]) -> None:
    runs = half["read"]("once")
    best: dict[tuple[str, int, str], dict[str, Any]] = {}
    for run in half["choosing"](runs):
        key = (run["side"], run["recipe"]["loops"], run["recipe"]["optimizer"])
        if key not in best or run["choice"] < best[key]["choice"]:
            best[key] = run
    four, two = best["explicit", 0, "adamw"], best["implicit", 2, "adamw"]
    above = percent(two["report"] / four["report"] - 1, sign=False)
    assert f"one seed of the implicit model is {above} % above the explicit one" in PAGE
    assert f"FLOPs for {percent(two['tokens'] / four['tokens'], 0, sign=False)} % of the text" in PAGE
    lower = percent(1 - best["explicit", 0, "muon"]["report"] / four["report"], 0, sign=False)
    assert f"every perplexity is lower, by {lower} % for the explicit model" in PAGE
    more = best["implicit", 4, "adamw"]
    assert more["converged"] > 0.9995
    above = percent(more["report"] / four["report"] - 1, sign=False)
    assert f"at a perplexity {above} % above that of the explicit model" in PAGE

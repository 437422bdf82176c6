"""Statements on text that is seen once equal those of the result files."""

from typing import Any

from tests.documentation.equal_compute_pages import MAIN, PAGE, PARTS, TABLES, interval, percent, read, words

GATED, DAMPED = PARTS["ONCE_GATED"], PARTS["ONCE_DAMPED"]
GATES = ", gates of at most 0.75"


def seed_0(half: dict[str, Any], part: str, optimizer: str, model: str) -> Any:
    """Return the best run of a model that chose."""
    (found,) = (
        run
        for run in half["best_of_each_model"](half["choosing"](half["read"](part)))
        if (half["model_of"](half["recipe_of"](run)), run["recipe"]["optimizer"]) == (model, optimizer)
    )
    return found


def test_text_seen_once_with_gates(half: dict[str, Any], leads: Any) -> None:
    adamw, muon = (leads["c", GATED, optimizer] for optimizer in ("adamw", "muon"))
    above = [percent(found["difference"], sign=False) for found in (adamw, muon)]
    assert f"[{above[0]} and {above[1]} % higher](equal_compute_tables.md#text-seen-once-with-gates)" in MAIN
    text = (
        f"{above[0]} % above the explicit one with AdamW (95 % interval: {interval(adamw)}) and {above[1]} %"
    )
    assert f"{text} above with Muon (95 % interval: {interval(muon)})" in TABLES
    assert all(run["epochs"] < 1 for run in read("once_gates"))
    plain, gated = (seed_0(half, GATED, "adamw", f"explicit, 4 layers{gates}") for gates in ("", GATES))
    assert f"explicit model from {plain['report']:.2f} to {gated['report']:.2f}" in TABLES
    assert (plain["recipe"]["learning_rate"], gated["recipe"]["learning_rate"]) == (1e-3, 2e-3)
    early, late = (
        seed_0(half, GATED, "muon", f"implicit, 1-2-1, 2 loops from {when}%{GATES}") for when in (50, 97)
    )
    text = f"{early['choice']:.2f} from half of the steps and {late['choice']:.2f} from 97 %"
    assert text in TABLES
    assert {run["recipe"]["learning_rate"] for run in (early, late)} == {2e-3}


def test_text_seen_once_with_damping(half: dict[str, Any], leads: Any) -> None:
    adamw, muon = (leads["c", DAMPED, optimizer] for optimizer in ("adamw", "muon"))
    above = [percent(found["difference"], sign=False) for found in (adamw, muon)]
    assert adamw["difference"] <= 0.01 < muon["difference"]
    text = (
        f"{above[0]} % above the explicit one with AdamW ({interval(adamw)}), within the target of 1 %, and"
    )
    text = f"{text} {above[1]} % above with Muon ({interval(muon)}), which misses it by"
    assert f"{text} {percent(muon['difference'] - 0.01, 2, sign=False)} percentage points" in MAIN
    text = (
        f"{above[0]} % above the explicit one with AdamW (95 % interval: {interval(adamw)}) and {above[1]} %"
    )
    assert f"{text} above with Muon (95 % interval: {interval(muon)})" in TABLES
    notes = words("benchmarks/NOTES.md")
    assert f"reached with AdamW ({above[0]} % above) and missed with Muon ({above[1]} %)" in notes
    for optimizer, join in (("adamw", "from"), ("muon", "and from")):
        plain, damped = (
            seed_0(half, DAMPED, optimizer, f"implicit, 1-1-2, 2 loops from 90%{damping}{GATES}")
            for damping in ("", ", damping 0.25")
        )
        assert f"{join} {plain['choice']:.2f} to {damped['choice']:.2f} with" in TABLES
    for optimizer, name in (("adamw", "AdamW"), ("muon", "Muon")):
        (runs,) = (
            rows
            for recipe, rows in half["several_seeds"](DAMPED)
            if recipe.side == "implicit" and recipe.optimizer == optimizer
        )
        changes = [change for change, _ in map(half["at_fixed_point"], runs)]
        ends = " to ".join(percent(one, sign=False) for one in (min(changes), max(changes)))
        assert f"{ends} % ({name})" in TABLES
        assert {run["recipe"]["damping"] for run in runs} == {0.25}


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

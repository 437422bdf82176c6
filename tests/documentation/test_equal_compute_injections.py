"""Statements on injections, random depth, convergence and ablations equal those of the result files."""

import runpy
from typing import Any

from tests.documentation.equal_compute_pages import (
    PAGE,
    PARTS,
    ROOT,
    SEEDS,
    below,
    choice,
    interval,
    on_choice,
    percent,
    read,
    words,
)
from trainer.experiments.equal_compute.tables import at_fixed_point

OTHER = "Llama, other text"
TWICE, MORE = (f"{OTHER}, {times} the FLOPs" for times in ("twice", "four times"))
ATTRACTOR, LONGEST = (name.replace("Llama", "Llama, attractor") for name in (TWICE, MORE))
RANDOM = TWICE.replace("Llama", "Llama, random depth")


def implicit(half: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """Return the implicit runs that the summary has of a part."""
    (runs,) = (ours[1] for setting, name, ours, _ in half["compared"]() if (setting, name) == ("a", part))
    return list(runs)


def explicit(half: dict[str, Any], part: str) -> list[dict[str, Any]]:
    """Return the reported runs of 4 explicit layers of a part."""
    (runs,) = (
        rows
        for recipe, rows in half["several_seeds"](part)
        if recipe.side == "explicit" and sum(recipe.layers) == 4
    )
    return list(runs)


def test_the_headline_on_convergence(half: dict[str, Any]) -> None:
    runs = [(part, ours[1]) for setting, part, ours, _ in half["compared"]() if setting == "a"]
    llama = {
        part: found for part, found in runs if part.startswith("Llama") and part not in PARTS["PER_PARAMETER"]
    }
    least = {part: min(share for _, share in map(at_fixed_point, found)) for part, found in llama.items()}
    reaching = {ATTRACTOR, PARTS["PENALIZED"], PARTS["STAGED_10M"], PARTS["STAGED_30M"]}
    assert {part for part, share in least.items() if share >= 0.99} == reaching
    assert {percent(least[part], sign=False) for part in reaching} == {"99.9", "100.0"}
    text = (
        "with the injection `attractor` and twice the FLOPs, and with it, a penalty and four times the FLOPs"
    )
    assert f"it is reached by the Llamas {text} (100.0 % each), and missed by the others." in PAGE
    assert "No model reaches 99 % with every seed; they have" in PAGE
    highest = max(change for change, _ in map(at_fixed_point, llama[ATTRACTOR]))
    assert sum(change > 0.005 for change, _ in map(at_fixed_point, llama[ATTRACTOR])) == 1
    assert f"at the fixed point {percent(highest, sign=False)} % above that with its loops" in PAGE
    recorded = {part for part, found in llama.items() if half["own_residual"](found)}
    other = {part for part in PARTS["FILES"] if part.startswith("Llama") and "other text" in part}
    assert recorded == other | {
        "Llama, 30 M",
        *(PARTS[f"{one}_{size}"] for one in ("GATED", "STAGED") for size in ("2M", "10M", "30M", "THIRD")),
    }
    (large,) = half["own_residual"](half["read"]("Llama, 30 M"))
    assert f"missed by that of 29.9 M, which has no penalty ({percent(large, 2, sign=False)} %)" in PAGE
    every = [run for part in other - {OTHER} for run in half["read"](part) if run["side"] == "implicit"]
    every += implicit(half, OTHER)
    shares = half["own_residual"](every)
    assert len(shares) == len(every)
    assert shares[0] < 0.99 <= shares[1]
    text = f"({percent(shares[0], 2, sign=False)} to {percent(shares[-1], 2, sign=False)} %)"
    assert (
        f"by all but one of {len(every)} implicit Llamas of 5.3 M parameters on the other text {text} and"
        in PAGE
    )
    notes = words("benchmarks/NOTES.md")
    assert f"by their own residual {text[1:-1]} of the tokens are within the tolerance" in notes


def test_the_other_text_without_additional_flops(half: dict[str, Any], leads: Any) -> None:
    found, difference = leads["a", OTHER, "adamw"], SEEDS["difference_of_runs"]
    assert (found["seeds"], found["below_with_every_seed"]) == ([2, 2], True)
    assert f"other text: {below(found)} % below ({interval(found)}, two seeds), " in PAGE
    ours, theirs = implicit(half, OTHER), explicit(half, OTHER)
    own = difference(on_choice(ours), on_choice(theirs))
    text = f"is {below(found)} % below the explicit one (95 % interval: {interval(found)}), both seeds below"
    assert f"{text} both explicit ones, and {below(own)} % on the text of the choice" in PAGE
    after = implicit(half, TWICE), explicit(half, TWICE)
    mean = SEEDS["mean_perplexity"]
    lower, hardly = (f"{mean(a):.2f} to {mean(b):.2f}" for a, b in ((theirs, after[1]), (ours, after[0])))
    hardly = f"({hardly}, with a penalty of 4)"
    mine, other = (
        f"{choice(before):.2f} to {choice(later):.2f}"
        for before, later in zip((ours, theirs), after, strict=True)
    )
    text = f"lower the mean of the explicit model from {lower}, but hardly that of the implicit one {hardly}"
    assert f"{text}, although on the text of the choice the implicit one gains more ({mine}; " in PAGE
    assert f"explicit: {other})" in PAGE


def test_the_attractor_injection(half: dict[str, Any], leads: Any) -> None:
    twice, more = (leads["a", part, "adamw"] for part in (ATTRACTOR, LONGEST))
    text = f"{below(twice)} % below with twice the FLOPs ({interval(twice)}) and {below(more)} % below with"
    assert f"`attractor`: {text} four times ({interval(more)})" in PAGE
    text = f"The model is {below(twice)} % below the explicit one (95 % interval: {interval(twice)}), without"
    assert text in PAGE
    text = f"it is {below(more)} % below the explicit model with half of them ({interval(more)}), every seed"
    shares = [share for _, share in map(at_fixed_point, implicit(half, LONGEST))]
    ends = f"{percent(min(shares), sign=False)} to {percent(max(shares), sign=False)} %"
    assert f"{text} below every explicit one, and {ends} of the tokens converge" in PAGE
    assert more["below_with_every_seed"]
    every = half["read"](ATTRACTOR)
    assert {f"{share:.1%}" for _, share in map(at_fixed_point, every)} == {"100.0%"}
    assert "100.0 % in 32 iterations with all four seeds" in PAGE
    changes = sorted(change for change, _ in map(at_fixed_point, every))
    text = f"{percent(changes[0])} to {percent(changes[-1])} % from that with the loops of training"
    assert f"The perplexity at the fixed point is {text}" in PAGE
    worse = [
        percent(1 - choice(implicit(half, residual)) / choice(implicit(half, part)), sign=False)
        for residual, part in ((TWICE, ATTRACTOR), (MORE, LONGEST))
    ]
    assert f"with a penalty of 4 is better by {' and '.join(worse)} %" in PAGE
    larger = [leads["b", part, "adamw"] for part in (ATTRACTOR, LONGEST, RANDOM)]
    text = f"is {below(larger[0])} % below them with twice the FLOPs ({interval(larger[0])}) and"
    text = f"{text} {below(larger[1])} % with four times ({interval(larger[1])}), with a penalty"
    assert text in PAGE
    assert (
        f"and a random depth {percent(larger[2]['difference'], sign=False)} % above ({interval(larger[2])})"
        in PAGE
    )


def test_the_random_depth(half: dict[str, Any], leads: Any) -> None:
    found, every = leads["a", RANDOM, "adamw"], half["read"](RANDOM)
    worse = percent(choice(implicit(half, RANDOM)) / choice(implicit(half, TWICE)) - 1, sign=False)
    text = f"{below(found)} % below the explicit model (95 % interval: {interval(found)}), and {worse} %"
    assert f"with twice the FLOPs: {text} worse on the text of the choice" in PAGE
    few, many = (half["own_residual"](every, max_iterations=count) for count in (16, 32))
    few, many = ([percent(end, 2, sign=False) for end in (one[0], one[-1])] for one in (few, many))
    text = f"{few[0]} to {few[1]} % of the tokens in 16 iterations and {many[0]} to {many[1]} % in 32"
    assert f"by their own residual {text}" in PAGE
    assert sum(share >= 0.99 for share in half["own_residual"](every, max_iterations=16)) == 2
    assert "two of four seeds with a random depth reach it" in PAGE
    gains = [percent(-change, sign=False) for change, _ in map(at_fixed_point, every)]
    assert f"at the fixed point is {min(gains)} to {max(gains)} % below that with 3 loops" in PAGE


def test_the_lists_are_the_runs_of_the_result_files(half: dict[str, Any]) -> None:
    lists = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_gpu.py"))["lists"]()
    recipe = half["Recipe"].of
    for name in ("attractor", "attractor_longest", "random_depth"):
        trained = {run["name"] for run in read(f"averaged_{name}")}
        assert trained == {recipe(run).name for run in lists[name]}


def test_the_table_of_ablations(half: dict[str, Any]) -> None:
    ablations = runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_ablations.py"))
    found = read("ablations")
    assert " ".join(ablations["table"](found).split()) in PAGE
    results = {half["recipe_of"](run): run for run in found}
    rows = {
        (group, label): results.get(half["Recipe"].of({**ablations["COMMON"], **row}))
        for group, members in ablations["GROUPS"].items()
        for label, row in members.items()
    }
    assert all(rows.values())
    adjoint = [rows["gradient", label] for label in ("adjoint solve of 3 iterations", "one adjoint step")]
    text = "An adjoint solve of 3 iterations ({:.2f}) and the one-step adjoint ({:.2f}), which"
    assert text.format(*(run["report"] for run in adjoint if run)) in PAGE
    assert not any(run["captured"] for run in adjoint if run)
    share = max(at_fixed_point(run)[1] for run in adjoint)
    assert f"after training at most {percent(share, sign=False)} % of the tokens converge" in PAGE
    base = rows["base", "base"]
    assert base is not None

    def above(group: str, label: str, on: str = "report", digits: int = 0) -> str:
        run = rows[group, label]
        assert run is not None
        return percent(run[on] / base[on] - 1, digits, sign=False)

    layers = "layers that iterate"
    text = f"{above(layers, 'first half, 0-2-2')} to {above(layers, 'all, 0-4-0')} % above that of the base"
    assert f"perplexity is {text}" in PAGE
    text = f"{above(layers, 'second half, 2-2-0')} and {above(layers, 'three of four, 1-3-0')} % above"
    assert f"Without layers after the core, 2-2-0 and 1-3-0, it is {text}" in PAGE
    text = f"{above('injection', 'concat')} and {above('injection', 'diagonal')} % higher"
    assert f"with `concat` and `diagonal` the perplexity is {text}" in PAGE
    late = [
        run for (group, label), run in rows.items() if group == "late loops" and run and "3 from" in label
    ]
    assert all(run["choice"] < base["choice"] for run in late)
    text = f"by up to {percent(1 - min(run['choice'] for run in late) / base['choice'], sign=False)} %"
    least, most = (end(run["report"] for run in late) / base["report"] for end in (min, max))
    text = f"{text}; on the held-out books they are between {percent(1 - least, sign=False)} % better and"
    assert f"{text} {percent(most - 1, sign=False)} % worse" in PAGE
    assert above("late loops", "8 from 85%", "choice") == "0"
    assert f"and {above('late loops', '8 from 85%')} % worse on the books" in PAGE
    stages = rows["late loops", "1, 2, 3 and 4 for a quarter each"]
    assert stages is not None
    assert stages["choice"] == min(run["choice"] for run in found if run["recipe"]["family"] == "llama")
    penalty = [
        percent(at_fixed_point(run)[1], sign=False)
        for run in (base, *(rows["convergence", f"penalty on the residual {weight}"] for weight in (1, 4)))
    ]
    text = f"from {penalty[0]} to {penalty[1]} %, and a penalty of 4 raises it to {penalty[2]} %"
    assert f"raises the share of converged tokens {text}, at the same perplexity" in PAGE
    label = "penalty on the Jacobian, 3 phantom steps"
    jacobian = rows["convergence", label]
    assert jacobian is not None
    text = f"{jacobian['epochs']:.1f} times, and the perplexity is {above('convergence', label)} % higher"
    assert f"the model sees the text {text}" in PAGE
    random = [
        percent(at_fixed_point(run)[1], sign=False)
        for (group, _), run in rows.items()
        if group == "random depth"
    ]
    assert f"lets {random[1]} to {random[0]} % of the tokens converge" in PAGE
    branches = "branches and losses"
    labels = ("branches scaled by 0.5", "branches scaled by 0.25", "gates of at most 0.75")
    scaled = [rows[branches, label] for label in labels]
    values = [
        "{}, {} and {}".format(*(percent(1 - run[on] / base[on], sign=False) for run in scaled if run))
        for on in ("choice", "report")
    ]
    text = (
        f"are {values[0]} % better than the base on the text of the choice, and {values[1]} % on the held-out"
    )
    assert text in PAGE
    plain, halved = rows["base", "explicit, 4 layers"], rows[branches, "explicit, branches scaled by 0.5"]
    assert plain is not None
    assert halved is not None
    worse = [percent(halved[on] / plain[on] - 1, sign=False) for on in ("choice", "report")]
    assert f"{worse[0]} % worse on the text of the choice than without, and {worse[1]} % on the books" in PAGE
    label = "losses of loops 1, 2 and the last"
    losses = rows[branches, label]
    assert losses is not None
    text = (
        f"sees the text {losses['epochs']:.1f} times, and the perplexity is {above(branches, label)} % higher"
    )
    assert f"cost so much that the model {text}" in PAGE
    three = [run for recipe, run in results.items() if recipe.with_seed(0) == half["recipe_of"](base)]
    assert len(three) == 3
    values = [sorted(run[on] for run in three) for on in ("choice", "report")]
    ends = [f"{found[0]:.2f} to {found[-1]:.2f}" for found in values]
    assert f"have {ends[0]} on the text of the choice and {ends[1]} on the held-out books" in PAGE


def test_adjoint_gradients_of_a_small_model() -> None:
    runs = read("adjoint_small")
    assert {run["recipe"]["precision"] for run in runs} == {"float32"}
    assert {f"{run['parameters'] / 1e6:.1f} M" for run in runs} == {"0.7 M"}
    kinds = ("steps: 2", "implicit_function", "one_step_adjoint")
    phantom, solved, one_step = (
        next(run["report"] for run in runs if any(kind in change for change in run["recipe"]["changes"]))
        for kind in kinds
    )
    (last,) = (run["report"] for run in runs if run["recipe"]["gradient_loops"] == 2)
    text = f"has a perplexity of {last:.1f} with the gradient of the last 2 loops, {phantom:.1f} with 2"
    text = f"{text} phantom steps after 3 iterations, {solved:.1f} with an adjoint solve of 3 iterations and"
    assert f"{text} {one_step:.1f} with the one-step adjoint" in PAGE

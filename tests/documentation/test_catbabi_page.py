"""The figures of the page of CatbAbI equal the results."""

from __future__ import annotations

import re
from statistics import mean, stdev
from typing import Any

import pytest

from tests.documentation.tables import ROOT, catbabi_tests, percent, results, table
from trainer.experiments.catbabi.experiment import PUBLISHED

PAGE = re.sub(r"\s+", " ", (ROOT / "docs" / "catbabi.md").read_text(encoding="utf-8"))
LONGER_ROWS = "catbabi_longer_rows"


def answered(spec: str, model: str, length: int = 200) -> list[dict[str, Any]]:
    """Return the results of a recipe of the zoo in QA mode, in the order of the seeds."""
    asked = (spec, model, "answers", length)
    rows = [
        row for row in catbabi_tests() if (row["spec"], row["model"], row["scoring"], row["length"]) == asked
    ]
    return sorted(rows, key=lambda row: row["seed"])


def accuracies(spec: str, model: str) -> list[float]:
    return [row["accuracy"] for row in answered(spec, model)]


def near(text: str, share: float) -> bool:
    """Return whether a figure in percent is a rounded share; a half may be rounded up or down."""
    return float(text) == pytest.approx(100 * share, abs=0.501 * 0.1 ** len(text.partition(".")[2]))


def test_the_table_of_the_recipes() -> None:
    tests = [row for row in catbabi_tests() if row["scoring"] == "answers"]
    shown = set()
    spec = kind = ""
    for name, parameters, seeds, short, long, iterations, converged in table("catbabi", "QA mode"):
        if not seeds:
            spec = name.strip("`")
            continue
        kind = re.sub(r"(\w+), (\d+) layers?", r"\1-\2", name) or kind
        for position, seed in enumerate(map(int, seeds.split(", "))):
            at = {
                row["length"]: row
                for row in tests
                if (row["spec"], row["model"], row["seed"]) == (spec, kind, seed)
            }
            shown.add((spec, kind, seed))
            assert parameters in ("", f"{at[200]['parameters'] / 1e6:.2f} M")
            for length, cell in ((200, short), (1600, long)):
                if cell:
                    figure = cell.removesuffix(" %").split(", ")[position]
                    assert near(figure, at[length]["accuracy"]), (spec, kind, seed, length)
                else:
                    assert length not in at, (spec, kind, seed, length)
            if kind.startswith("implicit"):
                searches = [at[length]["search"] for length in (200, 1600) if length in at]
                assert iterations == ", ".join(f"{found['iterations']:.1f}" for found in searches)
                assert converged == ", ".join(percent(found["converged"]) for found in searches)
    assert shown == {(row["spec"], row["model"], row["seed"]) for row in tests}


def test_the_headline() -> None:
    implicit, explicit = (accuracies(LONGER_ROWS, f"{kind}-1") for kind in ("implicit", "explicit"))
    best = max(mean(accuracies(row["spec"], "explicit-1")) for row in catbabi_tests())
    seeds = percent(*implicit, digits=2)
    assert PUBLISHED["FP-Mamba-H"] == 0.8955
    assert (
        f"**One implicit layer answers {percent(mean(implicit), digits=2)} of the test questions "
        f"({seeds}, three seeds)**; the published figure for one implicit layer is 89.55 %. "
        f"One explicit layer answers {percent(mean(explicit))} with the same steps, data and settings, and "
        f"{percent(best)} with the recipe that is best for it."
    ) in PAGE
    compared = {cells[2].split(", ")[-1]: cells[2] for cells in table("catbabi", "| published")[2:]}
    for spec in (LONGER_ROWS, "catbabi_groups"):
        figure = percent(mean(accuracies(spec, "implicit-1")), digits=2)
        assert compared[f"`{spec}`"] == f"{figure} (3 seeds), `{spec}`"


def test_the_lead_over_the_published_figure() -> None:
    implicit = accuracies(LONGER_ROWS, "implicit-1")
    lead = mean(implicit) - PUBLISHED["FP-Mamba-H"]
    error = stdev(implicit) / len(implicit) ** 0.5
    assert 0 < lead < error
    assert f"is {100 * lead:.2f} points above the published figure" in PAGE
    assert f"its standard error of {100 * error:.2f} points" in PAGE
    assert f"The standard error of the mean is {100 * error:.2f} points" in PAGE
    below = [PUBLISHED["FP-Mamba-H"] - share for share in implicit if share < PUBLISHED["FP-Mamba-H"]]
    assert len(below) == 2
    assert f"are below 89.55 %, by at most {100 * max(below):.2f} points" in PAGE
    first, last = (answered(LONGER_ROWS, "implicit-1")[at] for at in (0, 2))
    of_task = (last["by_task"]["16"] - first["by_task"]["16"]) / 20
    between = last["accuracy"] - first["accuracy"]
    assert of_task / between == pytest.approx(1 / 3, abs=0.02)
    assert f"accounts for a third of the {100 * between:.2f} points between seeds 17 and 19" in PAGE


def test_the_accuracies_by_task() -> None:
    implicit, explicit = (answered(LONGER_ROWS, f"{kind}-1") for kind in ("implicit", "explicit"))
    for task, text in (
        ("19", r"(\d+) and (\d+) % on qa19 \(path finding\)"),
        ("14", r"(\d+) and (\d+) % on qa14"),
        ("2", r"(\d+) and (\d+) % on qa2,"),
        ("17", r"(\d+) and (\d+) % on qa17"),
        ("15", r"(\d+) and (\d+) % on qa15"),
    ):
        (found,) = re.findall(text, PAGE)
        for figure, rows in zip(found, (implicit, explicit), strict=True):
            assert near(figure, mean(row["by_task"][task] for row in rows)), (task, figure)
    for task in ("2", "3", "14", "17", "19"):
        shares = [100 * row["by_task"][task] for row in implicit]
        assert f"{min(shares):.1f} to {max(shares):.1f} % on qa{task}" in PAGE
    induction = [100 * row["by_task"]["16"] for row in implicit]
    assert f"**qa16 (induction) is not solved:** {min(induction):.0f} to {max(induction):.0f} %." in PAGE
    others = mean((20 * row["mean_of_tasks"] - row["by_task"]["16"]) / 19 for row in implicit)
    assert f"The mean of the other nineteen tasks is {percent(others)} in rows of 200" in PAGE


def test_the_table_of_variants_with_longer_rows() -> None:
    tests = {
        (row["model"], row["seed"], row["length"]): row for row in results("catbabi")["longer_rows"]["test"]
    }
    for cells in table("catbabi", "additional tasks"):
        repeated, rate, kind, seeds, steps, short, average, long, converged, training = cells
        model = f"{kind}-1"
        rows = [tests.pop((model, int(seed), 200)) for seed in seeds.split(", ")]
        longer = [tests.pop((model, row["seed"], 1600), None) for row in rows]
        taken = list(dict.fromkeys(row["steps"] for row in rows))
        (planned,) = {row["of_steps"] for row in rows}
        assert {float(rate)} == {row["learning_rate"] for row in rows}
        for row in rows:
            assert repeated == ", ".join(map(str, row["tasks_repeated"])), row["seed"]
        assert steps == ", ".join(map(str, taken)) + (f" of {planned}" if taken != [planned] else "")
        for figure, row in zip(short.removesuffix(" %").split(", "), rows, strict=True):
            assert near(figure, row["accuracy"]), row["seed"]
            assert re.fullmatch(r"\d+\.\d\d", figure)
        assert average == percent(mean(row["accuracy"] for row in rows), digits=2)
        assert long == (percent(*(row["accuracy"] for row in longer if row)) if all(longer) else "")
        assert all(longer) or not any(longer)
        searches = [row["search"] for row in rows if row["search"]]
        assert converged == (percent(*(found["converged"] for found in searches)) if searches else "")
        phases = [row["training_free_phase"] for row in rows if searches]
        assert training == (percent(*(found["non_converged"] for found in phases)) if phases else "")
    assert not tests


def test_the_table_of_learning_rates() -> None:
    rows = results("catbabi")["longer_rows"]["validation"]
    rates = {(row["learning_rate"], row["model"]): row for row in rows if row["length"] == 200}
    for rate, *cells in table("catbabi", "learning rate | steps, implicit"):
        implicit, explicit = (rates[float(rate), f"{kind}-1"] for kind in ("implicit", "explicit"))
        shares = percent(implicit["accuracy"]), percent(implicit["search"]["converged"])
        assert cells == [
            str(implicit["steps"]),
            *shares,
            str(explicit["steps"]),
            percent(explicit["accuracy"]),
        ]


def test_the_validation_split_of_longer_rows() -> None:
    found = results("catbabi")["longer_rows"]
    rows = {
        (row["model"], row["seed"], row["damping"]): row["accuracy"] for row in found["validation_of_tested"]
    }
    first, second, third = (f"{100 * rows['implicit-1', seed, 0.65]:.2f}" for seed in (17, 18, 19))
    assert f"On the validation split seeds 17 to 19 have {first}, {second} and {third} %." in PAGE
    (wider,) = found["wider"]["runs"]
    assert f"A width of {wider['d_model']} instead of 256 ({wider['parameters'] / 1e6:.2f} M" in PAGE
    assert f"is no better: {percent(wider['accuracy'], digits=2)}." in PAGE
    means = {  # of the explicit layer, in the order of the page
        LONGER_ROWS: mean(accuracies(LONGER_ROWS, "explicit-1")),
        "earlier": mean(
            row["accuracy"]
            for row in found["test"]
            if (row["model"], row["length"]) == ("explicit-1", 200) and "spec" not in row
        ),
        "catbabi_groups": mean(accuracies("catbabi_groups", "explicit-1")),
    }
    now, earlier, groups = map(percent, means.values())
    assert (
        f"not better with these tasks: {now} (mean), compared with {earlier} with the earlier tasks at 2e-3 "
        f"and {groups} with `catbabi_groups`"
    ) in PAGE


def test_the_runs_that_continue_with_induction() -> None:
    found = results("catbabi")["induction_continued"]
    runs = {run["d_model"]: run for run in found["runs"]}
    at = [
        next(row["accuracy"] for row in found["training_answers"][f"width {width}"] if row["step"] == 2280)
        for width in (256, 384)
    ]
    tasks = {
        task: " and ".join(f"{100 * runs[width]['by_task'][task]:.0f}" for width in (256, 384))
        for task in ("16", "19")
    }
    everything = " and ".join(f"{100 * runs[width]['accuracy']:.1f}" for width in (256, 384))
    learned = " and ".join(f"{100 * share:.0f}" for share in at)
    assert (
        f"At step 2,280 they answer {learned} % of the training questions of both tasks correctly, but at "
        f"the end {tasks['16']} % of the validation questions of qa16, and {everything} % of all "
        f"(qa19 {tasks['19']} %)"
    ) in PAGE
    losses = found["loss_of_task_16"]
    narrow, wide = (losses[f"width {width}"] for width in (256, 384))
    usual = losses["catbabi_longer_rows"]
    assert (
        f"{narrow:.1f} and {wide:.1f} nats per answer "
        f"({min(usual):.1f} to {max(usual):.1f} for seeds 17 to 19 of `catbabi_longer_rows`)"
    ) in PAGE

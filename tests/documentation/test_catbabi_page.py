"""The figures of the page of CatbAbI equal the results."""

from __future__ import annotations

import re

import pytest

from tests.documentation.tables import percent, results, table


def test_catbabi_tables_of_longer_rows() -> None:
    found = results("catbabi")["longer_rows"]
    tests = {(row["model"], str(row["seed"]), row["length"]): row for row in found["test"]}
    for rate, kind, seed, *cells in table("catbabi", "learning rate | model | seed"):
        short, long = tests.pop((f"{kind}-1", seed, 200)), tests.pop((f"{kind}-1", seed, 1600), None)
        searches = [row["search"] for row in (short, long) if row and row["search"]]
        free = [short["training_free_phase"]["non_converged"]] if searches else []
        assert float(rate) == short["learning_rate"]
        assert cells == [
            str(short["steps"]),
            percent(short["accuracy"], digits=2),
            percent(long["accuracy"]) if long else "",
            ", ".join(f"{search['iterations']:.1f}" for search in searches),
            ", ".join(percent(search["converged"]) for search in searches),
            "".join(map(percent, free)),
        ]
    assert not tests
    rates = {(row["learning_rate"], row["model"]): row for row in found["validation"] if row["length"] == 200}
    for rate, *cells in table("catbabi", "learning rate | steps, implicit"):
        implicit, explicit = (rates[float(rate), f"{kind}-1"] for kind in ("implicit", "explicit"))
        shares = percent(implicit["accuracy"]), percent(implicit["search"]["converged"])
        assert cells == [
            str(implicit["steps"]),
            *shares,
            str(explicit["steps"]),
            percent(explicit["accuracy"]),
        ]


def test_the_catbabi_table_equals_the_results() -> None:
    tests = [row for row in results("catbabi")["test"] if row["scoring"] == "answers"]
    spec = kind = ""
    for name, _, seeds, short, long, iterations, converged in table("catbabi", "QA mode"):
        if not seeds:
            spec = name.strip("`")
            continue
        kind = re.sub(r"(\w+), (\d+) layers?", r"\1-\2", name) or kind
        for seed, position in zip(seeds.split(", "), range(9), strict=False):
            at = {
                row["length"]: row
                for row in tests
                if (row["spec"], row["model"], row["seed"]) == (spec, kind, int(seed))
            }
            for length, cell in ((200, short), (1600, long)):
                message = cell.removesuffix(" %").split(", ")[position]
                close = 0.501 * 0.1 ** len(message.partition(".")[2])  # a half may be rounded up or down
                found = pytest.approx(100 * at[length]["accuracy"], abs=close)
                assert float(message) == found, (spec, kind, seed, length)
            if kind.startswith("implicit"):
                searches = [at[length]["search"] for length in (200, 1600)]
                assert iterations == ", ".join(f"{found['iterations']:.1f}" for found in searches)
                assert converged == ", ".join(percent(found["converged"]) for found in searches)

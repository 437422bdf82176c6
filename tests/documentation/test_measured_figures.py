"""The figures in the README, the notes and the pages equal those of the files in benchmarks/results."""

from __future__ import annotations

import importlib.util
import json
import math
import re
import sys
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).resolve().parents[2]


def words(path):
    """Return a text in one line."""
    return re.sub(r"\s+", " ", (ROOT / path).read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-"))


README = words("README.md")
RESULTS = words("docs/results.md")
NOTES = words("benchmarks/NOTES.md")
CLUSTER = words("docs/cluster.md")


def results(name):
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    if not path.is_file():
        pytest.skip(f"{path.name} has not been measured")
    return json.loads(path.read_text(encoding="utf-8"))


def thousands(number):
    return f"{number:,}".replace(",", " ")


def program(name):
    path = ROOT / "benchmarks" / f"{name}.py"
    name = f"benchmarks_{name}"
    module = importlib.util.module_from_spec(spec := importlib.util.spec_from_file_location(name, path))
    sys.modules[name] = module  # dataclasses look up their module
    sys.path.insert(0, str(path.parent))  # benchmarks import each other
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def summary(beginning):
    """Return the cells of a row of the summary on the page of results."""
    rows = RESULTS[RESULTS.index("## Summary") : RESULTS.index("## Demo")]
    (row,) = re.findall(re.escape(f"| {beginning}") + r"[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|", rows)
    return [cell.strip() for cell in row]


def readme_rows():
    """Return the cells of the README's table of results, by the first cell."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Results")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")][2:]
    return {name.strip(): [cell.strip() for cell in cells[:-1]] for name, *cells in rows}


def numbers(cell):
    """Return the numbers with a decimal point in a cell."""
    return [float(number) for number in re.findall(r"\d+\.\d+", cell)]


def percent(*shares, digits=2):
    return ", ".join(f"{100 * share:.{digits}f}" for share in shares) + " %"


def flops_share(twins):
    """Return the FLOPs of the explicit twins as a share of those of the implicit models."""
    spent = {True: 0.0, False: 0.0}
    for twin in twins:
        spent["explicit" in twin["run"]] += twin["PFLOP executed"]
    return spent[True] / spent[False]


def test_summary_of_one_gpu():
    rows = {row["work"].replace("\N{MULTIPLICATION SIGN}", "x"): row for row in results("gpu")["rows"]}

    def missed(row):
        return "" if row["reached"] else " (target missed)"

    for name, size, batch in (
        ("Llama", "1.3B", "4 x 2048"),
        ("Llama", "130M", "8 x 2048"),
        ("Mamba2", "1.3B", "4 x 2048"),
        ("Mamba2", "130M", "8 x 2048"),
    ):
        row = rows[f"{name.lower()} {size} (4+1), {batch}"]
        assert summary(f"training {name} {size}") == [
            thousands(row["measured"]) + missed(row),
            f"{thousands(row['published'])} published",
            "H100",
        ]
    memory = [
        [
            rows[f"memory {what}, {name.lower()} 1.3B (4+1), 4 x 2048"]
            for what in ("reserved, CUDA graphs included", "allocated to tensors")
        ]
        for name in ("Llama", "Mamba2")
    ]
    messages = [
        f"{name} {reserved['measured']:g} GB reserved{missed(reserved)}, "
        f"{tensors['measured']:g} GB allocated to tensors"
        for name, (reserved, tensors) in zip(("Llama", "Mamba2"), memory, strict=True)
    ]
    published = " and ".join(f"{reserved['published']:g}" for reserved, _ in memory)
    assert summary("memory") == ["; ".join(messages), f"{published} published", "H100"]
    llama, mamba2 = (
        rows[f"decoding {name}"] for name in ("llama 1.3B, batch 1", "mamba2 1.3B, batch 1, h in float32")
    )
    assert summary("decoding")[:2] == [
        f"Llama {llama['measured']} ms, Mamba2 {mamba2['measured']} ms",
        f"{llama['published']} and {mamba2['published']} ms published",
    ]


def test_summary_of_four_gpus():
    rows = [row for run in results("scaling")["runs"] if run.get("host") is None for row in run["rows"]]
    kept = {
        (row["spec"].partition("_")[0], row.get("graphs", False)): row["efficiency"]
        for row in rows
        if row["gpus"] == 4 and row["layout"] == "ddp"
    }
    llama, captured, eager = (
        percent(kept[key], digits=1) for key in (("llama", False), ("mamba2", True), ("mamba2", False))
    )
    message = f"Llama {llama}, Mamba2 {captured} (eager: {eager}); eight GPUs not measured"
    assert summary("scaling efficiency")[0] == message
    assert max(row["gpus"] for row in rows) == 4


def test_summary_of_the_experiments():
    chain = ["word_problem_a5_mixed", "word_problem_a5_256"]
    rows = [
        (run["arguments"]["spec"], row)
        for run in results("word_problems")["runs"]
        if run.get("arguments", {}).get("then") == chain
        for row in run["rows"]
        if (row["recipe"], row["group"]) == ("word_problem_a5_256", "A5")
    ]
    at = {"length": 1024, "identity_probability": 0.5}
    right: dict[str, dict[int, float]] = {"word_problem_a5": {}, "word_problem_a5_damped": {}}
    for spec, row in rows:
        for test in row["tests"]:
            if row["model"] == "implicit-mamba2" and at.items() <= test.items():
                right[spec][row["seed"]] = test["accuracy_last"]
    one_run, s5 = (
        [
            test["accuracy_last"]
            for row in results("word_problem_long")[kind]["rows"]
            for test in row["tests"]
            if (test["length"], test["identity_probability"]) == (length, 0.5)
        ]
        for kind, length in (("one_run", 1024), ("s5", 128))
    )
    here, beside, _ = summary("A5 state tracking")
    assert here == f"{percent(*one_run)} (eight seeds), 7 to 8 minutes each, two or three runs at a time"
    assert summary("S5 state tracking")[0] == f"{percent(*s5)} (three seeds), 4 to 5 minutes each"
    plain, damped = ([found[seed] for seed in sorted(found)] for found in right.values())
    assert (len(plain), len(damped)) == (5, 3)
    assert summary("A5 by three runs")[0] == (
        f"{percent(*plain)} (five seeds), 7 minutes each; with more damping "
        f"{percent(*damped)}, 12 to 14 minutes"
    )
    explicit = [row for _, row in rows if row["model"] == "mamba2"]
    assert sorted({row["layers"] for row in explicit}) == [1, 2, 4]
    assert max(test["accuracy_last"] for row in explicit for test in row["tests"]) < 0.03
    assert beside == "explicit models of 1, 2, 4 layers: chance, also at length 256"

    answered: dict[tuple[str, str], list[float]] = {}
    for row in results("catbabi")["test"]:
        if row["scoring"] == "answers" and row["length"] == 200:
            answered.setdefault((row["spec"], row["model"]), []).append(row["accuracy"])

    def mean(spec: str, model: str, digits: int = 1) -> str:
        found = answered[f"catbabi_{spec}", model]
        return percent(sum(found) / len(found), digits=digits)

    here, beside, _ = summary("CatbAbI")
    best, earlier = mean("groups", "implicit-1", 2), mean("fast", "implicit-1")
    assert (
        here
        == f"{best} of the answers (three seeds; target missed), {earlier} by an earlier recipe (three seeds)"
    )
    kinds = [("catbabi_groups", "implicit-1"), ("catbabi_fast", "implicit-1")]
    assert [len(answered[kind]) for kind in kinds] == [3, 3]
    one = f"{mean('groups', 'explicit-1').removesuffix(' %')} and {mean('fast', 'explicit-1')}"
    two = mean("fast", "explicit-2")
    assert beside == f"89.55 % published; explicit: one layer {one}, two layers {two}"

    for family, size, other in (("llama", 4, 8), ("mamba2", 8, 12)):
        here, beside, _ = summary(
            f"perplexity on books at equal text, parameters and FLOPs, several epochs, {family.title()}"
        )
        seeds = equal_compute_seeds(family)
        assert here.startswith(", ".join(f"{value:.1f}" for value in seeds["implicit", size]) + " (")
        same, larger = (", ".join(f"{v:.1f}" for v in seeds["explicit", layers]) for layers in (size, other))
        assert re.fullmatch(rf"explicit {same}; with \S+ parameters {larger}( \(not certain\))?", beside)

    twins = results("language")["twins"]
    kinds = [[row for row in twins if ("explicit" in row["run"]) is explicit] for explicit in (False, True)]
    found = [[row["perplexity at 512"] for row in kind] for kind in kinds]
    here, beside, _ = summary("perplexity on books, Llama")
    share = kinds[1][0]["PFLOP executed"] / kinds[0][0]["PFLOP executed"]
    assert here.endswith(" (three seeds)")
    assert beside.endswith(f", at {share:.1f} times the FLOPs")
    for cell, wanted in zip((here, beside), found, strict=True):
        assert numbers(cell)[:3] == pytest.approx(wanted, abs=0.0501)

    own = results("books_own_rates")
    once = own["twins"]
    found = [
        ", ".join(
            f"{twin['lengths'][0]['perplexity']:.1f}"
            for twin in once
            if twin["run"].startswith(f"books_{size}_") and ("explicit" in twin["run"]) is explicit
        )
        for explicit in (False, True)
        for size in ("10m", "5m")
    ]
    assert summary("perplexity on books, Mamba2 10M and 5M")[:2] == [
        f"{found[0]}; {found[1]} (two seeds)",
        f"explicit twins {found[2]}; {found[3]}, at {flops_share(once):.1f} times the FLOPs",
    ]
    again = results("books_10m_mamba2")["after_60_million_tokens"]["twins"]
    implicit, explicit_twin = (twin["curve"][-1]["perplexity"] for twin in again)
    behind = " (worse)" if implicit > explicit_twin else ""
    assert summary("perplexity on books, Mamba2 10M, three passes")[:2] == [
        f"{implicit:.1f}{behind}",
        f"explicit twin {explicit_twin:.1f}",
    ]
    equal = [
        [row["equal_tokens"] for row in own["duality"][name] if row["tolerance"] == 0.05]
        for name in ("books_10m_mamba2", "books_5m_mamba2")
    ]
    message = summary("same next token in both modes")[0]
    assert message == f"{percent(*equal[0]).removesuffix(' %')}; {percent(*equal[1])} (two seeds)"


def test_summary_of_the_demo():
    first = results("demo")["rows"][0]
    implicit, explicit = (
        [percent(row["accuracy_last"]) for row in first[kind]["evaluation"] if row["length"] == 128]
        for kind in ("implicit", "explicit")
    )
    here, beside, _ = summary("the demo")
    assert here.startswith(f"{implicit[0]} (p = 0.5), {implicit[1]} (p = 0); ")
    assert beside == f"explicit twin {', '.join(explicit)}"


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def speed_and_memory():
    """Return the README's cells of training, decoding and scaling."""
    rows = {row["work"].replace("\N{MULTIPLICATION SIGN}", "x"): row for row in results("gpu")["rows"]}
    found = {}

    def add(name, row, value):
        missed = " (target missed)" if row["reached"] is False else ""
        published = thousands(row["published"]) if row["published"] > 1000 else f"{row['published']:g}"
        found[name] = [value + missed, f"{published} (published)"]

    for family, name in (("llama", "Llama"), ("mamba2", "Mamba2")):
        for size, batch in (("1.3B", 4), ("130M", 8)):
            row = rows[f"{family} {size} (4+1), {batch} x 2048"]
            add(f"{name} {size} training (4+1), tokens/s", row, thousands(row["measured"]))
        row = rows[f"memory reserved, CUDA graphs included, {family} 1.3B (4+1), 4 x 2048"]
        add(f"{name} 1.3B training (4+1), GB reserved", row, f"{row['measured']:g}")
        state = ", h in float32" if family == "mamba2" else ""
        row = rows[f"decoding {family} 1.3B, batch 1{state}"]
        add(f"{name} 1.3B decoding, batch 1, ms per iteration", row, f"{row['measured']:g}")
    efficiency = {
        (row["spec"].partition("_")[0], row.get("graphs", False)): percent(row["efficiency"], digits=1)
        for run in results("scaling")["runs"]
        for row in run["rows"]
        if run.get("host") is None and row["gpus"] == 4 and row["layout"] == "ddp"
    }
    scaling = "1.3B training (4+1), scaling efficiency on 4 GPUs"
    found[f"Llama {scaling}"] = [efficiency["llama", False], ""]
    eager = f"{efficiency['mamba2', False]} (eager)"
    return found | {f"Mamba2 {scaling}, CUDA graphs": [efficiency["mamba2", True], eager]}


def tasks():
    """Return the README's cells of state tracking, CatbAbI and the demo."""
    explicit_models = [
        test["accuracy_last"]
        for run in results("word_problems")["runs"]
        for row in run["rows"]
        if (row.get("recipe"), row.get("model")) == ("word_problem_a5_256", "mamba2")
        for test in row["tests"]
        if (test["length"], test["identity_probability"]) == (1024, 0.5)
    ]

    def lowest_and_median(kind, length):
        rows = results("word_problem_long")[kind]["rows"]
        found = [
            test["accuracy_last"]
            for row in rows
            for test in row["tests"]
            if (test["length"], test["identity_probability"]) == (length, 0.5)
        ]
        return len(found), percent(min(found)), percent(median(found))

    explicit = f"{percent(max(explicit_models), digits=1)} (best explicit model)"
    count, lowest, middle = lowest_and_median("one_run", 1024)
    tracking = f"A5 state tracking, trained at length 256, accuracy at 1024, median of {count} seeds"
    found = {tracking: [middle, explicit], f"the same, lowest of {count} seeds": [lowest, explicit]}
    count, lowest, _ = lowest_and_median("s5", 128)
    found[f"S5 state tracking, trained at length 32, accuracy at 128, lowest of {count} seeds"] = [lowest, ""]
    answered: dict[tuple[str, str], list[float]] = {}
    for row in results("catbabi")["test"]:
        if row["scoring"] == "answers" and row["length"] == 200:
            answered.setdefault((row["spec"], row["model"]), []).append(row["accuracy"])
    best, one = (
        percent(mean(answered["catbabi_groups", model]), digits=digits)
        for model, digits in (("implicit-1", 2), ("explicit-1", 1))
    )
    found |= {
        "CatbAbI accuracy, one implicit layer, mean of 3 seeds": [
            f"{best} (target missed)",
            "89.55 % (published)",
        ],
        "the same, against one explicit layer by the same recipe": [best, f"{one} (explicit)"],
    }
    demo = results("demo")["rows"][0]
    for p in (0.5, 0):
        implicit, explicit = (
            percent(row["accuracy_last"])
            for kind in ("implicit", "explicit")
            for row in demo[kind]["evaluation"]
            if (row["length"], row["identity_probability"]) == (128, p)
        )
        name = f"demo, S3 at four times the training length, p = {p:g}"
        found[name] = [implicit, f"{explicit} (explicit twin)"]
    return found


def equal_compute_seeds(name):
    """Return the perplexities of the recipes with several seeds, by side and number of layers."""
    perplexity: dict[tuple[str, int, str], list[float]] = {}
    for run in sorted(results(f"equal_compute_{name}")["runs"], key=lambda run: run["recipe"]["seed"]):
        kind = run["side"], sum(run["recipe"]["layers"]), repr({**run["recipe"], "seed": 0})
        perplexity.setdefault(kind, []).append(run["report"])
    return {kind[:2]: rows for kind, rows in perplexity.items() if len(rows) > 1}


def equal_compute(name):
    """Return the perplexities of the mean losses of the recipes with several seeds."""
    return {kind: math.exp(mean(map(math.log, rows))) for kind, rows in equal_compute_seeds(name).items()}


def language_models():
    """Return the README's cells of language modeling."""
    llama, mamba2 = equal_compute("llama"), equal_compute("mamba2")
    equal = "perplexity on books at equal text, parameters and FLOPs"
    ours, four, eight = (llama[key] for key in (("implicit", 4), ("explicit", 4), ("explicit", 8)))
    level = [mamba2[key] for key in (("implicit", 8), ("explicit", 8))]
    compared = {
        f"{equal}, Llama 5M, means of 5 and 4 seeds": [f"{ours:.1f}", f"{four:.1f} (explicit)"],
        "the same, against 8.5M parameters at equal FLOPs": [
            f"{ours:.1f}",
            f"{eight:.1f} (explicit; not certain)",
        ],
        f"{equal}, Mamba2 6M, means of 2 and 3 seeds": [
            f"{level[0]:.1f} (level)",
            f"{level[1]:.1f} (explicit)",
        ],
    }
    own, first = results("books_own_rates"), results("language")
    perplexity: dict[str, list[float]] = {}
    for twin in own["twins"]:
        perplexity.setdefault(twin["run"].rpartition("-")[0], []).append(twin["lengths"][0]["perplexity"])
    for twin in first["twins"]:
        perplexity.setdefault(twin["run"].rpartition("-")[0], []).append(twin["perplexity at 512"])
    found = {}
    for name, run in (
        ("Llama 5M, 12 M tokens, mean of 3 seeds", "books_5m"),
        ("Mamba2 10M, 26 M tokens seen once, mean of 2 seeds", "books_10m_mamba2"),
    ):
        cells = [f"{mean(perplexity[kind]):.1f}" for kind in (run, f"{run}-explicit")]
        found[f"perplexity on books, {name}"] = [cells[0], f"{cells[1]} (explicit twin)"]
    rows = own["duality"]["books_10m_mamba2"]
    equal = percent(mean(row["equal_tokens"] for row in rows if row["tolerance"] == 0.05))
    name = "same next token in both evaluation modes, Mamba2 10M, mean of 2 seeds"
    found[name] = [equal, "97.6 % (published)"]
    return {**compared, **found}


def test_every_row_of_the_readme_s_table_is_measured():
    wanted = {**speed_and_memory(), **tasks(), **language_models()}
    rows = readme_rows()
    assert set(rows) == set(wanted)
    assert {name: rows[name] for name in wanted} == wanted


def test_the_flops_of_the_explicit_twins():
    shares = [flops_share(results(name)["twins"]) for name in ("language", "books_own_rates")]
    assert [f"{share:.1f}" for share in shares] == ["0.3", "0.3"]
    for text in (README, RESULTS, words("docs/language.md")):
        assert "at 0.3 times the FLOPs" in text  # where the pages compare models at equal tokens


def test_tables_of_one_gpu():
    text = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    table = program("gpu_table")
    assert table.BEGIN in text
    assert table.END in text
    assert table.quote(results("gpu"), text) == text, "python benchmarks/gpu.py --quote"


def test_scaling_table_of_several_gpus():
    before = results("scaling_llama")["rows"]
    for host, row in ((run.get("host"), row) for run in results("scaling")["runs"] for row in run["rows"]):
        speeds = (thousands(round(row[key])) for key in ("tokens_per_second", "tokens_per_second_a_gpu"))
        kept = "" if row["gpus"] == 1 else f"{row['efficiency']:.1%} ".replace("%", " %")
        what = [f"`{row['spec'].removesuffix('_bounded')}`"]
        what += [row["layout"]] * (row["gpus"] > 1) + ["captured"] * row.get("graphs", False)
        what += [host] * (host is not None)
        assert f"| {', '.join(what)} | {row['gpus']} | {' | '.join(speeds)} | {kept}|" in CLUSTER
        if host is not None:  # the notes have the exchange on a slow host
            continue
        if "exchange_ms" in row and row["spec"].startswith("llama"):
            hidden = (
                f"all but {row['exposed_ms']:.0f} ms of the exchange ({row['exchange_ms']:.0f} ms per step)"
            )
            assert hidden in CLUSTER
        elif row.get("graphs"):
            if row["gpus"] > 1 and "exposed_ms" in row:
                assert f"{row['exposed_ms']:.0f} ms are not hidden" in CLUSTER
        elif "idle_ms" in row:
            assert f"{row['idle_ms']:.0f} ms ({row['layout']})" in CLUSTER
    four, two = (next(f"{r['efficiency']:.1%}" for r in before if r["gpus"] == gpus) for gpus in (4, 2))
    assert f"{two} on two GPUs and {four} on four".replace("%", " %") in CLUSTER


def test_the_time_of_a_save():
    (row,) = results("checkpointing")["rows"]
    first, *later = row["staging_seconds"]
    page = words("docs/training.md")
    for figure in (f"{row['gb']:.0f} GB", f"{first:.1f} s", f"{sorted(later)[len(later) // 2]:.2f} s"):
        assert figure in page


def test_losses_of_a_killed_and_resumed_run():
    (found,) = results("killed_and_resumed")["differences"]
    assert f"to {max(found['resumed_on_4'], found['resumed_on_2']):.0e}".replace("e-0", "e-") in CLUSTER
    assert f"differ by {found['whole']:.0e}".replace("e-0", "e-") in CLUSTER


def test_search_overhead_on_the_cpu():
    llama, mamba2 = results("driver_cpu")["rows"]
    messages = [
        f"{row[f'overhead_{scope}_percent']:.1f} %"
        for row in (llama, mamba2)
        for scope in ("sequence", "prefix")
    ]
    assert f"llama {messages[0]} (rows), {messages[1]} (tokens); mamba2 {messages[2]}, {messages[3]}" in NOTES


def test_demo_table():
    first = results("demo")["rows"][0]
    for implicit, explicit in zip(
        first["implicit"]["evaluation"], first["explicit"]["evaluation"], strict=True
    ):
        cells = (
            f"| {implicit['identity_probability']:g} | {implicit['length']} (",
            f" | {100 * explicit['accuracy_last']:.2f} % | {100 * implicit['accuracy_last']:.2f} % | ",
            f"| {implicit['iterations']:.1f} |",
        )
        assert re.search("[^|]*".join(map(re.escape, cells[:2])) + f".*{re.escape(cells[2])}", RESULTS), (
            implicit
        )


def test_word_problems_generated_per_second():
    for row in results("word_problem_generator")["results"]:
        if row["call"] == "sample int64" and row["sequences_a_call"] == 512 and row["draw_order"] == "fast":
            rate = round(row["sequences_per_second"]["median"], -3)
            assert f"{row['problem'].replace(' x EABX', ' × monoid')} {thousands(rate)}" in NOTES, row  # noqa: RUF001  # as the notes have it


def test_scan_on_the_cpu():
    found = results("ssd_cpu")["comparisons"][0]["candidates"]
    ours = found["implicit_blocks"]["both_ms"]
    other = [found[f"transformers, chunk {size}"] for size in (256, 64)]
    messages = [f"{row['both_ms']:.0f} ms ({row['ratio_to_implicit_blocks']:.1f}×)" for row in other]  # noqa: RUF001  # the same
    assert (
        f"| {ours:.0f} ms; transformers 5.23 takes {messages[0]} at its chunk size of 256, {messages[1]}"
        in NOTES
    )

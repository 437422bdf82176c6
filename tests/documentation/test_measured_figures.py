"""The figures of the README, of the notes and of some pages are those of the files in benchmarks/results."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def words(path):
    """Return a text in one line."""
    return re.sub(r"\s+", " ", (ROOT / path).read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-"))


README = words("README.md")
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
    sys.modules[name] = module  # dataclasses look their own up
    sys.path.insert(0, str(path.parent))  # a benchmark reads others beside it
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


def summary(beginning):
    """Return the cells of the README's row of what matters most."""
    rows = README[README.index("## Measured") : README.index("### On a GPU")]
    (row,) = re.findall(re.escape(f"| {beginning}") + r"[^|]*\|([^|]*)\|([^|]*)\|([^|]*)\|", rows)
    return [cell.strip() for cell in row]


def numbers(cell):
    """Return the numbers with a decimal point in a cell."""
    return [float(number) for number in re.findall(r"\d+\.\d+", cell)]


def percent(*shares, digits=2):
    return ", ".join(f"{100 * share:.{digits}f}" for share in shares) + " %"


def test_what_matters_most_on_one_gpu():
    rows = {row["work"].replace("\N{MULTIPLICATION SIGN}", "x"): row for row in results("gpu")["rows"]}

    def short(row):
        return "" if row["reached"] else " (short)"

    for name, size, batch in (
        ("Llama", "1.3B", "4 x 2048"),
        ("Llama", "130M", "8 x 2048"),
        ("Mamba2", "1.3B", "4 x 2048"),
        ("Mamba2", "130M", "8 x 2048"),
    ):
        row = rows[f"{name.lower()} {size} (4+1), {batch}"]
        assert summary(f"training {name} {size}") == [
            thousands(row["measured"]) + short(row),
            f"{thousands(row['published'])} published",
            "H100",
        ]
    memory = [
        [
            rows[f"memory {what}, {name.lower()} 1.3B (4+1), 4 x 2048"]
            for what in ("held, graphs and all", "of tensors alone")
        ]
        for name in ("Llama", "Mamba2")
    ]
    messages = [
        f"{name} {held['measured']:g} GB held{short(held)}, {tensors['measured']:g} of them tensors"
        for name, (held, tensors) in zip(("Llama", "Mamba2"), memory, strict=True)
    ]
    published = " and ".join(f"{held['published']:g}" for held, _ in memory)
    assert summary("memory") == ["; ".join(messages), f"{published} published", "H100"]
    llama, mamba2 = (
        rows[f"decoding {name}"] for name in ("llama 1.3B, batch 1", "mamba2 1.3B, batch 1, h in float32")
    )
    assert summary("decoding")[:2] == [
        f"Llama {llama['measured']} ms, Mamba2 {mamba2['measured']} ms",
        f"{llama['published']} and {mamba2['published']} ms published",
    ]


def test_what_matters_most_on_four_gpus():
    rows = [row for run in results("scaling")["runs"] if run.get("host") is None for row in run["rows"]]
    kept = {
        (row["spec"].partition("_")[0], row.get("graphs", False)): row["efficiency"]
        for row in rows
        if row["gpus"] == 4 and row["layout"] == "ddp"
    }
    llama, recorded, launched = (
        percent(kept[key], digits=1) for key in (("llama", False), ("mamba2", True), ("mamba2", False))
    )
    message = f"Llama {llama}, Mamba2 {recorded} (eager: {launched}); eight not measured"
    assert summary("what each of four")[0] == message
    assert max(row["gpus"] for row in rows) == 4


def test_what_matters_most_of_the_experiments():
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
    here, beside, _ = summary("A5, ")
    plain, damped = ([found[seed] for seed in sorted(found)] for found in right.values())
    assert (len(plain), len(damped)) == (5, 3)
    assert here == (
        f"{percent(*plain)} (five seeds), 7 minutes each; damped further, three side by side: "
        f"{percent(*damped)}, 12 to 14 minutes"
    )
    explicit = [row for _, row in rows if row["model"] == "mamba2"]
    assert sorted({row["layers"] for row in explicit}) == [1, 2, 4]
    assert max(test["accuracy_last"] for row in explicit for test in row["tests"]) < 0.03
    assert beside == "explicit ones of 1, 2, 4 layers: chance, as at 256 itself"

    answered: dict[tuple[str, str], list[float]] = {}
    for row in results("catbabi")["test"]:
        if row["scoring"] == "answers" and row["length"] == 200:
            answered.setdefault((row["spec"], row["model"]), []).append(row["accuracy"])

    def mean(spec: str, model: str, digits: int = 1) -> str:
        found = answered[f"catbabi_{spec}", model]
        return percent(sum(found) / len(found), digits=digits)

    here, beside, _ = summary("CatbAbI")
    best, earlier = mean("groups", "implicit-1", 2), mean("fast", "implicit-1")
    assert here == f"{best} of the answers (three seeds; short), {earlier} by an earlier recipe (three)"
    kinds = [("catbabi_groups", "implicit-1"), ("catbabi_fast", "implicit-1")]
    assert [len(answered[kind]) for kind in kinds] == [3, 3]
    one = f"{mean('groups', 'explicit-1').removesuffix(' %')} and {mean('fast', 'explicit-1')}"
    two = mean("fast", "explicit-2")
    assert beside == f"89.55 % published; explicit: one layer {one}, two {two}"

    twins = results("language")["twins"]
    kinds = [[row for row in twins if ("explicit" in row["run"]) is explicit] for explicit in (False, True)]
    found = [[row["perplexity at 512"] for row in kind] for kind in kinds]
    here, beside, _ = summary("perplexity on books")
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
    assert summary("the same, Mamba2 of 10 M and of 5 M")[:2] == [
        f"{found[0]}; {found[1]} (two seeds)",
        f"explicit twins {found[2]}; {found[3]}",
    ]
    again = results("books_10m_mamba2")["after_60_million_tokens"]["twins"]
    implicit, explicit_twin = (twin["curve"][-1]["perplexity"] for twin in again)
    behind = " (behind)" if implicit > explicit_twin else ""
    assert summary("the same, Mamba2 of 10 M, three passes")[:2] == [
        f"{implicit:.1f}{behind}",
        f"explicit twin {explicit_twin:.1f}",
    ]
    equal = [
        [row["equal_tokens"] for row in own["duality"][name] if row["tolerance"] == 0.05]
        for name in ("books_10m_mamba2", "books_5m_mamba2")
    ]
    message = summary("equal tokens in both modes")[0]
    assert message == f"{percent(*equal[0]).removesuffix(' %')}; {percent(*equal[1])} (two seeds)"


def test_what_matters_most_of_the_demo():
    first = results("demo")["rows"][0]
    implicit, explicit = (
        [percent(row["accuracy_last"]) for row in first[kind]["evaluation"] if row["length"] == 128]
        for kind in ("implicit", "explicit")
    )
    here, beside, _ = summary("the demo")
    assert here.startswith(f"{implicit[0]} (p = 0.5), {implicit[1]} (p = 0); ")
    assert beside == f"explicit twin {', '.join(explicit)}"


def test_the_table_of_one_gpu():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = program("gpu_table")
    assert table.BEGIN in text
    assert table.END in text
    assert table.quote(results("gpu"), text) == text, "python benchmarks/gpu.py --quote"


def test_several_gpus():
    before = results("scaling_llama")["rows"]
    for host, row in ((run.get("host"), row) for run in results("scaling")["runs"] for row in run["rows"]):
        speeds = (thousands(round(row[key])) for key in ("tokens_per_second", "tokens_per_second_a_gpu"))
        kept = "" if row["gpus"] == 1 else f"{row['efficiency']:.1%} ".replace("%", " %")
        what = [f"`{row['spec'].removesuffix('_bounded')}`"]
        what += [row["layout"]] * (row["gpus"] > 1) + ["captured"] * row.get("graphs", False)
        what += [host] * (host is not None)
        assert f"| {', '.join(what)} | {row['gpus']} | {' | '.join(speeds)} | {kept}|" in CLUSTER
        if host is not None:  # what its processes' slowness made of the exchange is told in the notes
            continue
        if "exchange_ms" in row and row["spec"].startswith("llama"):
            assert f"({row['exchange_ms']:.0f} ms a step) all but {row['exposed_ms']:.0f} ms" in CLUSTER
        elif row.get("graphs"):
            if row["gpus"] > 1 and "exposed_ms" in row:
                assert f"{row['exposed_ms']:.0f} ms are not hidden" in CLUSTER
        elif "idle_ms" in row:
            assert f"{row['idle_ms']:.0f} ms ({row['layout']})" in CLUSTER
    four, two = (next(f"{r['efficiency']:.1%}" for r in before if r["gpus"] == gpus) for gpus in (4, 2))
    assert f"two GPUs kept {two} and four {four}".replace("%", " %") in CLUSTER


def test_what_saves_hold_up():
    (row,) = results("checkpointing")["rows"]
    first, *later = row["staging_seconds"]
    message = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert f"the {row['gb']:.0f} GB of a model" in message
    assert f"take {first:.1f} s\nthe first time and {sorted(later)[len(later) // 2]:.2f} s later" in message


def test_a_run_killed_on_several_gpus():
    (found,) = results("killed_and_resumed")["differences"]
    assert f"to {max(found['resumed_on_4'], found['resumed_on_2']):.0e}".replace("e-0", "e-") in CLUSTER
    assert f"differ by {found['whole']:.0e}".replace("e-0", "e-") in CLUSTER


def test_the_driver_on_the_cpu():
    llama, mamba2 = results("driver_cpu")["rows"]
    messages = [
        f"{row[f'overhead_{scope}_percent']:.1f} %"
        for row in (llama, mamba2)
        for scope in ("sequence", "prefix")
    ]
    assert f"llama {messages[0]} (rows), {messages[1]} (tokens); mamba2 {messages[2]}, {messages[3]}" in NOTES


def test_the_demo():
    first = results("demo")["rows"][0]
    for implicit, explicit in zip(
        first["implicit"]["evaluation"], first["explicit"]["evaluation"], strict=True
    ):
        cells = (
            f"| {implicit['identity_probability']:g} | {implicit['length']} (",
            f" | {100 * explicit['accuracy_last']:.2f} % | {100 * implicit['accuracy_last']:.2f} % | ",
            f"| {implicit['iterations']:.1f} |",
        )
        assert re.search("[^|]*".join(map(re.escape, cells[:2])) + f".*{re.escape(cells[2])}", README), (
            implicit
        )


def test_words_generated_a_second():
    for row in results("word_problem_generator")["results"]:
        if row["call"] == "sample int64" and row["sequences_a_call"] == 512 and row["draw_order"] == "fast":
            rate = round(row["sequences_per_second"]["median"], -3)
            assert f"{row['problem'].replace(' x EABX', ' × monoid')} {thousands(rate)}" in NOTES, row  # noqa: RUF001  # as the notes have it


def test_the_scan_on_the_cpu():
    found = results("ssd_cpu")["comparisons"][0]["candidates"]
    ours = found["implicit_blocks"]["both_ms"]
    other = [found[f"transformers, chunk {size}"] for size in (256, 64)]
    messages = [f"{row['both_ms']:.0f} ms ({row['ratio_to_implicit_blocks']:.1f}×)" for row in other]  # noqa: RUF001  # the same
    assert (
        f"| {ours:.0f} ms; transformers 5.23 needs {messages[0]} at its chunk size of 256, {messages[1]}"
        in NOTES
    )

"""The README's figures are those of the files in benchmarks/results."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8").replace("\N{MINUS SIGN}", "-"))


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
    spec.loader.exec_module(module)
    return module


def test_the_table_of_one_gpu():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = program("gpu_table")
    assert table.BEGIN in text
    assert table.END in text
    assert table.quote(results("gpu"), text) == text, "python benchmarks/gpu.py --quote"


def test_llama_recorded_on_one_gpu():
    run = results("gpu_h200")["runs"][-1]
    assert f"`{run['command']}`" in README
    rows = {row["work"]: row for row in run["training"]}
    said = README[README.index("With Llama's maps recorded, on one H200") :]
    works = ("llama_1.3b_bounded", "llama_130m_bounded", "llama_130m_free")
    places = [said.index(thousands(rows[work]["tokens_per_second"])) for work in works]
    assert places == sorted(places)
    large = rows["llama_1.3b_bounded"]
    assert f"holding {large['reserved_gb']} GB ({large['peak_gb']} of tensors)" in said
    share = rows["llama_130m_free"]["share_of_card"] / rows["llama_130m_bounded"]["share_of_card"]
    assert f"{share:.2f} of (4+1) by FLOPs" in said
    llama, mamba2 = (
        [f"{row[f'overhead_{scope}_percent']:.1f} %" for scope in ("sequence", "prefix")]
        for row in run["driver"]
    )
    assert f"adds {llama[0]} (rows) and {llama[1]} (tokens) to Llama 130M's map" in said
    assert f"{mamba2[0]} and {mamba2[1]} to Mamba2 130M's" in said


def test_several_gpus():
    before = results("scaling_llama")["rows"]
    for host, row in ((run.get("host"), row) for run in results("scaling")["runs"] for row in run["rows"]):
        speeds = (thousands(round(row[key])) for key in ("tokens_per_second", "tokens_per_second_a_gpu"))
        kept = "" if row["gpus"] == 1 else f"{row['efficiency']:.1%} ".replace("%", " %")
        what = [f"`{row['spec'].removesuffix('_bounded')}`"]
        what += [row["layout"]] * (row["gpus"] > 1) + ["recorded"] * row.get("graphs", False)
        what += [host] * (host is not None)
        assert f"| {', '.join(what)} | {row['gpus']} | {' | '.join(speeds)} | {kept}|" in README
        if host is not None:  # what its processes' slowness made of the exchange is told in the notes
            continue
        if "exchange_ms" in row and row["spec"].startswith("llama"):
            assert f"({row['exchange_ms']:.0f} ms a step) all but {row['exposed_ms']:.0f} ms" in README
        elif row.get("graphs"):
            if row["gpus"] > 1 and "exposed_ms" in row:
                assert f"{row['exposed_ms']:.0f} ms are not hidden" in README
        elif "idle_ms" in row:
            assert f"{row['idle_ms']:.0f} ms ({row['layout']})" in README
    four, two = (next(f"{r['efficiency']:.1%}" for r in before if r["gpus"] == gpus) for gpus in (4, 2))
    assert f"two GPUs kept {two} and four {four}".replace("%", " %") in README


def test_what_saves_hold_up():
    (row,) = results("checkpointing")["rows"]
    first, *later = row["staging_seconds"]
    said = (ROOT / "docs" / "training.md").read_text(encoding="utf-8")
    assert f"the {row['gb']:.0f} GB of a model" in said
    assert f"take {first:.1f} s\nthe first time and {sorted(later)[len(later) // 2]:.2f} s later" in said


def test_a_run_killed_on_several_gpus():
    (found,) = results("killed_and_resumed")["differences"]
    assert f"to {max(found['resumed_on_4'], found['resumed_on_2']):.0e}".replace("e-0", "e-") in README
    assert f"differ by {found['whole']:.0e}".replace("e-0", "e-") in README


def test_the_driver_on_the_cpu():
    llama, mamba2 = results("driver_cpu")["rows"]
    said = [
        f"{row[f'overhead_{scope}_percent']:.1f} %"
        for row in (llama, mamba2)
        for scope in ("sequence", "prefix")
    ]
    assert f"llama {said[0]} (rows), {said[1]} (tokens); mamba2 {said[2]}, {said[3]}" in README


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
            assert f"{row['problem'].replace(' x EABX', ' × monoid')} {thousands(rate)}" in README, row  # noqa: RUF001  # as the README has it


def test_the_scan_on_the_cpu():
    found = results("ssd_cpu")["comparisons"][0]["candidates"]
    ours = found["implicit_blocks"]["both_ms"]
    other = [found[f"transformers, chunk {size}"] for size in (256, 64)]
    said = [f"{row['both_ms']:.0f} ms ({row['ratio_to_implicit_blocks']:.1f}×)" for row in other]  # noqa: RUF001  # the same
    assert f"| {ours:.0f} ms; transformers 5.23 needs {said[0]} at its chunk size of 256, {said[1]}" in README

"""The figures of decoding with tokens in flight and with 8-bit weights equal those of benchmarks/results."""

from __future__ import annotations

import importlib
import json
import sys
from itertools import chain

import pytest

from tests.documentation.tables import ROOT, results, words

NAMES = {"llama_1.3b": "Llama", "mamba2_1.3b": "Mamba2", "books_5m": "Llama", "books_5m_mamba2": "Mamba2"}


def times_of_calls(profile):
    """Return the milliseconds of a call with overlapping launches, by kind and model."""
    found: dict[str, dict[str, float]] = {}
    for row in profile["rows"]:
        found.setdefault(row["call"], {})[NAMES[row["model"]]] = row["ms overlapping"]
    return found


def times_of_windows():
    """Return the milliseconds of calls on 1 and 4 tokens with the best tiles of the search, by model."""
    rows = {(NAMES[row["model"]], row["name"]): row["ms"] for row in results("decoding_window_tiles")["rows"]}
    return [
        {name: rows[name, call] for name in ("Llama", "Mamba2")}
        for call in ("1 token, at the end", "4 tokens, best")
    ]


def both(values, pattern="{} and {}", digits=2):
    return pattern.format(*(f"{values[name]:.{digits}f}" for name in ("Llama", "Mamba2")))


def test_times_of_calls():
    page, notes, overview = words("docs/decoding.md"), words("benchmarks/NOTES.md"), words("docs/results.md")
    profile = results("decoding_profile_h200")
    times, later = times_of_calls(profile), times_of_calls(profile["later"])
    one_before, before, int8, fp8 = (times[kind] for kind in ("1", "4", "int8", "fp8"))
    one, eight = later["1"], later["8"]
    alone, four = times_of_windows()
    assert both(one, "a call on one token takes {} ms (Llama) and {} ms (Mamba2), on 4 tokens") in page
    assert (
        both(four, "the choice of tokens, {} and {} ms,") + both(eight, " and on 8 tokens {} and {} ms")
        in page
    )
    instead = [
        f"{int8[name]:.2f} instead of {one_before[name]:.2f} ms ({name} 1.3B)" for name in ("Llama", "Mamba2")
    ]
    assert f"reads int8 weights takes {' and '.join(instead)}, with 8-bit floats {both(fp8)} ms" in page
    assert both(one, "A single call with 1.3 B parameters takes {} and {} ms") in overview
    assert both(int8, "with int8 weights {} and {} ms") in overview
    ratios = [
        {name: call[name] / single[name] for name in single}
        for call, single in ((four, alone), (eight, one), (before, one_before))
    ]
    assert (
        both(ratios[0], "takes {} (Llama) and {} times (Mamba2) as long as one with a single token") in notes
    )
    instead = [f"{four[name]:.2f} instead of {alone[name]:.2f}" for name in alone]
    assert f"{instead[0]} ms and {instead[1]} on an H200" in notes
    assert f"{before['Mamba2']:.2f} for Mamba2 the day before ({ratios[2]['Mamba2']:.2f} times;" in notes
    assert both(ratios[1], "8 tokens in flight a call takes {} and {} times as long as with one") in notes
    assert {f"{ratio:.1f}" for of in ratios[:2] for ratio in of.values()} == {"1.1", "1.3", "1.4"}
    assert "1.1 to 1.4 times as long" in page
    for stored in (times, times_of_calls(results("decoding_profile"))):  # so that "auto" chooses int8
        assert all(stored["int8"][name] < stored["fp8"][name] for name in one)
    quick = both(int8, "int8 takes {} (Llama) and {} ms (Mamba2),") + both(fp8, " 8-bit floats {} and {},")
    assert quick + both(one_before, " full precision {} and {} ") in notes
    shares = [100 * call[name] / one_before[name] for call in (int8, fp8) for name in one]
    assert f"takes {min(shares):.0f} to {max(shares):.0f} % of the time" in words("CHANGELOG.md")


def test_tiles_of_windows():
    notes, stored = words("benchmarks/NOTES.md"), results("decoding_window_tiles")
    (single, before), base = stored["before"]["rows"], stored["base"]["rows"]
    assert (single["model"], single["call"], before["call"]) == ("llama_1.3b", "1", "4")
    ratio = before["ms overlapping"] / single["ms overlapping"]
    text = f"{before['ms overlapping']:.2f} ms for Llama on another card ({ratio:.2f} times)"
    assert text in notes
    eight, four = (
        next(row for row in base if (row["model"], row["call"]) == ("llama_1.3b", call)) for call in "84"
    )
    text = f"other tiles than the present ones 8 tokens took {eight['ms overlapping']:.2f} ms"
    assert f"{text} and 4 tokens {four['ms overlapping']:.2f} (Llama" in notes
    times = times_by_tiles(stored["earlier"]["rows"])
    gate = [times["gate", 8, 4, 32, 0, 4, ahead, 0, direct] for ahead, direct in ((8, 4), (4, 4), (99, 16))]
    text = "{:.2f} with (8, 4, 4, 8), {:.2f} with (8, 4, 4, 4), {:.2f} with (8, 4, 16, 16)"
    assert text.format(*gate) in notes
    conv = times["conv", 8, 4, 32, 0, 4, 99, 2, 4], times["conv", 8, 8, 32, 0, 8, 99, 2, 8]
    assert f"{conv[0]:.2f} with (8, 4, 4, 16), {conv[1]:.2f} with 8 warps" in notes
    times = times_by_tiles(stored["rows"])
    narrow, first = times["in", 8, 4, 32, 0, 4, 4, 0, 4], times["added 2048", 8, 4, 32, 0, 4, 16, 0, 16]
    late = times["in", 8, 4, 32, 0, 4, 4, 2, 4]
    text = (
        f"1.01 with (8, 8, 8, 8) and {first:.2f} with (8, 4, 16, 16); its input projection {first:.2f} with"
    )
    assert f"{text} (8, 4, 16, 16), {narrow:.2f} with (8, 4, 4, 4), and {late:.2f} where" in notes
    conv = [times["conv", 8, 4, 32, 0, 4, ahead, 2, 4] for ahead in (16, 8, 4)]
    text = "{:.2f} with (8, 4, 4, 16), {:.2f} with (8, 4, 4, 8), {:.2f} with (8, 4, 4, 4)"
    assert text.format(*conv) in notes
    heads = [row for row in stored["rows"] if row["name"].startswith("head:")]
    assert max(abs(row["ms"] / row["best"] - 1) for row in heads) < 0.005


def times_by_tiles(rows):
    """Return the milliseconds of a search, by product and tiles."""
    return {
        (product, *tiles): row["ms"]
        for row in rows
        for product, tiles in row["tiles"].items()
        if row["name"].startswith(f"{product}:")
    }


def test_tokens_per_second_with_tokens_in_flight():
    page, notes = words("docs/decoding.md"), words("benchmarks/NOTES.md")
    kernels = {
        row["work"].removeprefix("call of ").removesuffix(", 8 in flight"): row["us"]["new"]
        for row in results("decoding_tiles_h200")["kernels"]
        if row["work"].endswith(", 8 in flight")
    }
    times, calls, own = {}, {}, {}
    for row in results("decoding_calls_books_gpu")["rows"]:
        cells = [row[mode] for mode in ("sequential", "wavefront 4", "wavefront 8")]
        assert " | ".join(["calls per token", *(f"{cell['calls_per_token']:.2f}" for cell in cells)]) in page
        speeds = [f"{cell['tokens_per_second']:,.0f}" for cell in cells]
        assert " | ".join(["tokens per second", *speeds]) in page
        assert f"{speeds[2]} instead of {speeds[0]}" in notes
        name = NAMES[row["model"]]
        times[name] = cells[2]["tokens_per_second"] / cells[0]["tokens_per_second"]
        calls[name] = 1e6 / (cells[2]["tokens_per_second"] * cells[2]["calls_per_token"])
        own[name] = kernels[row["model"]]
        if name == "Llama":
            text = f"takes {cells[2]['calls_per_token']} calls of {calls[name]:.0f} μs per token and"
            assert f"{text} generates {speeds[2]} tokens per second" in words("docs/results.md")
    assert both(times, "that is {} and {} times the speed", digits=1) in page
    assert both(times, "decode {} (Llama) and {} times (Mamba2) as many tokens per second") in notes
    call = "takes {} μs (attention) and {} μs (Mamba2)"
    assert both(calls, call, digits=0) + both(own, ", its kernels {} and {} μs", digits=0) in page
    call = "takes {} (Llama) and {} μs (Mamba2), or 1,000,000 / (tokens/s × calls per token),"  # noqa: RUF001  # as the notes have it
    assert both(calls, call, digits=0) + both(own, " and its kernels take {} and {} ", digits=0) in notes
    assert {f"{calls[name] - own[name]:.0f}" for name in calls} == {"18"}


def test_texts_at_a_small_tolerance():
    found = results("equal_texts_small_tolerance")
    assert (found["arguments"]["tolerance"], found["arguments"]["in_flight"]) == ("0.0001", "4")
    rows = found["rows"]
    assert {(row["model"], row["temperature"]) for row in rows} == {
        (model, temperature) for model in ("books_5m", "books_5m_mamba2") for temperature in (0, 1)
    }
    prompts = sum(row["prompts"] for row in rows)
    parted = [each for row in rows for each in row["parted"]]
    assert sum(int(row["equal"].split()[0]) for row in rows) == prompts - len(parted)
    assert max(each["margin"] for each in parted) < 1e-5
    assert len(parted) == 2
    text = f"all differences are near ties: {prompts - 2:,} of {prompts:,} texts are equal, and the other two"
    for page in ("docs/decoding.md", "benchmarks/NOTES.md"):
        assert f"{text} have margins below 1e-5" in words(page)


def test_tokens_per_second_of_looped_models_with_tokens_in_flight():
    page, notes = words("docs/decoding.md"), words("benchmarks/NOTES.md")
    times = []
    for family, row in zip(("attention", "Mamba2"), results("decoding_calls_residual")["rows"], strict=True):
        cells = [row[mode] for mode in ("sequential", "wavefront 4", "wavefront 8")]
        counts = [f"{cell['calls_per_token']:.2f}" for cell in cells]
        name = f"{family}, looped (1-2-1 layers)"
        assert " | ".join([name, "calls per token", *counts]) in page
        speeds = [f"{cell['tokens_per_second']:,.0f}" for cell in cells]
        assert " | ".join(["tokens per second", *speeds]) in page
        times.append(f"{cells[2]['tokens_per_second'] / cells[0]['tokens_per_second']:.1f}")
        assert f"{speeds[2]} instead of {speeds[0]}" in notes
        assert f"{family.replace('attention', 'Llama')}: {counts[2]} instead of {counts[0]}" in notes
    assert f"{' and '.join(times)} times for the looped models" in page


def test_long_prompts_beside_the_forward_pass():
    page, notes = words("docs/decoding.md"), words("benchmarks/NOTES.md")
    h100, h200 = (
        {NAMES[row["model"]]: row for row in results(name)["rows"]} for name in ("prefill", "prefill_h200")
    )
    for rows, text in (
        (h100, "takes {} s (Llama 1.3B, {} GB) and {} s (Mamba2 1.3B, {} GB),"),
        (h200, "on an H200 {} s ({} GB) and {} s ({} GB)."),
    ):
        figures = ((f"{row['seconds']:.1f}", f"{row['reserved_gb']:.0f}") for row in rows.values())
        assert text.format(*chain(*figures)) in page
    shares = [
        {
            name: 100 * row["tokens_times_calls_per_second"] / row["forward_tokens_times_calls_per_second"]
            for name, row in rows.items()
        }
        for rows in (h100, h200)
    ]
    assert both(shares[0], "that is {} % (Llama) and {} % (Mamba2) of the rate of training's", 0) in page
    assert both(shares[1], "on the H200 {} and {} %.", 0) in page
    assert both(shares[1], "run at {} % (Llama 1.3B) and {} % (Mamba2 1.3B) of the rate", 0) in notes
    ratio = h200["Llama"]["flop_ratio"]
    assert f"a token requires {ratio} times as much arithmetic, so at the FLOP/s of the forward pass" in page
    assert f"its share would be {100 / ratio:.0f} %" in page
    assert min(of["Llama"] for of in shares) < 60 < min(of["Mamba2"] for of in shares)


def test_the_benchmark_reports_calls_per_token_and_tokens_per_second(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    sizes = ["--context", "8", "--iterations", "2", "--tokens", "3", "--rows", "2", "--in-flight", "1", "2"]
    options = ["--tiny", "--device", "cpu", "--models", "llama_1.3b", *sizes, "--output", f"{tmp_path}/rows"]
    monkeypatch.setattr(sys, "argv", ["decoding.py", *options])
    importlib.import_module("decoding").main()
    row, in_flight = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert row["calls_per_token"] == 3
    assert row["tokens_per_second_per_row"] == pytest.approx(1000 / (3 * row["ms"]), rel=1e-2)
    assert "calls_per_token" not in in_flight

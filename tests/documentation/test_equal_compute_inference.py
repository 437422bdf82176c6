"""The figures of inference on the page on equal compute equal those of the result file."""

import json
import runpy
from typing import Any

import pytest

from tests.documentation.equal_compute_pages import PAGE, ROOT, words

NOTES = " ".join((ROOT / "benchmarks" / "NOTES.md").read_text(encoding="utf-8").split())


@pytest.fixture
def inference(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the program that measures inference."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_inference.py"))


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_the_tables_of_inference_are_those_of_the_result_file(family: str, inference: dict[str, Any]) -> None:
    rows = stored("equal_compute_inference_gates")["rows"]
    assert " ".join(inference["table"](rows, family).split()) in PAGE
    for row in rows:
        known = inference["counted"](
            inference["model_of"](inference["Recipe"].of(row["recipe"])), row["loops"]
        )
        assert known.items() <= row.items()  # FLOPs and bytes, which need no measurement


def stored(name: str) -> dict[str, Any]:
    path = ROOT / "benchmarks" / "results" / f"{name}.json"
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def timed_rows(stored: dict[str, Any]) -> dict[tuple[str, int, int | None], dict[str, Any]]:
    return {
        (row["recipe"]["family"], sum(row["recipe"]["layers"]), row["loops"]): row for row in stored["rows"]
    }


def slower(looped: dict[str, Any], explicit: dict[str, Any], texts: str = "1") -> str:
    return f"{looped['generated'][texts] / explicit['generated'][texts]:.1f}"


def test_at_equal_flops_per_token_implicit_models_are_better_smaller_and_slower(
    inference: dict[str, Any],
) -> None:
    rows = {
        (row["recipe"]["family"], row["recipe"]["width"], sum(row["recipe"]["layers"]), row["loops"]): row
        for row in stored("equal_compute_inference_gates")["rows"]
    }
    known = {inference["size_of"](recipe): runs for recipe, runs in inference["recipes"]()}

    def perplexity(row: dict[str, Any]) -> float:
        recipe = inference["Recipe"].of(row["recipe"])
        value: float = inference["perplexity_at"](known[inference["size_of"](recipe)], row["loops"])
        return value

    def below(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
        return f"{100 * (1 - perplexity(ours) / perplexity(theirs)):.1f} %"

    def memory(row: dict[str, Any]) -> float:
        return float(row["weight_bytes"] + row["state_bytes"])

    llama, eight = rows["llama", 256, 4, 3], rows["llama", 256, 8, None]
    mamba2, wide = rows["mamba2", 320, 4, 3], rows["mamba2", 320, 8, None]
    two = rows["mamba2", 320, 4, 2]
    for ours, theirs in ((llama, eight), (mamba2, wide)):
        assert ours["flops_per_token"] == pytest.approx(theirs["flops_per_token"], rel=0.005)
    assert f"and its perplexity is {below(llama, eight)} below theirs. Mamba2 with 3 loops" in PAGE
    assert f"of the same width, and its perplexity is {below(mamba2, wide)} below theirs; with 2" in PAGE
    fewer = two["flops_per_token"] / wide["flops_per_token"]
    assert f"loops it is {below(two, wide)} below, for {fewer:.1f} times the FLOPs." in PAGE
    text = f"needs {memory(llama) / 1e6:.1f} MB for its weights and for keys and values, the explicit model"
    assert f"{text} with 8 layers {memory(eight) / memory(llama):.1f} times as much" in PAGE
    text = f"Mamba2 needs {memory(mamba2) / 1e6:.1f} MB, and 8 explicit layers of the same width"
    assert f"{text} {memory(wide) / memory(mamba2):.1f} times as much" in PAGE
    shares = {f"{memory(ours) / memory(theirs):.1f}" for ours, theirs in ((llama, eight), (mamba2, wide))}
    assert shares == {"0.6"}
    text = (
        f"and 0.6 times their memory: Llama 5M {below(llama, eight)}, Mamba2 5M {below(mamba2, wide)} below"
    )
    assert text in words("README.md")
    gain = below(rows["llama", 256, 4, 8], rows["llama", 256, 4, 2])
    assert f"From 2 to 8 loops the perplexity of Llama falls by {gain}" in PAGE
    text = f"takes {slower(llama, eight)} times as long as one of 8 explicit layers, which execute the same"
    assert f"{text} FLOPs, and one of the implicit Mamba2 {slower(mamba2, wide)} times as long" in PAGE
    many = slower(llama, eight, "64"), slower(mamba2, wide, "64")
    assert f"With 64 texts the factors are {many[0]} and {many[1]}." in PAGE
    loops = [
        200 * (rows[family, width, 4, 8]["generated"]["1"] - row["generated"]["1"])  # ms of one of five
        for family, width, row in (("llama", 256, llama), ("mamba2", 320, mamba2))
    ]
    assert f"an additional loop takes {loops[0]:.2f} ms in Llama and {loops[1]:.2f} ms in Mamba2" in PAGE
    alone = timed_rows(stored("equal_compute_inference"))
    ms = [
        f"{1e3 * alone['llama', layers, loops]['generated']['1']:.2f}"
        for layers, loops in ((4, None), (8, None), (4, 3), (4, 8))
    ]
    text = f"Llamas of 4 and 8 layers took {ms[0]} and {ms[1]} ms per generated token"
    assert f"{text}, and the implicit one with 3 and 8 loops, without gates, {ms[2]} and {ms[3]}" in PAGE


def test_generation_with_looped_models_takes_longer_than_their_flops_suggest() -> None:
    rows = timed_rows(stored("equal_compute_inference"))
    llama, eight = rows["llama", 4, 3], rows["llama", 8, None]
    assert llama["flops_per_token"] == eight["flops_per_token"]
    mamba2, explicit = rows["mamba2", 8, 3], rows["mamba2", 8, None]
    dearer = mamba2["flops_per_token"] / explicit["flops_per_token"]
    many = slower(llama, eight, "64"), slower(mamba2, explicit, "64")
    assert f"with 64 texts the factors are {many[0]} and {many[1]} " in NOTES
    ms = [f"{1e3 * row['generated']['1']:.2f}" for row in (llama, eight, mamba2, explicit)]
    assert f"{ms[0]} ms with 3 loops of 1-2-1 beside {ms[1]} ms of 8 explicit layers (Llama" in NOTES
    text = f"{ms[2]} beside {ms[3]} ms of 8 explicit layers (Mamba2), for {dearer:.1f} times the FLOPs"
    assert text in NOTES


def test_generation_before_and_after_all_loops_became_one_launch() -> None:
    both = stored("equal_compute_inference")
    before, after = timed_rows(both["before"]), timed_rows(both)
    assert list(before) == list(after)
    assert both["before"]["machine"]["gpu"] == both["machine"]["gpu"] == "NVIDIA H200"
    measured = {"generated", "scored_tokens_per_second"}
    for (family, layers, loops), row in after.items():
        earlier = before[family, layers, loops]
        assert {k: v for k, v in earlier.items() if k not in measured} == {
            k: v for k, v in row.items() if k not in measured
        }
        explicit = loops is None
        shape = f"{layers} layers" if explicit else "-".join(map(str, row["recipe"]["layers"]))
        cells = [f"{family.capitalize()}, {'explicit' if explicit else 'looped'}, {shape}"]
        cells.append("" if explicit else str(loops))
        cells += [f"{1e3 * one['generated']['1']:.3f}" for one in (earlier, row)]
        cells += [f"{1 / one['generated']['64']:,.0f}" for one in (earlier, row)]
        assert " ".join(f"| {' | '.join(cells)} |".split()) in NOTES
    keys = ("llama", 4, 3), ("mamba2", 8, 3)
    times = [f"{1e3 * before[key]['generated']['1']:.2f} ms" for key in keys]
    assert f"a token with 3 loops took {times[0]} (Llama) and {times[1]} (Mamba2)" in PAGE
    changes = " ".join((ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split())
    llama = after["llama", 4, 3]
    text = f"a looped Llama of {llama['parameters'] / 1e6:.1f} M parameters takes"
    assert f"{text} {1e3 * llama['generated']['1']:.2f} instead of {times[0]} (H200)" in changes
    scored = [
        before[key]["scored_tokens_per_second"] / row["scored_tokens_per_second"]
        for key, row in after.items()
    ]
    assert f"has {min(scored):.2f} to {max(scored):.2f} times as many scored tokens/s" in NOTES


def test_searches_with_several_tokens_in_flight() -> None:
    path = ROOT / "benchmarks" / "results" / "decoding_calls_residual.json"
    speeds = {
        row["model"]: row["wavefront 8"]["tokens_per_second"]
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]
    }
    llama, mamba2 = speeds["books_5m_residual"], speeds["books_5m_mamba2_residual"]
    text = f"decode {llama:,.0f} tokens/s (Llama) and {mamba2:,.0f} (Mamba2), {1e3 / llama:.2f} and"
    assert f"{text} {1e3 / mamba2:.2f} ms per token" in PAGE

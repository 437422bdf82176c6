"""The figures of inference on the page on equal compute equal those of the result file."""

import json
import runpy
from typing import Any

import pytest

from tests.documentation.equal_compute_pages import PAGE, ROOT

NOTES = " ".join((ROOT / "benchmarks" / "NOTES.md").read_text(encoding="utf-8").split())


@pytest.fixture
def inference(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the program that measures inference."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return runpy.run_path(str(ROOT / "benchmarks" / "equal_compute_inference.py"))


@pytest.mark.parametrize("family", ["llama", "mamba2"])
def test_the_tables_of_inference_are_those_of_the_result_file(family: str, inference: dict[str, Any]) -> None:
    path = ROOT / "benchmarks" / "results" / "equal_compute_inference.json"
    rows = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert " ".join(inference["table"](rows, family).split()) in PAGE
    for row in rows:
        known = inference["counted"](
            inference["model_of"](inference["Recipe"].of(row["recipe"])), row["loops"]
        )
        assert known.items() <= row.items()  # FLOPs and bytes, which need no measurement


def timed_rows(stored: dict[str, Any]) -> dict[tuple[str, int, int | None], dict[str, Any]]:
    return {
        (row["recipe"]["family"], sum(row["recipe"]["layers"]), row["loops"]): row for row in stored["rows"]
    }


def test_generation_with_looped_models_takes_longer_than_their_flops_suggest() -> None:
    path = ROOT / "benchmarks" / "results" / "equal_compute_inference.json"
    rows = timed_rows(json.loads(path.read_text(encoding="utf-8")))

    def slower(looped: dict[str, Any], explicit: dict[str, Any], texts: str = "1") -> str:
        return f"{looped['generated'][texts] / explicit['generated'][texts]:.1f}"

    def further(family: str, layers: int) -> float:
        """Return the time of a further loop in ms."""
        few, many = (rows[family, layers, loops]["generated"]["1"] for loops in (3, 8))
        return 1e3 * (many - few) / 5

    llama, eight = rows["llama", 4, 3], rows["llama", 8, None]
    assert llama["flops_per_token"] == eight["flops_per_token"]
    text = f"takes {slower(llama, eight)} times as long as one of 8 explicit layers"
    assert f"a token of the looped Llama {text}" in PAGE
    mamba2, explicit = rows["mamba2", 8, 3], rows["mamba2", 8, None]
    dearer = mamba2["flops_per_token"] / explicit["flops_per_token"]
    text = f"takes {slower(mamba2, explicit)} times as long as one of the explicit model of its size"
    assert f"one of the looped Mamba2 {text}, for {dearer:.1f} times the FLOPs" in PAGE
    many = slower(llama, eight, "64"), slower(mamba2, explicit, "64")
    assert f"With 64 texts the factors are {many[0]} and {many[1]}." in PAGE
    assert f"with 64 texts the factors are {many[0]} and {many[1]} " in NOTES
    loops = further("llama", 4), further("mamba2", 8)
    assert f"{loops[0]:.2f} ms in Llama (two layers) and {loops[1]:.2f} ms in Mamba2 (four layers)" in PAGE
    ms = [f"{1e3 * row['generated']['1']:.2f}" for row in (llama, eight, mamba2, explicit)]
    assert f"{ms[0]} ms with 3 loops of 1-2-1 beside {ms[1]} ms of 8 explicit layers (Llama" in NOTES
    text = f"{ms[2]} beside {ms[3]} ms of 8 explicit layers (Mamba2), for {dearer:.1f} times the FLOPs"
    assert text in NOTES


def test_generation_before_and_after_all_loops_became_one_launch() -> None:
    path = ROOT / "benchmarks" / "results" / "equal_compute_inference.json"
    stored = json.loads(path.read_text(encoding="utf-8"))
    before, after = timed_rows(stored["before"]), timed_rows(stored)
    assert list(before) == list(after)
    assert stored["before"]["machine"]["gpu"] == stored["machine"]["gpu"] == "NVIDIA H200"
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
    assert f"has {min(scored):.2f} to {max(scored):.2f} times as many" in PAGE
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

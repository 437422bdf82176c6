from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from implicit_blocks._utils.own_packages import install_extra
from trainer.reporting import metrics
from trainer.reporting.display import PlainDisplay, RichDisplay, counted, duration, magnitude
from trainer.reporting.metrics import MetricsFile, json_value, read_metrics, rounded
from trainer.reporting.pictures import BLUE, GREY, ORANGE
from trainer.reporting.report import RunRecord, _draw_loss, draw, main, read_run, smoothed
from trainer.storage.run_folder import differences


def test_infinite_metrics_are_null(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.write({"step": 1, "loss": 1 / 3, "residual": math.inf, "rows": [math.nan, 2]})
    file.close()
    (row,) = read_metrics(file.path)
    assert row == {"step": 1, "loss": 1 / 3, "residual": None, "rows": [None, 2]}
    assert json_value({"a": (1.0, math.nan)}) == {"a": [1.0, None]}


def test_truncation_leaves_each_step_once(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        file.write({"step": step})
    with file.path.open("a") as raw:
        raw.write('{"step": 6, "los')
    file.truncate_after(3)
    file.write({"step": 4})
    file.close()
    assert [row["step"] for row in read_metrics(file.path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("end", ["", '{"step": 9, "los', "\n", '{"step": 9}', "nonsense\n"])
def test_the_last_row_is_found_without_reading_the_whole_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    assert file.last_row() is None
    file.truncate_after(3)  # nothing there
    file.write(*({"step": step, "text": "x" * 7000} for step in range(1, 9)))
    file.close()
    with file.path.open("a") as raw:
        raw.write(end)
    monkeypatch.setattr(metrics, "read_metrics", None)
    last = 9 if end.endswith("}") else 8
    assert (file.last_row() or {})["step"] == last
    file.truncate_after(9)
    assert (file.last_row() or {})["step"] == last
    file.truncate_after(5)
    file.write({"step": 6})
    file.close()
    assert [row["step"] for row in read_metrics(file.path)] == [1, 2, 3, 4, 5, 6]
    assert file.path.read_bytes().count(b"\n") == 6
    file.truncate_after(0)
    assert file.path.read_bytes() == b""
    assert file.last_row() is None


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 3}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2: not JSON"):
        list(read_metrics(path))


def test_differences_name_paths_and_both_values() -> None:
    old = {"a": 1, "b": {"c": [1, 2], "d": None}}
    new = {"a": 1, "b": {"c": [1, 3], "e": 4}}
    assert differences(old, new) == ["b.c: [1, 2] → [1, 3]", "b.d: None → not set", "b.e: not set → 4"]
    assert differences(old, old) == []


def test_numbers_are_formatted_for_reading() -> None:
    assert [duration(s) for s in (5, 65, 7265)] == ["5s", "1m05s", "2h01m"]
    assert [counted(n, "shard") for n in (0, 1, 2000)] == ["0 shards", "1 shard", "2,000 shards"]
    assert [magnitude(n) for n in (950, 12_345, 4.5e6, 2.07e11)] == ["950", "12.3k", "4.5M", "207.0B"]
    assert smoothed([1.0, 1.0, 1.0]) == [1.0, 1.0, 1.0]
    assert smoothed([0.0, 3.0, 6.0], share=0.7) == [1.5, 3.0, 4.5]


def step_row(step: int) -> dict[str, Any]:
    return {
        "step": step, "phase": "train", "loss": 1.0, "accuracy": 0.5, "gradient_norm": 1.0,
        "seconds": 2.0 * step, "learning_rate": 1e-3, "tokens_per_second": 1500.0, "step_seconds": 2.0,
        "iterations": 3.0, "iterations_max": 4, "residual": None, "non_converged": 0.25, "diverged": 0.5,
    }  # fmt: skip


def test_plain_lines_are_printed_every_n_steps(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(log_every=10, accuracy=True)
    display.start(step=0, total=25)
    for step in range(1, 26):
        display.step(step_row(step))
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("/")[0].strip() for line in lines] == ["1", "10", "20", "25"]
    assert lines[1].endswith("ETA 30s")
    assert "iter 3.0/4  res non-finite  unconverged 25%  diverged 50%" in lines[1]


@pytest.mark.parametrize(
    ("total", "scale", "expected"),
    [(586, 0.1, [1, *range(30, 586, 30), 586]), (586, 10.0, [1, *range(10, 586, 10), 586])],
    ids=["minutes", "hours"],
)
def test_plain_lines_are_a_screenful_or_one_a_minute(
    total: int, scale: float, expected: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    display = PlainDisplay(log_every=10, accuracy=True)
    display.start(step=0, total=total)
    for step in range(1, total + 1):
        display.step({**step_row(step), "seconds": scale * step})
    lines = capsys.readouterr().out.splitlines()
    assert [int(line.split("/")[0]) for line in lines] == expected


def test_plain_lines_name_an_activity_after_a_silence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr("trainer.reporting.display.time.monotonic", lambda: now)
    display = PlainDisplay(log_every=1, accuracy=True)
    display.doing("evaluating short")
    now += 30.0
    display.doing("evaluating long")
    display.doing("saving")
    assert capsys.readouterr().out == "evaluating long\n"


def test_divergence_is_shown_only_if_there_is_any(capsys: pytest.CaptureFixture[str]) -> None:
    display = PlainDisplay(log_every=1, accuracy=True)
    display.start(step=0, total=2)
    for step, diverged, open_ in ((1, 0.0, 0.25), (2, 0.5, 0.0)):
        display.step({**step_row(step), "diverged": diverged, "non_converged": open_})
    first, second = capsys.readouterr().out.splitlines()
    assert "unconverged 25%" in first
    assert "diverged" not in first
    assert "open" not in second
    assert "diverged 50%" in second


@pytest.mark.parametrize(("last", "scale"), [(1.9, "linear"), (0.1, "log")])
def test_losses_over_several_decades_have_a_logarithmic_axis(last: float, scale: str) -> None:
    from matplotlib.figure import Figure

    losses = [(1, 4.0), (2, 2.0), (3, last)]
    run = RunRecord(label="run", summary={"phases": []}, losses=losses)
    axes = Figure().subplots()
    _draw_loss(axes, [run])
    assert axes.get_yscale() == scale


_STAGED = [{"name": "bounded", "first_step": 0}, {"name": "free", "first_step": 2}]


@pytest.mark.parametrize(
    ("curricula", "names", "lines"),
    [
        ([_STAGED], ["bounded", "free"], [GREY]),
        ([_STAGED, _STAGED], ["bounded", "free"], [GREY]),
        ([[{"name": "train", "first_step": 0}], _STAGED], ["bounded", "free"], [ORANGE]),
        ([_STAGED, [*_STAGED[:1], {"name": "late", "first_step": 1}]], [], [BLUE, ORANGE]),
        ([[*_STAGED, {"name": "never", "first_step": 99}]], ["bounded", "free"], [GREY]),
        ([_STAGED, [*_STAGED[:1], {"name": "never", "first_step": 99}]], [], [BLUE]),
        ([[], []], [], []),
    ],
    ids=["one run", "the same phases", "one has phases", "different phases", "ended", "one ended", "none"],
)
def test_phases_of_single_runs_are_drawn_in_their_color(
    curricula: list[Any], names: list[str], lines: list[str]
) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    losses = [(1, 4.0), (2, 2.0), (3, 1.9)]
    _draw_loss(
        axes, [RunRecord(label=f"{n}", summary={"phases": p}, losses=losses) for n, p in enumerate(curricula)]
    )
    assert [text.get_text() for text in axes.texts] == names
    assert {text.get_color() for text in axes.texts} <= set(lines)
    assert [line.get_color() for line in axes.lines[2 * len(curricula) :]] == lines
    assert axes.get_xlim()[1] < 4  # the panel ends with the losses


def test_legends_are_below_the_panels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They cover no curve, and many runs do not shrink the panels."""
    figures: list[Any] = []
    monkeypatch.setattr("trainer.reporting.report.write_picture", lambda figure, path: figures.append(figure))
    runs = [fake_run(tmp_path / f"{n}", name=f"run {n}", implicit=True) for n in range(8)]
    heights = []
    for few in (runs[:1], runs):
        assert main([*map(str, few)]) == 0
        figure = figures[-1]
        figure.canvas.draw()
        for axes in figure.axes:
            if (legend := axes.get_legend()) is not None:
                assert legend.get_window_extent().y1 < axes.xaxis.label.get_window_extent().y0
        heights.append(figure.axes[0].get_window_extent().height)
    assert heights[1] == pytest.approx(heights[0], rel=0.1)


def test_the_live_display_shows_the_metrics(capsys: pytest.CaptureFixture[str]) -> None:
    display = RichDisplay(accuracy=True)
    display.start(step=0, total=4)
    display.log("a message [with] brackets")
    display.step(step_row(2))
    display.doing("evaluating")
    display.close()
    shown = capsys.readouterr().out
    assert "a message [with] brackets" in shown
    assert "2/4" in shown


def fake_run(folder: Path, *, name: str, implicit: bool, task: str = "word_problem") -> Path:
    folder.mkdir(parents=True)
    rows: list[dict[str, Any]] = []
    for p in (0.5, 0.0):
        for length in (32, 64):
            rows.append(
                {
                    "identity_probability": p, "length": length, "accuracy_last": 0.9, "perplexity": 12.0,
                    "non_converged": 0.5 if implicit else None, "iterations": 8.0 if implicit else None,
                    "iterations_by_position": [1.0 * i for i in range(length)] if implicit else None,
                }
            )  # fmt: skip
    summary = {
        "name": name, "task": task, "parameters": 10, "steps": 50, "last_tokens": 10, "chance": 1 / 6,
        "training_length": 32, "evaluation": rows,
        "phases": [{"name": "bounded", "first_step": 0, "last_step": 40}, {"name": "free", "first_step": 40}],
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    lines = [json.dumps({"step": step, "loss": 2.0 / step}) for step in range(1, 51)]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_runs_are_drawn_side_by_side(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        fake_run(tmp_path / "a", name="implicit", implicit=True),
        fake_run(tmp_path / "b", name="explicit", implicit=False),
    ]
    picture = tmp_path / "pictures" / "both.png"
    assert main([*map(str, runs), "--output", str(picture), "--label", "one", "--label", "two"]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    draw([read_run(runs[1])], tmp_path / "explicit.png")  # no iterations to show
    draw(
        [read_run(fake_run(tmp_path / "t", name="text", implicit=True, task="tokens"))], tmp_path / "text.png"
    )


def legends(monkeypatch: pytest.MonkeyPatch, arguments: list[str]) -> list[list[str]]:
    """Return the texts of the panels' legends that the command draws."""
    figures: list[Any] = []
    monkeypatch.setattr("trainer.reporting.report.write_picture", lambda figure, path: figures.append(figure))
    assert main(arguments) == 0
    found = [axes.get_legend() for axes in figures[0].axes]
    return [[text.get_text() for text in legend.get_texts()] for legend in found if legend is not None]


def test_runs_with_one_name_have_different_legends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs of one spec, in folders whose names may be equal too."""
    for names in (("one", "two"), ("a/run", "b/run")):
        runs = [fake_run(tmp_path / name, name="digits", implicit=True) for name in names]
        accuracy, iterations, loss = legends(monkeypatch, list(map(str, runs)))
        assert loss == list(names)
        assert len(set(accuracy)) == len(accuracy)
        assert len(set(iterations)) == len(iterations)
    third = fake_run(tmp_path / "c", name="one", implicit=True)
    runs = [tmp_path / "one", tmp_path / "two", third]
    assert len(set(legends(monkeypatch, list(map(str, runs)))[-1])) == 3


def test_a_run_given_twice_and_a_label_given_twice_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = fake_run(tmp_path / "run", name="run", implicit=True)
    assert main([str(run), f"{tmp_path}/./run", "--output", str(tmp_path / "a.png")]) == 2
    assert "is given 2 times; give each run once" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([str(run), str(run), "--label", "same", "--label", "same"])
    assert "--label values must be distinct" in capsys.readouterr().err


def test_every_run_has_its_own_color(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Any] = []
    monkeypatch.setattr("trainer.reporting.report.write_picture", lambda figure, path: figures.append(figure))
    runs = [fake_run(tmp_path / f"{n}", name="text", implicit=True, task="tokens") for n in range(8)]
    assert main(list(map(str, runs))) == 0
    for axes in figures[0].axes[0], figures[0].axes[2]:
        handles, _ = axes.get_legend_handles_labels()
        assert len({str(handle.get_color()) for handle in handles}) == len(handles) >= 8


def test_each_line_of_perplexities_is_of_one_kind_of_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each source of a mixture has a line; of sets per task only the set of all tasks is drawn."""
    summary = json.loads(
        (fake_run(tmp_path / "run", name="run", implicit=True, task="mixture") / "summary.json").read_text()
    )
    rows = [
        {"set": f"{name}_L{length}", "length": length, "perplexity": value, "iterations": None}
        for length in (32, 64)
        for name, value in (("web", 9.0), ("books", 3.0))
    ]
    (tmp_path / "run" / "summary.json").write_text(json.dumps({**summary, "evaluation": rows}))
    assert legends(monkeypatch, [str(tmp_path / "run")])[0] == ["run, web", "run, books"]
    rows = [{"set": "L32", "length": 32, "perplexity": 2.0, "iterations": None}]
    rows += [{**rows[0], "set": f"qa{task}_L32", "task": task} for task in (1, 2)]
    (tmp_path / "run" / "summary.json").write_text(json.dumps({**summary, "evaluation": rows}))
    assert legends(monkeypatch, [str(tmp_path / "run")])[0] == ["run"]


def test_an_unevaluated_training_length_has_no_mark(tmp_path: Path) -> None:
    record = read_run(fake_run(tmp_path / "run", name="run", implicit=True))
    longest = [row for row in record.summary["evaluation"] if row["length"] == 64]
    record.summary.update(training_length=8, evaluation=longest)
    draw([record], tmp_path / "report.png")  # without room for the panels, matplotlib would warn
    assert (tmp_path / "report.png").is_file()


def test_rounding_keeps_significant_digits() -> None:
    """Residuals of 1e-9 and learning rates of 1e-6 are not rounded to 0."""
    assert rounded(1.23456789e-9) == 1.23457e-9
    assert rounded(123456789.0) == 123457000.0
    assert rounded(-0.00012345, 2) == -0.00012


def test_an_unfinished_run_is_not_plotted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert "summary.json is missing" in capsys.readouterr().err
    assert main([str(tmp_path / "none")]) == 2
    assert f"there is no directory {tmp_path / 'none'}" in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = str(fake_run(tmp_path / "run", name="run", implicit=True))
    assert main([run, "--output", str(tmp_path / "report.xyz")]) == 2
    assert "xyz" in capsys.readouterr().err
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as where it is not installed
    assert main([run, "--output", str(tmp_path / "report.png")]) == 2
    assert install_extra("train") in capsys.readouterr().err


def test_the_eta_follows_the_pace_of_the_latest_steps() -> None:
    """The estimate ignores a slow first step and the speed of earlier phases."""
    from trainer.reporting.display import Pace

    pace, now = Pace(total=400), 100.0
    left = []
    for step in range(1, 301):
        seconds = 60.0 if step == 1 else 1.0 if step <= 200 else 5.0
        now += seconds
        left.append(pace.remaining({"step": step, "seconds": now, "step_seconds": seconds}))
    assert left[0] == pytest.approx(60.0 * 399)
    assert left[1] == pytest.approx(1.0 * 398)
    assert left[199] == pytest.approx(200.0)
    assert left[299] == pytest.approx(500.0)

"""The live view of runs: ``report --watch``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from trainer.reporting.report import main
from trainer.reporting.watch import WatchedRun, curve, find_runs, table_of


def write(folder: Path, steps: range, *, name: str = "metrics.jsonl", **more: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / name).open("a") as file:
        for step in steps:
            row = {
                "step": step, "phase": "free", "loss": 4.0 / step, "iterations": 5.0, "iterations_max": 9,
                "residual": 0.01, "non_converged": 0.25, "tokens_per_second": 1500.0, "seconds": 2.0 * step,
                "step_seconds": 2.0,
            }  # fmt: skip
            file.write(json.dumps({**row, **more}) + "\n")
    return folder


def spec(folder: Path, steps: int, base: str = "word_problem_s3") -> None:
    text = f"extends: {base}\nphases: []\ntraining: {{max_steps: {steps}, max_tokens: null}}\n"
    (folder / "spec.yaml").write_text(text)


def test_a_view_reads_only_what_was_written_since(tmp_path: Path) -> None:
    run = WatchedRun(write(tmp_path / "run", range(1, 11)), now=lambda: 0.0)
    spec(run.path, 40)
    run.refresh()
    assert run.row["step"] == 10
    assert run.state == "ETA 1m00s"
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "lo')
    run.refresh()
    assert len(run.losses) == 10
    with (run.path / "metrics.jsonl").open("a") as file:
        file.write('ss": null}\n')
    run.refresh()
    assert run.row["step"] == 11
    assert curve(run.losses).endswith("x")


def test_a_resumed_run_is_read_from_its_checkpoint_on(tmp_path: Path) -> None:
    run = WatchedRun(write(tmp_path / "run", range(1, 11)))
    run.refresh()
    (run.path / "metrics.jsonl").unlink()
    write(run.path, range(1, 4))
    run.refresh()
    assert run.row["step"] == len(run.losses) == 3


def test_a_run_without_new_rows_is_silent(tmp_path: Path) -> None:
    path = write(tmp_path / "run", range(1, 3))
    written = (path / "metrics.jsonl").stat().st_mtime
    run = WatchedRun(path, now=lambda: written + 90.0)
    assert run.state == "no steps yet"
    run.refresh()
    assert run.state == "silent 1m30s"
    (path / "summary.json").write_text("{}")
    assert run.state == "finished"


def test_the_view_shows_every_run_of_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, base in (("one", "catbabi"), ("two", "books_5m")):
        path = write(tmp_path / "sweep" / "runs" / name, range(1, 6))
        spec(path, 5, base)
        write(path, range(5, 6), name="evaluations.jsonl", perplexity=3.14159, accuracy_last=0.625)
        (path / "summary.json").write_text("{}")
    assert main([str(tmp_path / "sweep"), "--watch"]) == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines()] == ["run", "one", "two"]
    for cell in ("5/5", "0.8000", "5.0/9", "25%", "1.5k", "finished"):
        assert shown.count(cell) == 2, cell
    task, text = shown.splitlines()[1:]
    assert ("62.5%" in task, "ppl 3.14" in task) == (True, False)
    assert ("62.5%" in text, "ppl 3.14" in text) == (False, True)
    assert not (tmp_path / "report.png").exists()


def test_a_narrow_table_keeps_step_loss_and_state(tmp_path: Path) -> None:
    run = WatchedRun(write(tmp_path / "run", range(1, 6)))
    run.refresh()
    names = [
        [column.header for column in table_of([run], ["run"], width=width).columns] for width in (200, 70, 10)
    ]
    assert "phase" in names[0]
    assert "phase" not in names[1]
    assert "curve" in names[1]
    assert names[2] == ["run", "step", "loss", "state"]


def test_a_curve_has_one_block_per_share() -> None:
    assert curve([]) == ""
    assert curve([1.0, 1.0]) == "▁▁"
    assert curve([3.0, 2.0, 1.0, 0.0], width=2) == "█▁"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--watch", "--output", "a.png"], "--watch draws no plot"),
        (["--interval", "1"], "--interval is a positive number for --watch"),
        (["--watch", "--interval", "-1"], "got -1"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["runs", *words])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_runs_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path), "--watch"]) == 2
    assert f"{tmp_path} contains no run" in capsys.readouterr().err
    with pytest.raises(ValueError, match="there is no directory"):
        find_runs([tmp_path / "none"])

"""``benchmarks/word_problems.py``, which trains word problems in minutes on a GPU."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("word_problems")


def test_overrides_may_follow_options_with_several_values(program: Any) -> None:
    words = "--seeds 0 1 training.max_steps=3 --then mixed long data.group=S5 --minutes 2"
    options = program.options_of(words.split())
    assert (options.seeds, options.then, options.minutes) == ([0, 1], ["mixed", "long"], 2.0)
    assert options.overrides == ["training.max_steps=3", "data.group=S5"]


def test_later_recipes_continue_a_run(program: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each recipe starts from the weights of the previous one, for implicit and explicit models."""
    report = importlib.import_module("report")
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    small = (
        "--models implicit-mamba2 mamba2 --explicit-steps 2 --device cpu --output word_problem_rows --then "
        "word_problem_a5_mixed word_problem_a5_256 --groups S3 data.seq_len=4 phases=[] model.d_model=8 "
        "model.mixer.d_state=4 model.mixer.head_dim=8 model.mixer.chunk_size=4 "
        "model.at_evaluation.stopping.max_iterations=4 training.max_steps=2 training.batch_size=4 "
        "training.precision=float32 training.loader_threads=0 evaluation.lengths=[4] "
        "evaluation.identity_probabilities=[0.5] evaluation.sequences=2 evaluation.last_tokens=4"
    )
    monkeypatch.setattr("sys.argv", ["word_problems.py", "--runs", str(tmp_path / "runs"), *small.split()])
    assert program.main() == 0
    rows = json.loads((tmp_path / "results" / "word_problem_rows.json").read_text())["rows"]
    recipes = ["word_problem_a5", "word_problem_a5_mixed", "word_problem_a5_256"]
    assert [(row["model"], row["recipe"], row["steps"]) for row in rows] == [
        *(("implicit-mamba2", recipe, 2) for recipe in recipes),
        *(("mamba2", recipe, 4) for recipe in recipes),
    ]
    assert all(row["tests"][0]["length"] == 4 for row in rows)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--then word_problem_a5_mxed", "no spec 'word_problem_a5_mxed' in the zoo"),
        ("--groups A5 X9", "group 'X9'"),
        ("--models implicit-mamba2 mamba", "unknown model 'mamba'"),
        ("--models mamba2 --learning-rates 1e-3 -1", "should be greater than 0; got -1.0"),
        ("--then word_problem_a5_mixed data.group=S5", "unknown key 'group'"),
        ("--seeds 0 1 0", "--seeds contains 0 2 times; give each value once"),
        ("--learning-rates 1e-3 0.001", "--learning-rates contains 0.001 2 times"),
        ("--then word_problem_a5", "--spec with --then contains word_problem_a5 2 times"),
    ],
)
def test_all_arguments_are_checked_before_training(
    program: Any,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    words: str,
    message: str,
) -> None:
    """An error in a later recipe is reported before the earlier ones train."""
    monkeypatch.setattr("sys.argv", ["word_problems.py", "--runs", str(tmp_path / "runs"), *words.split()])
    assert program.main() == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words", ["--minutes 0", "--explicit-steps -1", "--precisely 0", "--minutes nan", "--layers 2 0"]
)
def test_invalid_numbers_are_rejected(program: Any, capsys: pytest.CaptureFixture[str], words: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        program.options_of(words.split())
    assert re.search(r"must be (positive|at least 1), got", capsys.readouterr().err)

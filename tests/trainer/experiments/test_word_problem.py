"""``python -m trainer.experiments word-problem``: both studies, tiny, and in the laptop setting (slow)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("matplotlib", reason="the plot needs the extra 'train'")

from trainer.cli.train import main as train
from trainer.data.word_problem import WordProblem, WordProblemStream
from trainer.experiments.cli import main
from trainer.experiments.word_problem.hard_tokens import _by_iterations
from trainer.experiments.word_problem.measure import (
    _by_hard_tokens,
    _by_hard_tokens_near,
    _hard,
    _wrong_steps,
)

TINY = """
model:
  kind: implicit_lm
  d_model: 16
  n_layers: 1
  mixer: {kind: mamba2, d_state: 4, head_dim: 8}
  gradient: {kind: phantom, steps: 1}
  stopping: {tolerance: 0.05, max_iterations: 8}
  at_evaluation: {solver: {kind: picard, damping: 0.8}, stopping: {tolerance: 1.0e-2, max_iterations: 30}}
data: {kind: word_problem, group: Z2, seq_len: 8}
training:
  max_steps: 3
  batch_size: 8
  threads: 1
  optimizer: {kind: adamw, learning_rate: 1.0e-3}
phases:
  - {name: short, until: 1, data: {seq_len: 2, identity_probability: 0.0}}
  - {name: long}
evaluation: {last_tokens: 2}
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("specs") / "tiny.yaml"
    path.write_text(TINY, encoding="utf-8")
    return str(path)


def read(folder: Path) -> Any:
    assert (folder / "word_problem.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((folder / "word_problem.json").read_text(encoding="utf-8"))


def test_the_layers_study_resumes(tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "out"
    common = ["word-problem", "--spec", tiny, "--groups", "Z2", "--layers", "2", "1", "--sequences", "4"]
    common += ["--device", "cpu", "--output", str(folder)]
    asked = ["--models", "implicit-mamba2", "mamba2", "--lengths", "4", "2", "--threshold", "1e-9"]
    assert main([*common, *asked]) == 0
    written = read(folder)
    assert written["chance"] == {"Z2": 0.5}
    assert [(row["model"], row["length"], row["least_layers"]) for row in written["least_layers"]] == [
        ("implicit-mamba2", 2, 1),
        ("implicit-mamba2", 4, 1),
        ("mamba2", 2, 1),
        ("mamba2", 4, 1),
    ]
    implicit, *_, explicit = written["runs"]
    assert [(test["length"], test["identity_probability"]) for test in implicit["tests"]] == [
        (2, 0.0), (8, 0.0), (2, 0.5), (8, 0.5)
    ]  # fmt: skip
    assert all(test["residual"] > 0 and 0 <= test["non_converged"] <= 1 for test in implicit["tests"])
    assert all(test["residual"] is None for test in explicit["tests"])
    assert "layers needed for 0%" in capsys.readouterr().out

    metrics = folder / "runs/Z2-mamba2-1-L2-seed0/metrics.jsonl"
    before = metrics.stat().st_mtime_ns
    # One layer no longer suffices: two are trained, and the model with one is not trained again.
    assert main([*common, "--threshold", "1", "--models", "mamba2", "--lengths", "2", "4"]) == 0
    assert metrics.stat().st_mtime_ns == before
    again = read(folder)
    assert [row["layers"] for row in again["runs"]] == [1, 2]
    assert [(row["length"], row["least_layers"]) for row in again["least_layers"]] == [(2, None)]


def test_rare_hard_tokens_in_both_modes(tiny: str, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    options = ["--study", "hard-tokens", "--spec", tiny, "--groups", "Z2", "--lengths", "6"]
    options += ["--iterations", "2", "1", "--sequences", "3", "--test-p", "0.5", "--test-lengths", "1", "2"]
    options += ["--device", "cpu", "--set", "training.max_steps=2", "training.threads=1"]
    options += ["--set", "model.dropout=0", "model.at_evaluation.stopping.max_iterations=24"]
    assert main(["word-problem", *options, "--output", str(folder)]) == 0
    written = read(folder)
    rows = written["tests"]
    changes = ["training.max_steps=2", "training.threads=1", "model.dropout=0"]
    assert written["settings"]["overrides"][-4:-1] == changes
    assert [(r["training_iterations"], r["length"], r["mode"]) for r in rows] == [
        (n, length, mode) for n in (1, 2) for length in (6, 12) for mode in ("simultaneous", "sequential")
    ]
    for row in rows:
        assert row["training_p"] == 0.9
        assert row["steps"] == 2
        assert len(row["iterations_by_position"]) == row["length"]
        counted = row["iterations_by_hard_tokens"]
        assert sum(one["tokens"] for one in counted) == 3 * row["length"]
        near = row["wrong_steps_by_hard_tokens_near"]
        assert sum(one["tokens"] for one in near) == round(3 * row["hard_tokens"])
        assert 0 <= row["converged"] <= 1
        assert row["residual_max"] >= row["residual"] > 0
    together = rows[0]["iterations_by_position"]
    assert together == sorted(together)  # a token never stops before those ahead of it


def test_trained_runs_are_tested_without_training(tiny: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = ["training.max_steps=2", "evaluation.sequences=2"]
    assert train(["--spec", tiny, *changes, "--device", "cpu", "--output", str(run)]) == 0
    options = ["--study", "hard-tokens", "--checkpoints", str(run), "--sequences", "3", "--test-p", "0.25"]
    options += ["--test-lengths", "2", "--device", "cpu", "--output", str(tmp_path / "out")]
    options += ["--set", "model.at_evaluation.window_length=4", "evaluation.seed=7"]
    assert main(["word-problem", *options, "--token-iterations", "2"]) == 0
    rows = read(tmp_path / "out")["tests"]
    assert [(r["mode"], r["length"], r["sequences"], r["identity_probability"]) for r in rows] == [
        ("simultaneous", 16, 3, 0.25),
        ("sequential", 16, 3, 0.25),
    ]
    assert rows[0]["steps"] == 2
    together = rows[0]["iterations_by_position"]
    assert together == sorted(together)  # all tokens at once, whatever windows the model has of its own
    assert rows[0]["iterations_max"] > 3 >= rows[1]["iterations_max"]  # and the call that gives the output
    assert not (tmp_path / "out/runs").exists()


def test_a_checkpoint_of_another_task_is_refused(
    tiny: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(200))
    text = ["data={kind: tokens, path: tokens.bin, validation_path: tokens.bin, dtype: uint16, seq_len: 8}"]
    changes = ["training.max_steps=1", "model.vocab_size=2", "phases=[]"]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        assert train(["--spec", tiny, *text, *changes, "--device", "cpu", "--output", "text"]) == 0
    options = ["--study", "hard-tokens", "--checkpoints", str(tmp_path / "text"), "--device", "cpu"]
    assert main(["word-problem", *options, "--output", str(tmp_path / "out")]) == 2
    assert "is a run on data of kind 'tokens'; use one that was trained on a word_problem" in (
        capsys.readouterr().err
    )
    z4 = tmp_path / "z4"
    changes = ["training.max_steps=2", "evaluation.sequences=2", "data.group=Z4", "--device", "cpu"]
    assert train(["--spec", tiny, *changes, "--output", str(z4)]) == 0
    capsys.readouterr()
    changes = [f"training.init_from={z4}", "data.group=Z2xZ2", "--device", "cpu"]
    assert train(["--spec", tiny, *changes, "--output", str(tmp_path / "other")]) == 2
    assert "was trained for another task, products in Z4; this run's is products in Z2xZ2" in (
        capsys.readouterr().err
    )


def test_hard_tokens_are_those_that_change_the_state() -> None:
    problem = WordProblem(group="S3", monoid="EABX", identity_probability=0.9)
    source = WordProblemStream(problem, length=4, seed=0)
    tokens = torch.tensor([[0, 3, 4, 23]])  # the identity with E and X, then two other elements
    assert _hard(source, tokens).tolist() == [[False, False, True, True]]


def test_right_answers_have_no_wrong_steps_where_the_order_of_factors_counts() -> None:
    problem = WordProblem(group="S3", monoid="EABX", identity_probability=0.1)
    batch = WordProblemStream(problem, length=20, seed=0).batch(0, 4)
    source = WordProblemStream(problem, length=20, seed=0)
    assert not _wrong_steps(source, batch.inputs, batch.labels).any()


def test_a_plotted_point_is_the_mean_over_seeds() -> None:
    rows = [{"training_iterations": n, "accuracy_last": y} for n, y in ((8, 0.5), (2, 0.1), (8, 1.0))]
    assert _by_iterations(rows, "accuracy_last") == ([2, 8], [0.1, 0.75])


def test_a_step_is_wrong_by_itself_not_by_those_before_it() -> None:
    problem = WordProblem(group="Z5", monoid="EABX", identity_probability=0.9)
    source = WordProblemStream(problem, length=6, seed=0)
    message = torch.tensor([[1, 3, 3, 0, 0, 7], [1, 1, 1, 1, 1, 1]])  # 7 stands for no element of Z5
    tokens = torch.tensor([[1, 2, 1, 1, 0, 2], [1, 0, 0, 0, 0, 4]])
    wrong = _wrong_steps(source, 4 * tokens + 2, 4 * message + 1)
    assert wrong.tolist() == [[False, False, True, True, False, True], [False] * 5 + [True]]
    right = source.batch(0, 20)
    assert not _wrong_steps(source, right.inputs, right.labels).any()
    hard = _hard(source, 4 * tokens + 2)
    assert _by_hard_tokens_near(wrong, hard) == [
        {"hard_tokens": 1, "tokens": 3, "wrong": round(1 / 3, 7)},
        {"hard_tokens": 2, "tokens": 1, "wrong": 0.0},
        {"hard_tokens": 3, "tokens": 2, "wrong": 1.0},
        {"hard_tokens": 4, "tokens": 1, "wrong": 1.0},
    ]
    assert _by_hard_tokens(wrong, hard) == [  # the first, the second and third, and so on, of each sequence
        {"hard_tokens": 1, "tokens": 2, "wrong": 0.0},
        {"hard_tokens": 2, "tokens": 3, "wrong": round(2 / 3, 7)},
        {"hard_tokens": 4, "tokens": 2, "wrong": 1.0},
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--groups", "Q8"], "group 'Q8' is not known"),
        (["--test-p", "2"], "p must be from 0 to 1, got 2"),
        (["--lengths", "0"], "lengths must be at least 1, got 0"),
        (["--spec", "llama_130m"], "use one on a word_problem"),
        (["--checkpoints", "runs/one"], "--checkpoints requires --study hard-tokens"),
        (["--study", "hard-tokens", "--checkpoints", "none"], "is neither a run nor a checkpoint of one"),
        (["--study", "hard-tokens", "--device", "nonsense"], "device 'nonsense' is not a device's name"),
        # Overrides are checked for every model before any model is trained.
        (["--models", "mamba2", "llama", "--set", "model.mixer.d_state=4"], "unknown key 'd_state'"),
        (["--models", "implicit-mamba2", "transformers:mambo2"], "did you mean 'mamba2'?"),
        (["--set", "data.group=S5"], "--set data.group=S5 conflicts with --groups"),
        (["--study", "hard-tokens", "--set", "training.seed=1"], "training.seed=1 conflicts with --seeds"),
        (["--iterations", "4"], "--iterations has no effect in the study layers"),
        (["--study", "hard-tokens", "--models", "llama"], "--models has no effect in the study hard"),
        (
            ["--study", "hard-tokens", "--checkpoints", "runs/one", "--groups", "S5", "--test-p", "0"],
            "--groups has no effect on existing runs;",
        ),
    ],
)
def test_invalid_requests_are_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert main(["word-problem", *options, "--output", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_the_layers_study_on_a_laptop(tmp_path: Path) -> None:
    assert main(["word-problem", "--device", "cpu", "--output", str(tmp_path / "out")]) == 0
    written = read(tmp_path / "out")
    implicit = [row for row in written["runs"] if row["model"] == "implicit-mamba2"]
    assert [row["least_layers"] for row in written["least_layers"] if row["model"] == "implicit-mamba2"] == [
        1
    ] * 3
    for row in implicit:
        at_length = [test for test in row["tests"] if test["length"] == row["length"]]
        assert all(test["accuracy_last"] > 0.97 and test["non_converged"] < 0.05 for test in at_length)
    least = {
        row["length"]: row["least_layers"] for row in written["least_layers"] if row["model"] == "mamba2"
    }
    assert None in least.values() or least[16] > 1


@pytest.mark.slow
def test_the_hard_tokens_study_on_a_laptop(tmp_path: Path) -> None:
    options = ["--study", "hard-tokens", "--device", "cpu", "--output", str(tmp_path / "out")]
    assert main(["word-problem", *options]) == 0
    rows = read(tmp_path / "out")["tests"]
    found = {(row["training_iterations"], row["identity_probability"], row["mode"]): row for row in rows}
    assert len(found) == len(rows) == 2 * 2 * 2
    for p in (0.9, 0.5):
        together, in_turn = (found[16, p, mode] for mode in ("simultaneous", "sequential"))
        assert abs(together["accuracy"] - in_turn["accuracy"]) < 0.03
        assert together["iterations"] >= in_turn["iterations_of_hard_tokens"]
    for mode in ("simultaneous", "sequential"):
        assert found[16, 0.9, mode]["accuracy_last"] > 0.9
        assert found[16, 0.9, mode]["converged"] > 0.9

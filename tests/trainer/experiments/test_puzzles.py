"""The puzzles experiment: solved share against iterations and starts, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from implicit_blocks.registry import build
from trainer.cli.train import main as train
from trainer.data.puzzles.maze import solve
from trainer.experiments.cli import main
from trainer.experiments.puzzles.animation import final_answer
from trainer.experiments.puzzles.experiment import chosen_share, symmetric_variant
from trainer.specs.generated import MazeSpec

SMALL = ["model.d_model=16", "model.mixer.n_heads=2", "model.mlp.d_ff=24", "data.boards=8", "data.held_out=8"]


@pytest.fixture(scope="module")
def solver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the run of a model trained for two steps on boards of order 4."""
    folder = tmp_path_factory.mktemp("run") / "run"
    changes = ["data.order=4", "training.max_steps=2", "training.batch_size=4", "evaluation.sequences=2"]
    assert train(["--spec", "sudoku_6x6", *SMALL, *changes, "--device", "cpu", "--output", str(folder)]) == 0
    return folder


def test_numbers_picture_and_animation_are_written(solver, tmp_path, capsys):
    options = ["--iterations", "2", "5", "--restarts", "3", "--boards", "6", "--device", "cpu"]
    assert main(["puzzles", "--checkpoint", str(solver), *options, "--output", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "puzzles.json").read_text())
    assert [row["max_iterations"] for row in written["rows"]] == [2, 5]
    for row in written["rows"]:
        assert set(row["solved"]) == set(row["solved_by_residual"]) == {"1", "2", "3"}
        assert max(row["solved"].values()) <= row["solved_by_any"] <= 1
        assert row["mean_iterations"] <= row["max_iterations"]
    assert (tmp_path / "puzzles.png").stat().st_size > 1000
    assert (tmp_path / "puzzle.gif").read_bytes().startswith(b"GIF8")
    assert "of 3" in capsys.readouterr().out


def test_symmetric_variants_of_a_maze_have_the_solutions_of_their_labels():
    for tokens in ("cells", "values"):
        spec = MazeSpec(side=5, boards=4, held_out=1, tokens=tokens)
        batch = build(spec).batch(0, 4)
        variants = [symmetric_variant(batch, spec, number) for number in range(8)]
        assert len({tuple(variant.inputs[0].tolist()) for variant in variants}) == 8
        assert torch.equal(variants[0].inputs, batch.inputs)
        for variant in variants:
            for squares, solved in zip((variant.inputs % 5).tolist(), variant.labels.tolist(), strict=True):
                assert list(solve(squares).solution) == solved


def test_mazes_of_another_size_are_solved_in_symmetric_variants(tmp_path):
    small = ["model.d_model=8", "phases=[]", "data.side=4", "data.shortest_path=0", "data.held_out=2"]
    steps = ["model.depth.high=57", "training.max_steps=1", "training.batch_size=2", "evaluation.sequences=2"]
    run, folder = tmp_path / "run", tmp_path / "out"
    assert train(["--spec", "maze_30x30", *small, *steps, "--device", "cpu", "--output", str(run)]) == 0
    command = ["puzzles", "--checkpoint", str(run), "--iterations", "3", "--boards", "2", "--device", "cpu"]
    larger = ["--symmetries", "--set", "data.side=6", "data.seq_len=36"]
    assert main([*command, *larger, "--restarts", "8", "--output", str(folder)]) == 0
    written = json.loads((folder / "puzzles.json").read_text())
    assert written["settings"]["data"]["side"] == 6
    assert set(written["rows"][0]["solved"]) == {"1", "2", "4", "8"}


def test_the_answer_of_the_lowest_measure_is_chosen():
    solved = torch.tensor([[True, False, True], [False, True, False]])
    residual = torch.tensor([[0.5, 0.5, 0.1], [0.1, 0.1, torch.nan]])
    assert chosen_share(solved, residual) == pytest.approx(2 / 3)  # boards 2 and 3


def test_the_animation_ends_when_the_answer_no_longer_changes():
    answers = torch.tensor(
        [[0, 1], [1, 1], [0, 1], [1, 0], [1, 0], [1, 0]]
    )  # of two cells, in six iterations
    assert final_answer(list(torch.nn.functional.one_hot(answers).float())) == 4
    assert final_answer([torch.eye(2)]) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--noise", "0"], "noise"),
        (["--restarts", "0"], "restarts"),
        (["--iterations", "0"], "iterations"),
        (["--symmetries"], "only mazes have symmetric variants"),
    ],
)
def test_invalid_settings_are_refused(solver, tmp_path, capsys, options, message):
    folder = tmp_path / "out"
    assert main(["puzzles", "--checkpoint", str(solver), *options, "--output", str(folder)]) == 2
    assert message in capsys.readouterr().err
    assert not folder.exists()

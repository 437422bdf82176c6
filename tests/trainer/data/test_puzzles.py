"""Sudoku and mazes: unique solutions, symmetric variants, files, and faulty boards."""

from __future__ import annotations

import random
from itertools import product
from pathlib import Path

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.specs import SpecError
from trainer.data.puzzles import maze, sudoku
from trainer.data.puzzles.sudoku import BoardError
from trainer.errors import DataError
from trainer.specs.generated import MazeSpec, SudokuSpec
from trainer.specs.run import EvaluationSpec

FOUR = "1...  ..3.  .4..  ...2".replace(" ", "")
FOUR_SOLVED = "1324 4231 2413 3142".replace(" ", "")


def digits(text: str) -> list[int]:
    return [0 if symbol == "." else int(symbol) for symbol in text.replace(" ", "")]


def solutions_by_trial(board: list[int]) -> list[tuple[int, ...]]:
    """All solutions of a board of order 4, by trying every arrangement of rows."""
    rows = [row for row in product(range(1, 5), repeat=4) if len(set(row)) == 4]
    fitting = [
        [row for row in rows if all(g in (0, v) for g, v in zip(board[4 * r : 4 * r + 4], row, strict=True))]
        for r in range(4)
    ]
    found = []
    for grid in product(*fitting):
        columns = all(len({row[c] for row in grid}) == 4 for c in range(4))
        boxes = all(
            len({grid[r + i][c + j] for i in range(2) for j in range(2)}) == 4 for r in (0, 2) for c in (0, 2)
        )
        if columns and boxes:
            found.append(tuple(v for row in grid for v in row))
    return found


def test_boards_of_order_4_have_the_single_solution_that_trial_finds():
    rng = random.Random(0)
    for _ in range(10):
        puzzle = sudoku.random_puzzle(4, rng)
        assert solutions_by_trial(list(puzzle.givens)) == [puzzle.solution]


@pytest.mark.parametrize("order", [4, 6, 9])
def test_every_given_digit_of_a_generated_board_is_needed(order):
    puzzle = sudoku.random_puzzle(order, random.Random(1))
    assert all(g in (0, v) for g, v in zip(puzzle.givens, puzzle.solution, strict=True))
    for cell in [cell for cell, value in enumerate(puzzle.givens) if value][:5]:
        fewer = list(puzzle.givens)
        fewer[cell] = 0
        with pytest.raises(BoardError, match="several solutions"):
            sudoku.solve(fewer)


def test_digits_given_are_kept_on_request():
    puzzle = sudoku.random_puzzle(6, random.Random(2), givens=20)
    assert sum(value > 0 for value in puzzle.givens) == 20


@pytest.mark.parametrize("order", [6, 9])
def test_variants_of_a_board_are_boards_with_one_solution(order):
    batch = ib.build(SudokuSpec(order=order, boards=2, held_out=1)).batch(0, 12)
    given = batch.inputs - torch.arange(order * order) * (order + 1)
    assert len({tuple(board) for board in given.tolist()}) == 12
    for board, solved in zip(given.tolist(), batch.labels.tolist(), strict=True):
        assert list(sudoku.solve(board).solution) == solved


@pytest.mark.parametrize("side", [8, 9])
def test_variants_of_a_maze_have_one_shortest_path(side):
    batch = ib.build(MazeSpec(side=side, boards=3, held_out=1, shortest_path=8)).batch(0, 20)
    given = batch.inputs - torch.arange(side * side) * 5
    for squares, solved in zip(given.tolist(), batch.labels.tolist(), strict=True):
        puzzle = maze.solve(squares)
        assert list(puzzle.solution) == solved
        assert puzzle.guesses == solved.count(maze.PATH) + 1 >= 8


@pytest.mark.parametrize("spec", [MazeSpec(side=6, boards=3, held_out=1), SudokuSpec(order=4, boards=3)])
def test_tokens_of_values_are_the_contents_of_the_same_boards(spec):
    named = spec.model_copy(update={"tokens": "values"})
    with_cells, contents = (ib.build(each).batch(0, 8) for each in (spec, named))
    assert (named.vocab_size, spec.vocab_size) == (5, 5 * spec.cells)
    assert torch.equal(contents.inputs, with_cells.inputs - 5 * torch.arange(spec.cells))
    assert torch.equal(contents.labels, with_cells.labels)


def test_mazes_of_any_side_are_one_task_only_if_tokens_do_not_name_the_cells():
    assert MazeSpec(side=6, tokens="values").task == MazeSpec(side=8, tokens="values").task
    assert MazeSpec(side=6).task != MazeSpec(side=8).task


def test_training_and_evaluation_have_different_boards():
    source = ib.build(SudokuSpec(order=4, boards=64, held_out=32))
    (held_out,) = source.evaluation_sets(EvaluationSpec(sequences=64)).values()
    assert held_out.length == 16
    assert not torch.equal(next(held_out.batches(64)).inputs, source.batch(0, 64).inputs)
    with pytest.raises(ValueError, match=r"lengths.*\[32\].*16"):
        source.evaluation_sets(EvaluationSpec(lengths=(32,)))


def test_difficult_boards_take_guesses():
    batch = ib.build(SudokuSpec(order=9, boards=2, held_out=1, guesses=2)).batch(0, 1)
    given = (batch.inputs - torch.arange(81) * 10)[0].tolist()
    assert sudoku.solve(given).guesses >= 1  # a symmetric variant may take other guesses
    with pytest.raises(ValueError, match="guesses"):
        ib.build(SudokuSpec(order=6, boards=1, held_out=1, guesses=30))


@pytest.mark.parametrize(
    ("board", "message"),
    [
        ("123", "3"),
        ("5..." + 12 * ".", "row 1, column 1 is 5"),
        ("11.." + 12 * ".", "row 1, column 1 and row 1, column 2 are both 1"),
        ("123...4.........", "no solution"),
        (16 * ".", "several"),
    ],
)
def test_faulty_boards_are_refused_with_their_place(board, message):
    with pytest.raises(BoardError, match=message):
        sudoku.solve(digits(board))


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["S  ", " G"], "5 squares"),
        (["S ", "  "], "0 squares of the goal"),
        (["S#", "#G"], "no path"),
        (["S ", " G"], "2 shortest"),
    ],
)
def test_faulty_mazes_are_refused(rows, message):
    with pytest.raises(BoardError, match=message):
        maze.solve([maze.SYMBOLS.index(symbol) for symbol in "".join(rows)])


def written(path: Path, *rows: str) -> str:
    path.write_text("\n".join(["source,question,answer,rating", *rows]) + "\n")
    return str(path)


def test_boards_are_read_from_files_in_the_published_form(tmp_path):
    row = f"x,{FOUR},{FOUR_SOLVED},1"
    path, other = written(tmp_path / "train.csv", row), written(tmp_path / "test.csv", row)
    source = ib.build(SudokuSpec(order=4, path=path, validation_path=other))
    board = (source.batch(0, 1).inputs - torch.arange(16) * 5)[0].tolist()
    assert sum(value > 0 for value in board) == 4
    mazes = tmp_path / "mazes.csv"
    mazes.write_text("question,answer\nS######G" + "#" * 8 + ",\n")
    with pytest.raises(DataError, match=r"mazes.csv, line 2: no path"):
        ib.build(MazeSpec(side=4, path=str(mazes), validation_path=str(mazes)))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (f"x,{FOUR[:-1]}x,,", r"line 2, column 'question', cell 16: unknown symbol 'x'"),
        (f"x,{FOUR[:-1]},,", r"line 2, column 'question': the board has 15 cells, not 16"),
        (f"x,{FOUR},{FOUR_SOLVED[1:]},", r"line 2, column 'answer': the board has 15 cells, not 16"),
        ("x", r"line 2, column 'question': the board has 0 cells"),
        (f"x,{FOUR[:-1]}5,,", r"line 2: row 4, column 4 is 5; use 1 to 4"),
        ("x,123.4......4....,,", r"line 2: the board has no solution; correct its digits"),
        (f"x,{'.' * 16},,", r"line 2: .*several solutions"),
        (f"x,{FOUR},{FOUR_SOLVED[::-1]},", r"line 2, column 'answer': it differs .* at cell 1; correct"),
    ],
)
def test_faulty_files_are_refused_with_line_and_cell(tmp_path, row, message):
    path = written(tmp_path / "boards.csv", row)
    with pytest.raises(DataError, match=message):
        ib.build(SudokuSpec(order=4, path=path, validation_path=path))


def test_a_dry_run_reads_the_files(tmp_path):
    path = written(tmp_path / "boards.csv", f"x,{FOUR},,", f"x,{FOUR[:-1]}x,,")
    one, two = (SudokuSpec(order=4, path=path, validation_path=path, boards=n, held_out=1) for n in (1, 2))
    assert "1 boards of" in one.describe(sequences=1, vocab_size=None)[0]
    with pytest.raises(DataError, match="line 3, column 'question', cell 16"):
        two.describe(sequences=1, vocab_size=None)


@pytest.mark.parametrize("content", [b"", b"a,b\n1,2\n", b"question\n", b"\xff\xfe\x00"])
def test_files_without_boards_are_refused(tmp_path, content):
    path = tmp_path / "boards.csv"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"boards\.csv"):
        ib.build(SudokuSpec(order=4, path=str(path), validation_path=str(path)))


def test_missing_files_are_refused(tmp_path):
    path = str(tmp_path / "none.csv")
    with pytest.raises(DataError, match=r"none\.csv cannot be read"):
        ib.build(SudokuSpec(order=4, path=path, validation_path=path))


@pytest.mark.parametrize(
    ("spec", "values", "place"),
    [
        (SudokuSpec, {"order": 9, "seq_len": 80}, "seq_len"),
        (SudokuSpec, {"order": 6, "givens": 37}, "givens"),
        (SudokuSpec, {"order": 4, "guesses": 1}, "guesses"),
        (SudokuSpec, {"path": "boards.csv"}, "validation_path"),
        (MazeSpec, {"side": 6, "shortest_path": 19}, "shortest_path"),
    ],
)
def test_settings_that_no_board_fits_are_refused(spec, values, place):
    with pytest.raises(SpecError, match=place):
        spec.model_validate(values)

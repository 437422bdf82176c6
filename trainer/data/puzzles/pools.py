"""Puzzles as training data: pools of boards, generated or read, and their symmetric variants as sequences.

Token ``values·cell + value`` of a cell says what it contains, or token ``value``, where the mixer knows the
cells; the label is the value of the solved board.
Every draw takes a board of the pool and a random symmetry, so that a pool of thousands gives millions of
boards. Training and evaluation have pools of their own.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.describing import check_vocabulary
from trainer.data.generated import BLOCK, Draws, GeneratedData, Integers, Task
from trainer.data.puzzles import maze, sudoku
from trainer.data.puzzles.files import read_files
from trainer.data.puzzles.sudoku import Puzzle

if TYPE_CHECKING:
    from trainer.specs.generated import MazeSpec, SudokuSpec


class PuzzleTask(Task):
    """Boards of two pools, for training and for evaluation.

    Args:
        training: boards to train on.
        held_out: boards to evaluate on.
        values: number of values of a cell.
        cell_tokens: whether a token names the cell too, and not only its value.
        vary: draws symmetries: given draws and the boards (B, cells) before and after solving, returns their
            variants.

    """

    def __init__(
        self,
        training: Sequence[Puzzle],
        held_out: Sequence[Puzzle],
        *,
        values: int,
        cell_tokens: bool,
        vary: Callable[[Draws, Integers, Integers], tuple[Integers, Integers]],
    ) -> None:
        self._pools = [
            (np.array([p.givens for p in pool]), np.array([p.solution for p in pool]))
            for pool in (training, held_out)
        ]
        cells = self._pools[0][0].shape[1]
        self._vary = vary
        self._first_tokens = values * np.arange(cells) if cell_tokens else np.zeros(cells, np.int64)
        self.vocab_size = values * cells if cell_tokens else values

    def draw(self, draws: Draws, length: int, *, evaluation: bool) -> tuple[Integers, Integers]:
        """See `Task.draw`."""
        givens, solutions = self._pools[evaluation]
        chosen = draws.integers(len(givens), BLOCK)
        varied, solved = self._vary(draws, givens[chosen], solutions[chosen])
        return varied + self._first_tokens, solved


def build_sudoku(spec: SudokuSpec, *, seed: int = 0, vocab_size: int | None = None) -> GeneratedData:
    """Build the training stream of Sudoku boards.

    Raises:
        ValueError: no board of the requested difficulty, a file that cannot be read, or a vocabulary that is
            too small.

    """
    order = spec.order

    def vary(draws: Draws, givens: Integers, solutions: Integers) -> tuple[Integers, Integers]:
        words = draws.words(BLOCK * sudoku.words_per_symmetry(order))
        cells, digits = sudoku.symmetries(order, BLOCK, words)
        return (
            np.take_along_axis(digits, np.take_along_axis(givens, cells, axis=1), axis=1),
            np.take_along_axis(digits, np.take_along_axis(solutions, cells, axis=1), axis=1),
        )

    if spec.path is None:
        pools = [_sudokus(order, count, spec.givens, spec.guesses, kind) for kind, count in spec.pools]
    else:
        pools = [[board.puzzle(sudoku.solve) for board in file] for file in read_files(spec)]
    task = PuzzleTask(*pools, values=spec.values, cell_tokens=spec.tokens == "cells", vary=vary)
    check_vocabulary(task.vocab_size, vocab_size, what="the boards")
    return GeneratedData(task, length=spec.seq_len, seed=seed, fixed_length=True)


def build_maze(spec: MazeSpec, *, seed: int = 0, vocab_size: int | None = None) -> GeneratedData:
    """Build the training stream of mazes.

    Raises:
        ValueError: no maze with so long a path, a file that cannot be read, or a vocabulary that is too
            small.

    """
    symmetries = np.array([maze.symmetry(spec.side, number) for number in range(8)])

    def vary(draws: Draws, givens: Integers, solutions: Integers) -> tuple[Integers, Integers]:
        cells = symmetries[draws.integers(8, BLOCK)]
        return np.take_along_axis(givens, cells, axis=1), np.take_along_axis(solutions, cells, axis=1)

    if spec.path is None:
        pools = [
            _mazes(spec.side, count, spec.openings, spec.shortest_path, kind) for kind, count in spec.pools
        ]
    else:
        pools = [[board.puzzle(maze.solve) for board in file] for file in read_files(spec)]
    task = PuzzleTask(*pools, values=spec.values, cell_tokens=spec.tokens == "cells", vary=vary)
    check_vocabulary(task.vocab_size, vocab_size, what="the mazes")
    return GeneratedData(task, length=spec.seq_len, seed=seed, fixed_length=True)


@lru_cache(maxsize=4)
def _sudokus(order: int, count: int, givens: int, guesses: int, kind: str) -> list[Puzzle]:
    rng = random.Random(f"sudoku {order} {kind}")

    boards: list[Puzzle] = []
    for attempt in range(1, 200 * count + 1000):
        puzzle = sudoku.random_puzzle(order, rng, givens=givens)
        if puzzle.guesses >= guesses:
            boards.append(puzzle)
        if len(boards) == count:
            return boards
        if attempt == 300 and not boards:
            break
    raise ValueError(
        f"{attempt:,} random boards of order {order} with {givens} givens or more contain {len(boards)} that "
        f"take {guesses} guesses; lower data.guesses or data.givens"
    )


@lru_cache(maxsize=4)
def _mazes(side: int, count: int, openings: float, shortest: int, kind: str) -> list[Puzzle]:
    rng = random.Random(f"maze {side} {kind}")
    return [maze.random_maze(side, rng, openings=openings, shortest=shortest) for _ in range(count)]

"""Files of puzzles: CSV with the columns ``question`` and, optionally, ``answer``. Imports no torch.

The published files of Sudoku-Extreme and Maze-Hard have this form.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.data.puzzles import maze
from trainer.data.puzzles.sudoku import BoardError, Puzzle
from trainer.errors import DataError

if TYPE_CHECKING:
    from trainer.specs.generated import PuzzleSpec

SYMBOLS: Mapping[str, Mapping[str, int]] = {
    "sudoku": {".": 0, **{str(digit): digit for digit in range(10)}},
    "maze": {symbol: value for value, symbol in enumerate(maze.SYMBOLS)},
}
"""Value of each symbol in a file, by the kind of the puzzle."""


@dataclass(frozen=True)
class ReadBoard:
    """A board of a file whose size and symbols are right; its solution is not checked yet."""

    where: str
    """File and line."""
    givens: Sequence[int]
    answer: Sequence[int] | None

    def puzzle(self, solve: Callable[[Sequence[int]], Puzzle]) -> Puzzle:
        """Solve the board and compare the file's answer, if there is one.

        Raises:
            DataError: no solution or several, or an answer that is not the solution. Names line and cell.

        """
        try:
            puzzle = solve(self.givens)
        except BoardError as error:
            raise DataError(f"{self.where}: {error}") from None
        if self.answer is not None and tuple(self.answer) != puzzle.solution:
            cell = next(c for c, value in enumerate(self.answer) if value != puzzle.solution[c])
            raise DataError(
                f"{self.where}, column 'answer': it differs from the solution at cell {cell + 1}; correct it"
            )
        return puzzle


def read_files(spec: PuzzleSpec) -> list[list[ReadBoard]]:
    """Read the boards of `path` and of `validation_path`, as many as the spec's pools have, unsolved.

    Raises:
        DataError: as `read_boards`.

    """
    assert spec.path is not None
    assert spec.validation_path is not None  # the spec requires both or none
    paths = (spec.path, spec.validation_path)
    return [
        list(read_boards(Path(path), SYMBOLS[spec.kind], cells=spec.cells, limit=count))
        for path, (_, count) in zip(paths, spec.pools, strict=True)
    ]


def read_boards(path: Path, symbols: Mapping[str, int], *, cells: int, limit: int) -> Iterator[ReadBoard]:
    """Read boards from a file, without solving them.

    Args:
        path: the file.
        symbols: value of each symbol.
        cells: number of cells of a board.
        limit: number of boards to read.

    Raises:
        DataError: no such file, no such column, no boards, a wrong symbol or size. Names file, line, column
            and cell.

    """
    found = False
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if "question" not in (reader.fieldnames or ()):
                names = ", ".join(reader.fieldnames or ())
                raise DataError(f"{path} has no column 'question'; it has {names or 'none'}")
            for row in islice(reader, limit):
                found, where = True, f"{path}, line {reader.line_num}"
                givens = _values(row["question"] or "", f"{where}, column 'question'", symbols, cells)
                answer = row.get("answer")
                solved = _values(answer, f"{where}, column 'answer'", symbols, cells) if answer else None
                yield ReadBoard(where, givens, solved)
    except OSError as error:
        message = f"{path} cannot be read ({error.strerror}); set data.path to a file of boards"
        raise DataError(message) from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is not a text file; give a CSV file of boards") from None
    if not found:
        raise DataError(f"{path} contains no boards; give a CSV file with one board per line")


def _values(text: str, where: str, symbols: Mapping[str, int], cells: int) -> list[int]:
    if len(text) != cells:
        raise DataError(f"{where}: the board has {len(text)} cells, not {cells}; set the size in data")
    for cell, symbol in enumerate(text):
        if symbol not in symbols:
            raise DataError(f"{where}, cell {cell + 1}: unknown symbol {symbol!r}; use {' '.join(symbols)}")
    return [symbols[symbol] for symbol in text]

"""Sudoku: boards with unique solutions, their difficulty, and their symmetries. Imports no torch.

A board of order n = rows · columns (of a box) is an array of n² values in reading order, 0 for an empty
cell. The digits 1 … n occur once in each row, column and box. Order 4 has boxes of 2 × 2, order 6 boxes of
2 × 3, order 9 boxes of 3 × 3.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

BOXES = {4: (2, 2), 6: (2, 3), 9: (3, 3)}
"""Rows and columns of a box, by the order of the board."""

Board = tuple[int, ...]


@dataclass(frozen=True)
class Puzzle:
    """A board with a unique solution.

    ``guesses`` is its difficulty: how many cells a solver had to guess that otherwise only fills cells with a
    single possible digit and digits with a single possible cell of a row, column or box. 0: none.
    """

    givens: Board
    solution: Board
    guesses: int


class BoardError(ValueError):
    """A board has a wrong number of cells, a wrong symbol, a contradiction, or not exactly one solution."""


@lru_cache(maxsize=3)
def _geometry(order: int) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Return the units (rows, columns, boxes) and the peers of each cell."""
    height, width = BOXES[order]
    cells = range(order * order)
    groups: dict[tuple[str, int], list[int]] = {}
    for cell in cells:
        row, column = divmod(cell, order)
        box = row // height * (order // width) + column // width
        for unit in (("row", row), ("column", column), ("box", box)):
            groups.setdefault(unit, []).append(cell)
    units = tuple(tuple(unit) for unit in groups.values())
    peers = tuple(tuple({c for u in units if cell in u for c in u} - {cell}) for cell in cells)
    return units, peers


class _Search:
    """Depth-first search over candidate sets, one bit per digit, with propagation of singles."""

    def __init__(self, order: int) -> None:
        self.units, self.peers = _geometry(order)
        self.everything = (1 << order) - 1
        self.guesses = 0

    def assign(self, candidates: list[int], cell: int, bit: int) -> bool:
        """Set a cell, and those that it leaves with one digit. Returns False at a contradiction."""
        stack = [(cell, bit)]
        while stack:
            cell, bit = stack.pop()
            if not candidates[cell] & bit:
                return False
            candidates[cell] = bit
            for peer in self.peers[cell]:
                left = candidates[peer]
                if left & bit:
                    left &= ~bit
                    if not left:
                        return False
                    candidates[peer] = left
                    if not left & (left - 1):
                        stack.append((peer, left))
        return True

    def fill_hidden(self, candidates: list[int]) -> bool:
        """Set the digits with a single possible cell in a unit, until there is none. False: contradiction."""
        changed = True
        while changed:
            changed = False
            for unit in self.units:
                once = twice = 0
                for cell in unit:
                    twice |= once & candidates[cell]
                    once |= candidates[cell]
                if once != self.everything:
                    return False
                alone = once & ~twice
                for cell in unit if alone else ():
                    bit = candidates[cell] & alone
                    if bit and candidates[cell] != bit:
                        if bit & (bit - 1) or not self.assign(candidates, cell, bit):
                            return False
                        changed = True
        return True

    def solutions(self, candidates: list[int], rng: random.Random | None = None) -> Iterator[Board]:
        """Yield the solutions; with a generator of random numbers, in random order."""
        if not self.fill_hidden(candidates):
            return
        open_cells = [cell for cell, left in enumerate(candidates) if left & (left - 1)]
        if not open_cells:
            yield tuple(left.bit_length() for left in candidates)
            return
        least = min(candidates[cell].bit_count() for cell in open_cells)
        fewest = [cell for cell in open_cells if candidates[cell].bit_count() == least]
        cell = fewest[0] if rng is None else rng.choice(fewest)
        bits = [1 << d for d in range(self.everything.bit_length()) if candidates[cell] >> d & 1]
        if rng is not None:
            rng.shuffle(bits)
        self.guesses += 1
        for bit in bits:
            copy = candidates.copy()
            if self.assign(copy, cell, bit):
                yield from self.solutions(copy, rng)


def order_of(cells: int) -> int:
    """Return the order of a board of so many cells.

    Raises:
        BoardError: there is no such board.

    """
    for order in BOXES:
        if order * order == cells:
            return order
    raise BoardError(f"a board has 16, 36 or 81 cells, not {cells}")


def solve(givens: Sequence[int]) -> Puzzle:
    """Solve a board.

    Raises:
        BoardError: a wrong number of cells, a value outside 0 … n, two equal digits in a row, column or box,
            no solution, or more than one.

    """
    order = order_of(len(givens))
    search = _Search(order)
    candidates = [search.everything] * len(givens)
    for cell, value in enumerate(givens):
        if not 0 <= value <= order:
            raise BoardError(f"{_place(cell, order)} is {value}; use 1 to {order}, and 0 for an empty cell")
        for peer in search.peers[cell] if value else ():
            if givens[peer] == value and peer > cell:
                where = f"{_place(cell, order)} and {_place(peer, order)}"
                raise BoardError(f"{where} are both {value}; a digit occurs once in each row, column and box")
        if value and not search.assign(candidates, cell, 1 << (value - 1)):
            raise BoardError("the board has no solution; correct its digits")
    found = search.solutions(candidates)
    first = next(found, None)
    if first is None:
        raise BoardError("the board has no solution; correct its digits")
    guesses = search.guesses
    if next(found, None) is not None:
        raise BoardError("the board has several solutions; add digits until there is one")
    return Puzzle(tuple(givens), first, guesses)


def _place(cell: int, order: int) -> str:
    row, column = divmod(cell, order)
    return f"row {row + 1}, column {column + 1}"


def random_puzzle(order: int, rng: random.Random, *, givens: int = 0) -> Puzzle:
    """Draw a puzzle: a random solved board, from which digits are removed while the solution stays unique.

    Args:
        order: 4, 6 or 9.
        rng: source of random numbers.
        givens: digits to keep at least; 0: as few as the order of removal allows (a minimal puzzle).

    """
    search = _Search(order)
    solution = next(search.solutions([search.everything] * (order * order), rng))
    board = list(solution)
    left = len(board)
    for cell in rng.sample(range(len(board)), len(board)):
        if left <= givens:
            break
        value, board[cell] = board[cell], 0
        if _another_exists(order, board, cell, value):
            board[cell] = value
        else:
            left -= 1
    return solve(board)


def _another_exists(order: int, board: list[int], cell: int, value: int) -> bool:
    """Whether the board has a solution with another digit than `value` in `cell`."""
    search = _Search(order)
    candidates = [search.everything] * len(board)
    candidates[cell] = search.everything & ~(1 << (value - 1))
    for other, digit in enumerate(board):
        if digit and not search.assign(candidates, other, 1 << (digit - 1)):
            return False
    return next(search.solutions(candidates), None) is not None


def symmetries(order: int, count: int, draws: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], ...]:
    """Turn random words into symmetries of the boards: permutations of cells and of digits.

    Rows are permuted within bands and bands among themselves, likewise columns; boards with square boxes are
    also transposed.

    Args:
        order: n.
        count: number K of symmetries.
        draws: K · `words_per_symmetry` random 64-bit words.

    Returns:
        Sources of the cells (K, n²) and new digits (K, n + 1), whose entry 0 is 0:
        ``new = digits[k][board[cells[k]]]``.

    """
    height, width = BOXES[order]
    draws = draws.reshape(count, words_per_symmetry(order))
    digits = np.zeros((count, order + 1), dtype=np.int64)
    digits[:, 1:] = np.argsort(draws[:, :order], axis=1) + 1
    rows = _nested(draws[:, order : 2 * order + order // height], order, height)
    columns = _nested(draws[:, 2 * order + order // height : -1], order, width)
    cells = rows[:, :, None] * order + columns[:, None, :]
    if height == width:
        flipped = (draws[:, -1] >> np.uint64(63)).astype(bool)
        cells[flipped] = cells[flipped].transpose(0, 2, 1)
    return cells.reshape(count, -1), digits


def words_per_symmetry(order: int) -> int:
    """Return the number of 64-bit words that a symmetry takes."""
    height, width = BOXES[order]
    return 3 * order + order // height + order // width + 1


def _nested(draws: npt.NDArray[np.uint64], order: int, size: int) -> npt.NDArray[np.int64]:
    """Return permutations (K, n) that permute blocks of `size` lines, and the lines within each block."""
    blocks = np.argsort(draws[:, order:], axis=1)
    within = np.argsort(draws[:, :order].reshape(len(draws), -1, size), axis=2)
    return (blocks[:, :, None] * size + np.take_along_axis(within, blocks[:, :, None], axis=1)).reshape(
        len(draws), order
    )

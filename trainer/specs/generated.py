"""Specs of data that are generated on the fly: state tracking and puzzles. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from implicit_blocks.specs import field_error
from trainer.specs.data import DataSpec, Probability

StateTrackingTask = Literal[
    "parity",
    "even_pairs",
    "cycle_navigation",
    "modular_arithmetic",
    "flip_flop",
    "dyck",
    "stack",
    "automaton",
    "code_trace",
    "board",
]


class TaskSize(NamedTuple):
    """Sizes n of a task, and its number of tokens and labels."""

    default: int
    smallest: int
    largest: int
    vocab_size: Callable[[int], int]


SIZES: Mapping[str, TaskSize] = {
    "parity": TaskSize(2, 2, 64, lambda n: n),
    "even_pairs": TaskSize(2, 2, 64, lambda n: n),
    "cycle_navigation": TaskSize(5, 3, 64, lambda n: n),
    "modular_arithmetic": TaskSize(5, 3, 31, lambda n: 3 * n),
    "flip_flop": TaskSize(2, 2, 64, lambda n: 2 * n + 1),
    "dyck": TaskSize(8, 1, 64, lambda n: 4),
    "stack": TaskSize(2, 2, 64, lambda n: n + 1),
    "automaton": TaskSize(8, 3, 64, lambda n: n),
    "code_trace": TaskSize(5, 2, 16, lambda n: 6 * n + 2 * n * n),
    "board": TaskSize(4, 4, 8, lambda n: n**4 + n**2),
}
"""Sizes of each task."""

MAX_POOL = 1_000_000


class StateTrackingSpec(DataSpec):
    """A state-tracking task beyond groups, generated on the fly; see `trainer.data.state_tracking`."""

    changeable: ClassVar[frozenset[str]] = frozenset({"seq_len"})

    kind: Literal["state_tracking"] = "state_tracking"
    name: StateTrackingTask
    """The task."""
    size: PositiveInt | None = None
    """Number of states, values or variables, depth of the brackets, or side of the board; null: the default
    of the task."""
    seq_len: PositiveInt = 64
    """Tokens per training sequence."""

    @property
    def states(self) -> int:
        """The size, or the task's default."""
        return SIZES[self.name].default if self.size is None else self.size

    @property
    def vocab_size(self) -> int:
        """Number of tokens and labels of the task."""
        return SIZES[self.name].vocab_size(self.states)

    @property
    def task(self) -> str:
        """The task and its size."""
        return f"{self.name} of size {self.states}"

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        return [f"{self.task}: {self.vocab_size} tokens, length {self.seq_len:,}, generated on the fly"]

    @model_validator(mode="after")
    def _size_fits(self) -> Self:
        sizes = SIZES[self.name]
        if not sizes.smallest <= self.states <= sizes.largest:
            message = f"{self.name} has sizes from {sizes.smallest} to {sizes.largest}, not {self.size}"
            raise field_error(message, "size", value=self.size)
        return self

    @property
    def least_length(self) -> int:
        """Length from which on a sequence can have a scored token."""
        return {"flip_flop": 2, "code_trace": self.states + 1}.get(self.name, 1)

    @model_validator(mode="after")
    def _length_fits(self) -> Self:
        if self.seq_len < self.least_length:
            message = (
                f"{self.name} of size {self.states} scores no token of so short a sequence; choose a length "
                f"of at least {self.least_length}"
            )
            raise field_error(message, "seq_len", value=self.seq_len)
        return self


class PuzzleSpec(DataSpec):
    """Base class of the puzzles: boards whose cells are the tokens of a sequence."""

    path: str | None = None
    """CSV file of training boards with columns `question` and `answer`, such as the published files; null:
    boards are generated."""
    validation_path: str | None = None
    """CSV file of boards to evaluate on, beside `path`."""
    boards: Annotated[int, Field(ge=1, le=MAX_POOL)] = 4096
    """Number of training boards, each of which is shown in random symmetric variants."""
    held_out: Annotated[int, Field(ge=1, le=MAX_POOL)] = 512
    """Number of boards to evaluate on, likewise."""
    tokens: Literal["cells", "values"] = "cells"
    """`cells`: a token names the cell and what it contains, and the mixer needs no positions. `values`: it
    names the content only, for mixers that know the rows and columns of the board, such as grid_conv; the
    same model then reads boards of any size."""

    @property
    def values(self) -> int:
        """Number of values of a cell."""
        raise NotImplementedError

    @property
    def vocab_size(self) -> int:
        """A token for every cell and value, or for every value."""
        return self.values * (self.cells if self.tokens == "cells" else 1)

    @property
    def pools(self) -> tuple[tuple[str, int], ...]:
        """Names and sizes of the pools of boards."""
        return ("training", self.boards), ("evaluation", self.held_out)

    @property
    def cells(self) -> int:
        """Cells of a board."""
        raise NotImplementedError

    def source(self) -> str:
        """Return where the training boards come from; files are read, and solved when the run begins.

        Raises:
            DataError: a file that cannot be read, or that has a wrong symbol or size.

        """
        if self.path is None:
            return f"{self.boards:,} boards generated"
        from trainer.data.puzzles.files import read_files

        training, held_out = read_files(self)
        return (
            f"{len(training):,} boards of {self.path}, {len(held_out):,} of {self.validation_path} held out"
        )

    @model_validator(mode="after")
    def _whole_boards(self) -> Self:
        if self.seq_len != self.cells:
            message = (
                f"a board has {self.cells} cells, which are the tokens of a sequence; remove seq_len, or set "
                f"it to {self.cells}"
            )
            raise field_error(message, "seq_len", value=self.seq_len)
        if (self.path is None) != (self.validation_path is None):
            message = "path and validation_path go together: boards to train on, and others to evaluate on"
            raise field_error(message, "validation_path", value=self.validation_path)
        return self


def _with_length(value: Any, field: str, default: int) -> Any:
    """Set a missing seq_len to the square of a field."""
    if isinstance(value, Mapping) and "seq_len" not in value:
        side = value.get(field, default)
        if isinstance(side, int) and not isinstance(side, bool) and side > 0:
            return {**value, "seq_len": side * side}
    return value


class SudokuSpec(PuzzleSpec):
    """Sudoku boards with unique solutions."""

    kind: Literal["sudoku"] = "sudoku"
    order: Literal[4, 6, 9] = 9
    """Digits of a board; boxes are 2 by 2, 2 by 3 or 3 by 3."""
    givens: NonNegativeInt = 0
    """Least number of digits given; 0: as few as removing digits in random order leaves."""
    guesses: NonNegativeInt = 0
    """Least number of cells that a solver must guess that fills cells with a single possible digit and
    digits with a single possible place: the difficulty. 3 is hard."""
    seq_len: PositiveInt = 81
    """Cells of a board."""

    @property
    def cells(self) -> int:
        """Cells of a board."""
        return self.order * self.order

    @property
    def values(self) -> int:
        """The digits, or none."""
        return self.order + 1

    @property
    def task(self) -> str:
        """Solutions of boards of this order."""
        return f"Sudoku of order {self.order}"

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        guesses = f" that take {self.guesses} guesses" if self.guesses and not self.path else ""
        return [f"{self.task}: {self.source()}{guesses}, in random symmetric variants"]

    @model_validator(mode="before")
    @classmethod
    def _length(cls, value: Any) -> Any:
        return _with_length(value, "order", 9)

    @model_validator(mode="after")
    def _boards_exist(self) -> Self:
        if self.givens > self.cells:
            raise field_error(f"a board has {self.cells} cells", "givens", value=self.givens)
        if self.guesses and self.order == 4:
            message = "boards of order 4 take no guesses; remove it, or use order 9"
            raise field_error(message, "guesses", value=self.guesses)
        return self


class MazeSpec(PuzzleSpec):
    """Square mazes with a unique shortest path from a start to a goal."""

    changeable: ClassVar[frozenset[str]] = frozenset(
        {"side", "seq_len", "openings", "shortest_path", "boards"}
    )

    kind: Literal["maze"] = "maze"
    side: Annotated[int, Field(ge=4, le=64)] = 30
    """Rows and columns."""
    openings: Probability = 0.05
    """Share of the walls between two corridors that are opened, which makes loops."""
    shortest_path: NonNegativeInt = 0
    """Least number of steps from start to goal."""
    seq_len: PositiveInt = 900
    """Squares of a maze."""

    @property
    def cells(self) -> int:
        """Squares of a maze."""
        return self.side * self.side

    @property
    def values(self) -> int:
        """Wall, open, start, goal, and the path of solutions."""
        return 5

    @property
    def task(self) -> str:
        """Shortest paths in mazes, of this side if the tokens name the cells."""
        size = f" of {self.side} x {self.side}" if self.tokens == "cells" else ""
        return f"shortest paths in mazes{size}"

    def describe(self, *, sequences: int, vocab_size: int | None) -> list[str]:
        """See `DataSpec.describe`."""
        size = f"mazes of {self.side} x {self.side}"
        return [f"shortest paths in {size}: {self.source()}, in random symmetric variants"]

    @model_validator(mode="before")
    @classmethod
    def _length(cls, value: Any) -> Any:
        return _with_length(value, "side", 30)

    @model_validator(mode="after")
    def _path_fits(self) -> Self:
        if self.shortest_path > self.cells // 2:
            message = f"no maze of {self.cells} squares has so long a path; choose at most {self.cells // 2}"
            raise field_error(message, "shortest_path", value=self.shortest_path)
        return self

"""State-tracking tasks beyond groups: the label at a token is a function of a state that tokens change.

Labels are aligned with the inputs, without a shift; tokens that ask nothing are not scored. All tasks have
bounded states, except `stack`, whose depth grows with the length.

Sources: regular and context-free tasks after Delétang et al., "Neural Networks and the Chomsky Hierarchy"
(ICLR 2023); `flip_flop` after Liu et al., "Exposing Attention Glitches with Flip-Flop Language Modeling"
(NeurIPS 2023); `dyck` after Hewitt et al., "RNNs can generate bounded hierarchical languages" (EMNLP 2020).
Shapes: B sequences of a block, L tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from trainer.data.describing import check_vocabulary
from trainer.data.generated import BLOCK, Draws, GeneratedData, Integers, Task
from trainer.data.source import IGNORED

if TYPE_CHECKING:
    from trainer.specs.generated import StateTrackingSpec

Sequences = tuple[Integers, Integers]
_ROWS = np.arange(BLOCK)


def parity(draws: Draws, length: int, size: int) -> Sequences:
    """Draw bits; the label is the number of ones so far, modulo `size`."""
    tokens = draws.integers(2, BLOCK, length)
    return tokens, np.cumsum(tokens, axis=1) % size


def even_pairs(draws: Draws, length: int, size: int) -> Sequences:
    """Draw letters 0 to `size` − 1; the label is 1 where the letter equals the first one of the sequence."""
    tokens = draws.integers(size, BLOCK, length)
    return tokens, (tokens == tokens[:, :1]).astype(np.int64)


def cycle_navigation(draws: Draws, length: int, size: int) -> Sequences:
    """Draw steps 0, +1 and −1 on a cycle of `size` places; the label is the place."""
    tokens = draws.integers(3, BLOCK, length)
    return tokens, np.cumsum(np.where(tokens == 2, -1, tokens), axis=1) % size


def modular_arithmetic(draws: Draws, length: int, size: int) -> Sequences:
    """Draw operations +d, −d and ·d, applied from left to right to 0; the label is the value modulo `size`.

    Token ``size·operation + d``. Products by 0 are excluded, so that the values of a text matter to its end.
    """
    operation = draws.integers(3, BLOCK, length)
    digit = np.where(
        operation == 2, 1 + draws.integers(size - 1, BLOCK, length), draws.integers(size, BLOCK, length)
    )
    labels, value = np.empty_like(digit), np.zeros(BLOCK, dtype=np.int64)
    for j in range(length):
        d = digit[:, j]
        value = np.choose(operation[:, j], [value + d, value - d, value * d]) % size
        labels[:, j] = value
    return size * operation + digit, labels


def flip_flop(draws: Draws, length: int, size: int) -> Sequences:
    """Draw instructions to write, ignore and read one of `size` values.

    The label at a read is the last written value. Tokens: ``v`` writes v, ``size + v`` is ignored,
    ``2·size`` reads. A tenth of the instructions write, a tenth read; the first writes. Other positions are
    not scored.
    """
    kind = draws.integers(10, BLOCK, length)
    value = draws.integers(size, BLOCK, length)
    kind[:, 0] = 0
    written = np.maximum.accumulate(np.where(kind == 0, np.arange(length), 0), axis=1)
    tokens = np.where(kind == 0, value, np.where(kind == 1, 2 * size, size + value))
    return tokens, np.where(kind == 1, np.take_along_axis(value, written, axis=1), IGNORED)


def dyck(draws: Draws, length: int, size: int) -> Sequences:
    """Draw brackets of two types, nested at most `size` deep.

    The label is the type of the innermost open one. Tokens: 0 and 1 open, 2 and 3 close. Label 2: nothing is
    open.
    """
    return _nested(draws, length, depth=size, types=2)


def stack(draws: Draws, length: int, size: int) -> Sequences:
    """Draw pushes of `size` values and pops; the label is the value on top. The depth is not bounded.

    Tokens: v pushes v, ``size`` pops, at an empty stack without effect. Label `size`: the stack is empty.
    """
    kind, value = draws.integers(2, BLOCK, length), draws.integers(size, BLOCK, length)
    contents = np.full((BLOCK, length + 1), size, dtype=np.int64)
    top, labels = np.zeros(BLOCK, dtype=np.int64), np.empty((BLOCK, length), dtype=np.int64)
    for j in range(length):
        pushes = kind[:, j] == 0
        top = np.where(pushes, top + 1, np.maximum(top - 1, 0))
        contents[_ROWS[pushes], top[pushes]] = value[pushes, j]
        labels[:, j] = contents[_ROWS, top]
    return np.where(kind == 0, value, size), labels


def automaton(draws: Draws, length: int, size: int) -> Sequences:
    """Draw letters of a fixed random automaton of `size` states; the label is the state.

    The automaton starts in state 0 and has three letters. The first two permute the states at random, the
    third maps them at random, so that its transformations are not all invertible. It depends on `size` alone.
    """
    fixed = Draws((size, 2), 0)
    moves = np.stack([*np.argsort(fixed.words(2, size), axis=1), fixed.integers(size, size)])
    # The third letter loses information; it is rarer, so that long histories matter.
    tokens = np.array([0, 0, 0, 0, 1, 1, 1, 1, 1, 2])[draws.integers(10, BLOCK, length)]
    labels, state = np.empty((BLOCK, length), dtype=np.int64), np.zeros(BLOCK, dtype=np.int64)
    for j in range(length):
        state = moves[tokens[:, j], state]
        labels[:, j] = state
    return tokens, labels


def code_trace(draws: Draws, length: int, size: int) -> Sequences:
    """Draw a trace of statements over `size` variables whose values are seen only in part.

    Values are 0 to 3 and unknown at first. Statements are single tokens, with x and y below `size` and v
    below 4: ``show x v`` (the trace reveals that x is v; at the first statements, and rarely later),
    ``swap x y``, ``copy x y`` (x = y), ``add x`` (x = x + 1 modulo 4), and ``read x``, whose label is x's
    value. Reads of variables that the trace has not determined are not scored; nor are other statements.
    """
    values = 4
    show, swap, copy, add, read = np.cumsum([0, size * values, size * size, size * size, size])
    kind = np.array([0, 1, 1, 1, 2, 3, 3, 4, 4, 4])[draws.integers(10, BLOCK, length)]
    kind[:, :size] = 0
    x, y = draws.integers(size, BLOCK, length), draws.integers(size, BLOCK, length)
    x[:, : min(size, length)] = np.argsort(draws.words(BLOCK, size), axis=1)[:, :length]
    held = draws.integers(values, BLOCK, size)
    known = np.zeros((BLOCK, size), dtype=bool)
    tokens, labels = np.empty_like(kind), np.full_like(kind, IGNORED)
    for j in range(length):
        a, b, what = x[:, j], y[:, j], kind[:, j]
        of_a, of_b = held[_ROWS, a].copy(), held[_ROWS, b].copy()
        knows_a, knows_b = known[_ROWS, a].copy(), known[_ROWS, b].copy()
        tokens[:, j] = np.choose(
            what, [show + a * values + of_a, swap + a * size + b, copy + a * size + b, add + a, read + a]
        )
        labels[:, j] = np.where((what == 4) & knows_a, of_a, IGNORED)
        held[_ROWS, a] = np.choose(what, [of_a, of_b, of_b, (of_a + 1) % values, of_a])
        known[_ROWS, a] = np.choose(what, [True, knows_b, knows_b, knows_a, knows_a])
        swaps = what == 1
        held[_ROWS[swaps], b[swaps]] = of_a[swaps]
        known[_ROWS[swaps], b[swaps]] = knows_a[swaps]
    return tokens, labels


def board(draws: Draws, length: int, size: int) -> Sequences:
    """Draw moves of pieces over a board of `size` × `size` squares, and questions about squares.

    At first two kings, two knights and two camels, which jump 1 by 3, stand on fixed squares. Token
    ``cells·from + to`` is a random legal move: the piece's jump to an empty square. Token ``cells² + square``
    asks what stands there: 0 nothing, 1 king, 2 knight, 3 camel. A quarter of the tokens ask; moves are not
    scored.
    """
    cells, jumps = size * size, _jumps(size)
    pieces = np.zeros((BLOCK, cells), dtype=np.int64)
    pieces[:, :6] = [1, 2, 3, 1, 2, 3]
    asks, squares = draws.integers(4, BLOCK, length) == 0, draws.integers(cells, BLOCK, length)
    tokens, labels = np.empty((BLOCK, length), dtype=np.int64), np.full((BLOCK, length), IGNORED)
    for j in range(length):
        legal = jumps[pieces, np.arange(cells)] & (pieces == 0)[:, None, :]  # (B, from, to)
        chosen = np.where(legal, draws.words(BLOCK, cells, cells) >> np.uint64(1), 0).reshape(BLOCK, -1)
        move = chosen.argmax(axis=1)
        ask = asks[:, j] | (chosen.max(axis=1) == 0)
        tokens[:, j] = np.where(ask, cells * cells + squares[:, j], move)
        labels[ask, j] = pieces[_ROWS[ask], squares[ask, j]]
        rows, (start, end) = _ROWS[~ask], np.divmod(move[~ask], cells)
        pieces[rows, end] = pieces[rows, start]
        pieces[rows, start] = 0
    return tokens, labels


def _nested(draws: Draws, length: int, *, depth: int, types: int) -> Sequences:
    opens, kinds = draws.integers(2, BLOCK, length) == 0, draws.integers(types, BLOCK, length)
    contents = np.full((BLOCK, depth + 1), types, dtype=np.int64)
    top = np.zeros(BLOCK, dtype=np.int64)
    tokens, labels = np.empty((BLOCK, length), dtype=np.int64), np.empty((BLOCK, length), dtype=np.int64)
    for j in range(length):
        opening = (opens[:, j] | (top == 0)) & (top < depth)
        tokens[:, j] = np.where(opening, kinds[:, j], types + contents[_ROWS, top])
        top = np.where(opening, top + 1, top - 1)
        contents[_ROWS[opening], top[opening]] = kinds[opening, j]
        labels[:, j] = contents[_ROWS, top]
    return tokens, labels


def _jumps(size: int) -> np.ndarray:
    """Return whether each piece (1 king, 2 knight, 3 camel) may jump from a square to another."""
    row, column = np.divmod(np.arange(size * size), size)
    high = np.maximum(abs(row[:, None] - row), abs(column[:, None] - column))
    low = np.minimum(abs(row[:, None] - row), abs(column[:, None] - column))
    king, knight, camel = high == 1, (high == 2) & (low == 1), (high == 3) & (low == 1)
    return np.stack([np.zeros_like(king), king, knight, camel])


TASKS: Mapping[str, Callable[[Draws, int, int], Sequences]] = {
    task.__name__: task
    for task in (
        parity,
        even_pairs,
        cycle_navigation,
        modular_arithmetic,
        flip_flop,
        dyck,
        stack,
        automaton,
        code_trace,
        board,
    )
}
"""The tasks by name; each draws a block of sequences of a length and size."""


class StateTracking(Task):
    """A task of `TASKS`.

    Args:
        spec: names the task and its size.

    """

    def __init__(self, spec: StateTrackingSpec) -> None:
        self._draw, self._size = TASKS[spec.name], spec.states
        self.vocab_size, self.least_length = spec.vocab_size, spec.least_length

    def draw(self, draws: Draws, length: int, *, evaluation: bool) -> Sequences:
        """See `Task.draw`."""
        return self._draw(draws, length, self._size)


def build(spec: StateTrackingSpec, *, seed: int = 0, vocab_size: int | None = None) -> GeneratedData:
    """Build the training stream of a `data` section.

    Raises:
        ValueError: the model's vocabulary is too small.

    """
    check_vocabulary(spec.vocab_size, vocab_size, what=f"the task {spec.name}")
    return GeneratedData(StateTracking(spec), length=spec.seq_len, seed=seed)

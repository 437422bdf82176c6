"""State-tracking tasks against simulations of one sequence, token by token."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.specs import SpecError
from trainer.data.generated import BLOCK, Draws
from trainer.data.source import IGNORED
from trainer.data.state_tracking import TASKS
from trainer.specs.generated import SIZES, StateTrackingSpec
from trainer.specs.run import EvaluationSpec

LENGTH = 200


def labels_of(name: str, tokens: list[int], size: int) -> Iterator[int]:
    """Yield the label of each token by the definition of the task."""
    value, stack, written = 0, [], None
    for token in tokens:
        match name:
            case "parity":
                value = (value + token) % size
                yield value
            case "even_pairs":
                yield int(token == tokens[0])
            case "cycle_navigation":
                value = (value + {0: 0, 1: 1, 2: -1}[token]) % size
                yield value
            case "modular_arithmetic":
                operation, digit = divmod(token, size)
                value = (value + digit, value - digit, value * digit)[operation] % size
                yield value
            case "flip_flop":
                written = token if token < size else written
                assert written is not None, "the first instruction writes"
                yield written if token == 2 * size else IGNORED
            case "dyck":
                if token < 2:
                    stack.append(token)
                else:
                    assert stack.pop() == token - 2, "brackets match"
                assert len(stack) <= size
                yield stack[-1] if stack else 2
            case "stack":
                if token < size:
                    stack.append(token)
                elif stack:
                    stack.pop()
                yield stack[-1] if stack else size


@pytest.mark.parametrize("name", [name for name in TASKS if name not in ("automaton", "code_trace", "board")])
def test_labels_equal_those_of_a_simulation(name):
    spec = StateTrackingSpec(name=name, seq_len=LENGTH)
    batch = ib.build(spec, seed=3).batch(100, 60)  # crosses a block
    for tokens, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        assert list(labels_of(name, tokens, spec.states)) == labels


def test_states_of_the_automaton_follow_from_one_table():
    batch = ib.build(StateTrackingSpec(name="automaton", seq_len=LENGTH)).batch(0, 128)
    moves: dict[tuple[int, int], int] = {}
    before = torch.cat([torch.zeros(128, 1, dtype=torch.int64), batch.labels[:, :-1]], dim=1)
    for state, letter, after in zip(
        before.flatten().tolist(),
        batch.inputs.flatten().tolist(),
        batch.labels.flatten().tolist(),
        strict=True,
    ):
        assert moves.setdefault((state, letter), after) == after
    assert len({moves[state, 0] for state in range(8)}) == 8, "the first letter permutes the states"


def test_a_trace_determines_the_scored_values():
    size, values = 5, 4
    batch = ib.build(StateTrackingSpec(name="code_trace", seq_len=LENGTH)).batch(0, 40)
    scored = 0
    for tokens, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        held: list[int | None] = [None] * size
        for token, label in zip(tokens, labels, strict=True):
            if token < size * values:
                x, v = divmod(token, values)
                assert held[x] in (None, v), "what the trace shows agrees with what it determined"
                held[x] = v
            elif (token := token - size * values) < size * size:
                x, y = divmod(token, size)
                held[x], held[y] = held[y], held[x]
            elif (token := token - size * size) < size * size:
                x, y = divmod(token, size)
                held[x] = held[y]
            elif (token := token - size * size) < size:
                held[token] = None if held[token] is None else (held[token] + 1) % values
            else:
                known = held[token - size]
                assert label == (IGNORED if known is None else known)
                scored += 1
                continue
            assert label == IGNORED
    assert scored > 1000


def test_pieces_move_legally_and_answers_describe_the_board():
    side = 4
    batch = ib.build(StateTrackingSpec(name="board", seq_len=LENGTH)).batch(0, 20)
    reach = {1: {(0, 1), (1, 1)}, 2: {(1, 2)}, 3: {(1, 3)}}
    for tokens, labels in zip(batch.inputs.tolist(), batch.labels.tolist(), strict=True):
        board = [1, 2, 3, 1, 2, 3] + [0] * (side * side - 6)
        for token, label in zip(tokens, labels, strict=True):
            if token >= side**4:
                assert label == board[token - side**4]
                continue
            start, end = divmod(token, side * side)
            jump = sorted((abs(start // side - end // side), abs(start % side - end % side)))
            assert tuple(jump) in reach[board[start]]
            assert board[end] == 0
            assert label == IGNORED
            board[end], board[start] = board[start], 0


@pytest.mark.parametrize("name", SIZES)
def test_tokens_and_labels_are_in_the_vocabulary(name):
    default, least, *_ = SIZES[name]
    for size in {default, least}:
        spec = StateTrackingSpec(name=name, size=size, seq_len=50)
        batch = ib.build(spec).batch(0, 256)
        assert 0 <= int(batch.inputs.min()) <= int(batch.inputs.max()) < spec.vocab_size
        assert int(batch.labels.max()) < spec.vocab_size
        assert set(batch.labels[batch.labels < 0].tolist()) <= {IGNORED}


def test_sequences_do_not_depend_on_the_batches_and_evaluation_has_others():
    source = ib.build(StateTrackingSpec(name="stack", seq_len=20), seed=5)
    whole = source.batch(0, 300).inputs
    parts = torch.cat([source.batch(0, 7).inputs, source.batch(7, 250).inputs, source.batch(257, 43).inputs])
    assert torch.equal(whole, parts)
    sets = source.evaluation_sets(EvaluationSpec(lengths=(20, 80), seed=5))
    assert [each.length for each in sets.values()] == [20, 80]
    assert not torch.equal(next(iter(sets["L20"].batches(300))).inputs, whole[:256])
    assert not torch.equal(
        ib.build(StateTrackingSpec(name="stack", seq_len=20), seed=6).batch(0, 300).inputs, whole
    )


def test_draws_are_uniform():
    drawn = np.bincount(Draws((1, 0), 0).integers(5, 50_000), minlength=5)
    assert abs(drawn - 10_000).max() < 400


@pytest.mark.parametrize(("name", "size"), [("board", 3), ("dyck", 65), ("code_trace", 1)])
def test_sizes_outside_the_task_are_refused(name, size):
    with pytest.raises(SpecError, match=rf"(?s)size.*{name}.*{size}"):
        StateTrackingSpec(name=name, size=size)


def test_a_vocabulary_that_is_too_small_is_refused():
    with pytest.raises(ValueError, match="272"):
        ib.build(StateTrackingSpec(name="board"), vocab_size=100)


@pytest.mark.parametrize(("name", "length", "least"), [("flip_flop", 1, 2), ("code_trace", 5, 6)])
def test_lengths_without_scored_tokens_are_refused(name, length, least):
    with pytest.raises(SpecError, match=rf"(?s)seq_len.*{name}.*at least {least}"):
        StateTrackingSpec(name=name, seq_len=length)
    source = ib.build(StateTrackingSpec(name=name, seq_len=least))
    with pytest.raises(ValueError, match=rf"evaluation.lengths is \[64, {length}\].*at least {least}"):
        source.evaluation_sets(EvaluationSpec(lengths=(64, length)))


def deep_labels(name: str, length: int, more_than: int) -> float:
    """Return the share of labels whose element has been below ``more_than`` elements or more."""
    size = SIZES[name].default
    rows, index = np.arange(BLOCK), np.arange(length + 1)
    deep = 0
    blocks = 16
    for block in range(blocks):
        tokens, _ = TASKS[name](Draws((block, 7), 0), length, size)
        covered = np.full((BLOCK, length + 1), -1)  # most elements above an element so far, by its place
        top = np.zeros(BLOCK, dtype=np.int64)
        for column in range(length):
            pushes = tokens[:, column] < 2
            top = np.where(pushes, top + 1, np.maximum(top - 1, 0))
            covered[index > top[:, None]] = -1
            covered[rows[pushes], top[pushes]] = 0
            covered = np.where(index <= top[:, None], np.maximum(covered, top[:, None] - index), covered)
            deep += int(((top > 0) & (covered[rows, top] >= more_than)).sum())
    return deep / (blocks * BLOCK * length)


@pytest.mark.parametrize("name", ["dyck", "stack"])
def test_deep_labels_are_rare_in_training_and_not_at_four_times_the_length(name: str) -> None:
    assert deep_labels(name, 16, 6) < 0.0005
    assert 0.014 < deep_labels(name, 64, 6) < 0.020
    assert deep_labels(name, 32, 7) < 0.0015
    assert 0.009 < deep_labels(name, 128, 7) < 0.030

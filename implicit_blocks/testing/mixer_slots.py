"""Contracts of optional features of a mixer: truncation of the state, and slots.

A mixer without one of them raises ``ValueError``, as the base class does.

Shape legend: S slots, R of them in a step.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from implicit_blocks.interfaces import Mixer, SlotStates
from implicit_blocks.specs import MixerSpec
from implicit_blocks.testing.contract import relative_error, require
from implicit_blocks.testing.mixer_runs import (
    BATCH,
    D_MODEL,
    LENGTH,
    TOLERANCE,
    begin,
    inputs,
    make,
    run,
    with_ids,
)
from implicit_blocks.windows import SequenceState, Window


@torch.no_grad()
def truncate(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that truncated tokens have no effect, or that ``truncate`` raises an error."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    z_other, u_other = inputs(mixer, d_model, seed=2)
    if not mixer.truncates:
        _, state = run(mixer, z, u, [LENGTH])
        try:
            mixer.truncate(state, 4)
        except ValueError:
            return
        require(
            False,
            mixer,
            "truncate",
            "truncates is False, but truncate returned a state; set truncates = True, or raise ValueError",
        )
    for max_seq_len in (None, 2 * LENGTH):
        for kept in (1, 4, 8):
            _, state = run(mixer, z, u, [4, LENGTH], start=begin(mixer, max_seq_len=max_seq_len))
            state = mixer.truncate(state, kept)
            start = SequenceState(BATCH, kept, torch.full((1,), kept), (state,))
            further, _ = run(mixer, z_other[:, kept:], u_other[:, kept:], [LENGTH - kept], start=start)
            joined = [torch.cat((a[:, :kept], b[:, kept:]), dim=1) for a, b in ((z, z_other), (u, u_other))]
            expected, _ = run(mixer, joined[0], joined[1], [kept, LENGTH])
            error = relative_error(further, expected[:, kept:])
            require(
                error < TOLERANCE,
                mixer,
                "truncate",
                f"tokens after the first {kept} of {LENGTH} (max_seq_len {max_seq_len}) differ by "
                f"{error:.1e} from a sequence never longer; return the state as it was after those tokens",
            )


PROMPTS = (2, 5, 1)
STEPS: tuple[tuple[list[int] | None, list[int]], ...] = (
    (None, [0, 1, 2]),
    ([2, 0], [2]),  # a slot that still iterates is called and commits nothing
    (None, [0, 1]),
    ([1], [1]),
    ([0, 3, 2], [0, 2]),  # an idle slot pads the step
    (None, [1, 2]),
)
"""The slots of each call (None: all), and those that commit."""


@torch.no_grad()
def slots(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that slots of different lengths are independent, or that there are no slots."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    cpu = torch.device("cpu")
    try:
        states = mixer.slots(BATCH + 1, device=cpu, dtype=torch.float64, max_seq_len=LENGTH)
    except ValueError:
        return
    expected = [run(mixer, z[row : row + 1], u[row : row + 1], [LENGTH])[0][0] for row in range(BATCH)]
    lengths = torch.zeros(BATCH + 1, dtype=torch.int64)
    row_of = list(range(BATCH))
    for slot, prompt in enumerate(PROMPTS):
        _prefill(mixer, states, slot, z[slot, :prompt], u[slot, :prompt])
        lengths[slot] = prompt
    for step, (chosen, committing) in enumerate(STEPS):
        if step == len(STEPS) - 1:  # the sequence in slot 1 has ended; a new one replaces it
            row_of[1] = 0
            _prefill(mixer, states, 1, z[0, :3], u[0, :3])
            lengths[1] = 3
        rows = list(range(BATCH + 1)) if chosen is None else chosen
        index = None if chosen is None else torch.tensor(chosen)
        at = lengths[rows]
        window = Window(
            batch_size=len(rows), start=1, length=1, positions_BL=at[:, None], dtype=torch.float64
        )
        tokens = [
            torch.stack([x[row_of[slot], lengths[slot]] if slot < BATCH else x[0, 0] * 0 for slot in rows])
            for x in (z, u)
        ]
        z_step, u_step = (x[:, None] for x in tokens)
        state, context = states.gather(index, at), mixer.prepare(with_ids(mixer, window, z_step))
        mixer(z_step.flip(0) - 1, u_step, state, context)  # an iteration must have no side effect
        iterated = mixer(z_step, u_step, state, context)
        final, after = mixer.advance(z_step, u_step, state, context)
        states.write(index, after, torch.tensor([slot in committing for slot in rows]))
        for number, slot in enumerate(rows):
            if slot == BATCH:
                continue
            wanted = expected[row_of[slot]][lengths[slot]]
            error = max(relative_error(y[number, 0], wanted) for y in (iterated, final))
            require(
                error < TOLERANCE,
                mixer,
                "slots",
                f"call {step + 1}: the token after {int(lengths[slot])} others in slot {slot} differs by "
                f"{error:.1e} from that of its sequence alone; check prefill, commit and gather (for "
                "some slots and for all), and write only to committed positions",
            )
        for slot in committing:
            lengths[slot] += 1


WINDOWS: tuple[tuple[list[int] | None, list[int]], ...] = (
    (None, [1, 0, 2, 0]),
    ([2, 0], [0, 2]),
    ([1], [3]),
    (None, [2, 0, 3, 0]),
    ([0, 3, 2], [1, 0, 0]),  # an idle slot pads the call
    (None, [0, 1, 0, 0]),
)
"""The slots of each call (None: all), and the number of tokens that each of them commits."""


@torch.no_grad()
def slot_windows(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that windows of provisional tokens in slots equal their sequences, where slots serve windows."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    length, cpu = 3, torch.device("cpu")
    try:
        states = mixer.slots(BATCH + 1, device=cpu, dtype=torch.float64, max_seq_len=LENGTH + length)
    except ValueError:
        return
    if not states.windows:
        return
    expected = [run(mixer, z[row : row + 1], u[row : row + 1], [LENGTH])[0][0] for row in range(BATCH)]
    lengths = torch.zeros(BATCH + 1, dtype=torch.int64)
    for slot, prompt in enumerate(PROMPTS):
        _prefill(mixer, states, slot, z[slot, :prompt], u[slot, :prompt])
        lengths[slot] = prompt
    for step, (chosen, counts) in enumerate(WINDOWS):
        rows = list(range(BATCH + 1)) if chosen is None else chosen
        index = None if chosen is None else torch.tensor(chosen)
        at, taken, order = lengths[rows], torch.tensor(counts), torch.arange(length)
        window = Window(
            batch_size=len(rows), start=1, length=length, positions_BL=at[:, None] + order, dtype=z.dtype
        )
        known = torch.ones(len(rows), 1, dtype=torch.bool)
        valid = torch.cat((known, order < taken[:, None]), 1)
        prefix = replace(window, valid_BT=valid, gaps=False, shared={})
        z_step, u_step = (_tokens(x, rows, lengths, length) for x in (z, u))
        context, before = mixer.prepare(with_ids(mixer, window, z_step)), states.gather(index, at)
        first = mixer.prepare(with_ids(mixer, prefix, z_step))
        mixer(z_step.flip(1) - 1, u_step, before, context)  # other provisional tokens
        iterated = mixer(z_step, u_step, before, context)
        final, after = mixer.advance_prefix(z_step, u_step, before, context, first)
        states.write(index, after, taken > 0)
        for number, slot in enumerate(rows):
            if slot == BATCH:
                continue
            wanted = expected[slot][lengths[slot] : lengths[slot] + length]
            error = max(relative_error(y[number, : len(wanted)], wanted) for y in (iterated, final))
            require(
                error < TOLERANCE,
                mixer,
                "slot windows",
                f"call {step + 1}: the tokens after {int(lengths[slot])} others in slot {slot} differ by "
                f"{error:.1e} from those of its sequence alone; check gather, advance_prefix and write, or "
                "let SlotStates.windows return False",
            )
        for slot, count in zip(rows, counts, strict=True):
            lengths[slot] += count


def _tokens(x_BLF: Tensor, rows: list[int], lengths: Tensor, count: int) -> Tensor:
    """Return the next tokens of the slots' sequences, padded by zeros, (R, count, F)."""
    padded = torch.cat((x_BLF, x_BLF.new_zeros(len(x_BLF), count, x_BLF.shape[2])), 1)
    padded = torch.cat((padded, torch.zeros_like(padded[:1])))  # the idle slot
    return torch.stack([padded[slot, lengths[slot] : lengths[slot] + count] for slot in rows])


def _prefill(mixer: Mixer, states: SlotStates, slot: int, z_LD: Tensor, u_LU: Tensor) -> None:
    """Commit a prompt to a slot, in two windows if it has several tokens."""
    count = z_LD.shape[0]
    start = SequenceState(1, 0, torch.zeros(1, dtype=torch.int64), (states.prefill(slot),))
    cuts = [count] if count == 1 else [1, count]
    _, state = run(mixer, z_LD[None], u_LU[None], cuts, start=start)
    states.commit_rows(mixer, [slot], torch.tensor([slot]), state)

"""What a mixer must hold about tokens, windows, rows and states; everything runs in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from implicit_blocks.interfaces import Mixer
from implicit_blocks.models.sequence_state import SequenceState
from implicit_blocks.specs import MixerSpec
from implicit_blocks.testing.contract import relative_error, require
from implicit_blocks.testing.mixer_runs import (
    BATCH,
    CUTS,
    D_MODEL,
    LENGTH,
    TOLERANCE,
    begin,
    forward,
    inputs,
    make,
    require_untouched,
    run,
    state_error,
)


@torch.no_grad()
def causality(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """No token's output depends on a later token."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    z_other, u_other = inputs(mixer, d_model, seed=2)
    whole = forward(mixer, z, u)
    for position in range(1, LENGTH):
        changed = forward(
            mixer,
            torch.cat((z[:, :position], z_other[:, position:]), dim=1),
            torch.cat((u[:, :position], u_other[:, position:]), dim=1),
        )
        error = relative_error(changed[:, :position], whole[:, :position])
        require(
            error < TOLERANCE,
            mixer,
            "causality",
            f"changing the tokens from {position} on moved earlier outputs by {error:.1e}; mask later tokens",
        )


@torch.no_grad()
def window_splits(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Any way of cutting the sequence into windows gives the same outputs and the same final state."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    for injection in (u, None):
        whole = forward(mixer, z, injection)
        require(whole.shape == z.shape, mixer, "shape", f"{tuple(whole.shape)} came out of {tuple(z.shape)}")
        _, expected_state = run(mixer, z, injection, [LENGTH])
        for cuts in CUTS:
            parts, state = run(mixer, z, injection, cuts)
            error = relative_error(parts, whole)
            require(
                error < TOLERANCE,
                mixer,
                "window splits",
                f"windows ending at {cuts} differ from one window by {error:.1e}; "
                "look at the state and positions",
            )
            error = state_error(state, expected_state)
            require(
                error < TOLERANCE,
                mixer,
                "window splits",
                f"windows ending at {cuts} leave another final state than one window, by {error:.1e}; "
                "a state depends on the tokens and not on how they were cut",
            )


@torch.no_grad()
def state_untouched(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that iterating on a window changes neither the committed state nor later answers."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    _, state = run(mixer, z, u, [4])
    committed = SequenceState(BATCH, 4, torch.full((1,), 4), (state,))
    before = copy.deepcopy(state)
    window = committed.window(3, valid_BL=None, documents_BL=None, dtype=torch.float64)
    context = mixer.prepare(window)
    given = z.clone()
    first = mixer(z[:, 4:7], u[:, 4:7], state, context)
    require_untouched(mixer, z, given)
    mixer(z[:, :3], u[:, :3], state, context)
    mixer.advance(z[:, 1:4], u[:, 1:4], state, context)
    again = mixer(z[:, 4:7], u[:, 4:7], state, context)
    require(
        state_error(state, before) == 0 and torch.equal(first, again),
        mixer,
        "state untouched by iteration",
        "forward and advance must return new tensors and leave the state given to them as it was",
    )


@torch.no_grad()
def batch_independence(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that no row depends on other rows, and that ``select_rows`` picks the rows of a state."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    whole, state = run(mixer, z, u, [5, LENGTH])
    for row in range(BATCH):
        index = torch.tensor([row])
        alone, alone_state = run(mixer, z[index], u[index], [5, LENGTH])
        error = relative_error(alone, whole[index])
        require(
            error < TOLERANCE,
            mixer,
            "batch independence",
            f"row {row} alone differs by {error:.1e} from row {row} of the batch",
        )
        require(
            state_error(mixer.select_rows(state, index), alone_state) < TOLERANCE,
            mixer,
            "select_rows",
            f"row {row} of the state is not what row {row} alone leaves",
        )


@contextmanager
def accepting_padding(mixer: Mixer) -> Iterator[None]:
    """Name the contract where a mixer refuses padding: packed documents alone may be refused."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        require(
            False,
            mixer,
            "padding",
            f"it refuses padding ({error}); every batch of unequal rows has it, and prepare may refuse "
            "packed documents only",
        )


@torch.no_grad()
def padding(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that padding, left or right, changes no real token's output, whatever stands there."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    for name, real in (("left", slice(3, LENGTH)), ("right", slice(0, LENGTH - 3))):
        valid = torch.zeros(BATCH, LENGTH, dtype=torch.bool)
        valid[:, real] = True
        with accepting_padding(mixer):
            padded = forward(mixer, z, u, valid=valid)
        error = relative_error(padded[:, real], forward(mixer, z[:, real], u[:, real]))
        require(
            error < TOLERANCE and bool(padded.isfinite().all()),
            mixer,
            "padding",
            f"padding on the {name} moved real tokens by {error:.1e}, or made values that are not finite; "
            "honor window.valid_BL and positions_BL",
        )


PADDED_WINDOWS = """
    111111111
    001101111
    110011110
"""  # left or right of each window's tokens, windows being cut at 4 at least; ``check_walk`` has gaps too


@torch.no_grad()
def padded_windows(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that rows padded differently, across several windows, are mixed as if alone without padding."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    valid = torch.tensor([[flag == "1" for flag in row] for row in PADDED_WINDOWS.split()])
    for cuts in ([4, LENGTH], [2, 4, 7, LENGTH], list(range(1, LENGTH + 1))):
        with accepting_padding(mixer):
            mixed, _ = run(mixer, z, u, cuts, valid=valid)
        for row in range(BATCH):
            pick = slice(row, row + 1), valid[row]
            alone, _ = run(mixer, z[pick], u[pick], [int(valid[row].sum())])
            error = relative_error(mixed[pick], alone)
            require(
                error < TOLERANCE and bool(mixed.isfinite().all()),
                mixer,
                "padded windows",
                f"with windows ending at {cuts}, row {row} (real: {PADDED_WINDOWS.split()[row]}) differs by "
                f"{error:.1e} from the same tokens without padding; the state must take in real tokens only",
            )


@torch.no_grad()
def documents(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that documents packed into a row see neither each other nor padding; or are refused.

    ``prepare`` may refuse them, by a ValueError.
    """
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    z_other, u_other = inputs(mixer, d_model, seed=2)
    packed = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 2, 2], [0] * 9, [0, 1, 1, 1, 1, 1, 2, 2, 2]])
    right_padding, left_padding = torch.ones(2, BATCH, LENGTH, dtype=torch.bool)
    right_padding[1:, LENGTH - 1] = False
    left_padding[0, :1] = left_padding[1, :3] = False
    try:
        whole, _ = run(mixer, z, u, [LENGTH], documents=packed)
    except (ValueError, NotImplementedError):
        return  # said so; what may not be is mixing them up
    for valid in (None, right_padding, left_padding):
        whole, _ = run(mixer, z, u, [LENGTH], documents=packed, valid=valid)
        for cuts in CUTS:
            for document in range(3):
                own = (packed == document)[:, :, None]
                own = own if valid is None else own & valid[:, :, None]
                mixed, _ = run(
                    mixer,
                    torch.where(own, z, z_other),
                    torch.where(own, u, u_other),
                    cuts,
                    documents=packed,
                    valid=valid,
                )
                error = relative_error(mixed * own, whole * own)
                padded = "" if valid is None else " or the padding"
                require(
                    error < TOLERANCE,
                    mixer,
                    "documents",
                    f"document {document} moved by {error:.1e} when others in its row{padded} changed, with "
                    f"windows ending at {cuts}; honor window.documents_BT, or raise ValueError in prepare",
                )


PADDED_DOCUMENTS = (("000111222", "000111222", "001111122"), ("011222222", "001112222", "011111222"))
"""For those rows: padding is said to be of the document before it, of the one behind it, or to begin one."""


@torch.no_grad()
def padded_documents(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that each document of rows padded window by window is mixed as if it were alone; or refused.

    Whatever document padding is said to be of: it cuts none, and joins none.
    """
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    rows = PADDED_WINDOWS.split()
    valid = torch.tensor([[flag == "1" for flag in row] for row in rows])
    for numbers in PADDED_DOCUMENTS:
        packed = torch.tensor([[int(number) for number in row] for row in numbers])
        for cuts in ([4, LENGTH], [2, 4, 7, LENGTH]):
            try:
                mixed, _ = run(mixer, z, u, cuts, valid=valid, documents=packed)
            except (ValueError, NotImplementedError):
                return  # documents, or padding between them, are refused
            for row in range(BATCH):
                for document in packed[row, valid[row]].unique():
                    pick = slice(row, row + 1), valid[row] & (packed[row] == document)
                    alone, _ = run(mixer, z[pick], u[pick], [int(pick[1].sum())])
                    error = relative_error(mixed[pick], alone)
                    require(
                        error < TOLERANCE,
                        mixer,
                        "padded documents",
                        f"with windows ending at {cuts}, document {int(document)} of row {row} (real: "
                        f"{rows[row]}, documents: {numbers[row]}) differs by {error:.1e} from its tokens "
                        "alone; see window.real_first and window.documents_before",
                    )


@torch.no_grad()
def max_seq_len(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that room reserved for tokens, enough or not, changes no output."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    whole = forward(mixer, z, u)
    for reserved in (LENGTH, 2 * LENGTH, 4):
        for cuts in CUTS:
            mixed, _ = run(mixer, z, u, cuts, start=begin(mixer, max_seq_len=reserved))
            error = relative_error(mixed, whole)
            require(
                error < TOLERANCE,
                mixer,
                "max_seq_len",
                f"initial_state(max_seq_len={reserved}) moves outputs by {error:.1e} (windows ending at "
                f"{cuts})",
            )

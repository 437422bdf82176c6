"""Contracts of a mixer about tokens, windows, rows and states, in float64."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from implicit_blocks.interfaces import Mixer
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
    with_ids,
)
from implicit_blocks.windows import SequenceState, Window


@torch.no_grad()
def causality(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that the output of a token does not depend on later tokens.

    ``prepare`` of a mixer that is not causal must instead refuse a window after committed tokens.
    """
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    require(
        mixer.causal == spec.is_causal,
        mixer,
        "causality",
        f"causal is {mixer.causal}, but is_causal of the spec is {spec.is_causal}; make them equal",
    )
    if not mixer.causal:
        window = Window(batch_size=1, start=1, length=1, positions_BL=torch.ones(1, 1, dtype=torch.int64))
        try:
            mixer.prepare(with_ids(mixer, window, z[:1, :1]))
        except ValueError:
            return
        require(
            False,
            mixer,
            "causality",
            "causal is False, but prepare accepts a window after committed tokens; raise ValueError",
        )
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
            f"changing tokens from {position} on changes earlier outputs by {error:.1e}; mask later tokens",
        )


@torch.no_grad()
def window_splits(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that any division into windows gives the same outputs and the same final state."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    for injection in (u, None):
        whole = forward(mixer, z, injection)
        _, expected_state = run(mixer, z, injection, [LENGTH])
        for cuts in CUTS:
            parts, state = run(mixer, z, injection, cuts)
            error = relative_error(parts, whole)
            require(
                error < TOLERANCE,
                mixer,
                "window splits",
                f"windows ending at {cuts} differ from one window by {error:.1e}; "
                "check the state, its dtype, and positions",
            )
            error = state_error(state, expected_state)
            require(
                error < TOLERANCE,
                mixer,
                "window splits",
                f"windows ending at {cuts} change the final state by {error:.1e} compared to one window; "
                "a state must depend on the tokens only, not on the windows",
            )


@torch.no_grad()
def state_untouched(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that iterating on a window changes neither the committed state nor later outputs."""
    mixer = make(spec, d_model)
    z, u = inputs(mixer, d_model)
    committed = begin(mixer)
    if mixer.causal:
        _, state = run(mixer, z, u, [4])
        committed = SequenceState(BATCH, 4, torch.full((1,), 4), (state,))
    state = committed.layers[0]
    before = copy.deepcopy(state)
    window = committed.window(3, valid_BL=None, documents_BL=None, dtype=torch.float64)
    context = mixer.prepare(with_ids(mixer, window, z[:, 4:7]))
    original = z.clone()
    first = mixer(z[:, 4:7], u[:, 4:7], state, context)
    require_untouched(mixer, z, original)
    mixer(z[:, :3], u[:, :3], state, context)
    mixer.advance(z[:, 1:4], u[:, 1:4], state, context)
    again = mixer(z[:, 4:7], u[:, 4:7], state, context)
    require(
        state_error(state, before) == 0 and torch.equal(first, again),
        mixer,
        "state untouched by iteration",
        "a window that is mixed again has other values, or the given state has changed; return new tensors, "
        "keep nothing between calls, and draw no random numbers",
    )


@torch.no_grad()
def batch_independence(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that rows are independent and that ``select_rows`` selects rows of a state."""
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
            f"row {row} of the state differs from the state of row {row} alone",
        )


@contextmanager
def accepting_padding(mixer: Mixer) -> Iterator[None]:
    """Report a mixer that rejects padding: only packed documents may be rejected."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        require(
            False,
            mixer,
            "padding",
            f"prepare rejects padding ({error}); every batch of unequal rows has padding, and only "
            "packed documents may be rejected",
        )


@torch.no_grad()
def padding(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that padding on either side, of any value, does not change the outputs of real tokens."""
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
            f"padding on the {name} changes real tokens by {error:.1e}, or creates non-finite values; "
            "use window.valid_BL and positions_BL",
        )


PADDED_WINDOWS = """
    111111111
    001101111
    110011110
"""  # on one side of each window's tokens if windows end at 4; ``check_walk`` has gaps too


@torch.no_grad()
def padded_windows(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that rows with different padding in several windows equal the same tokens without padding."""
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
                f"{error:.1e} from the same tokens without padding; only real tokens may update the state",
            )


@torch.no_grad()
def documents(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that packed documents and padding do not affect each other.

    ``prepare`` may reject documents with a ValueError.
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
        return  # rejecting is allowed, mixing documents is not
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
                    f"document {document} changes by {error:.1e} when others in its row{padded} change, with "
                    f"windows ending at {cuts}; use window.documents_BT, or raise ValueError in prepare",
                )


PADDED_DOCUMENTS = (("000111222", "000111222", "001111122"), ("011222222", "001112222", "011111222"))
"""Document numbers for these rows: padding belongs to the document before or after it, or is its own."""


@torch.no_grad()
def padded_documents(spec: MixerSpec, d_model: int = D_MODEL) -> None:
    """Check that documents equal their tokens alone in rows padded in several windows.

    ``prepare`` may reject this. The document number of padding is arbitrary: it must neither separate nor
    join documents.
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
                return  # documents, or padding between them, are rejected
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
    """Check that ``max_seq_len``, sufficient or not, does not change outputs."""
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
                f"initial_state(max_seq_len={reserved}) changes outputs by {error:.1e} (windows ending at "
                f"{cuts})",
            )

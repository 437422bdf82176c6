"""Windows of a sequence: tokens that are solved together, the state after those before them, their division.

Shape legend: B batch, L tokens of a window, T tokens so far (committed and window), D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from implicit_blocks._utils.padding import PaddingPermutation, of_last_real
from implicit_blocks.specs.base import require_count

if TYPE_CHECKING:
    from implicit_blocks.interfaces import State
    from implicit_blocks.models.stack import Block
    from implicit_blocks.parallel.sequence import SequencePart

_T = TypeVar("_T")


@dataclass(frozen=True)
class Window:
    """Consecutive tokens that are solved together, after ``start`` committed ones.

    ``positions_BL`` (1 or B, L) int64 counts the real tokens of each row from 0, across documents.
    ``valid_BT`` (B, T) bool is False at padding; ``documents_BT`` (B, T) int64 numbers the documents packed
    into a row. Both include the committed tokens, T = start + length, and are None where there is no padding
    or a single document. ``gaps`` is False where no padding separates two tokens of a row, ``trailing`` is
    True where padding comes only after the real tokens of each row. ``dtype`` is that
    of the residual stream. ``u_rows_BL`` (B, L) int64 has the row of the injection table for each token,
    where all mixers support such a table (``Mixer.supports_injection_table``). ``ids_BL`` (B, L) int64 has
    the token IDs, where a mixer needs them (``Mixer.needs_token_ids``). With ``part`` other ranks solve the
    other parts of the sequence at the same time, in windows of the same length; mixers get the state before
    the window from them in every call.
    """

    batch_size: int
    start: int
    length: int
    positions_BL: Tensor
    valid_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    gaps: bool = True
    trailing: bool = False
    dtype: torch.dtype = torch.float32
    u_rows_BL: Tensor | None = None
    ids_BL: Tensor | None = None
    part: SequencePart | None = None
    shared: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """The device of the window's tokens."""
        return self.positions_BL.device

    @property
    def valid_BL(self) -> Tensor | None:
        """Where the window's own tokens are real, (B, L) bool; None: everywhere."""
        return None if self.valid_BT is None else self.valid_BT[:, self.start :]

    @property
    def documents_BL(self) -> Tensor | None:
        """The documents of the window's own tokens, (B, L) int64; None: a single document."""
        return None if self.documents_BT is None else self.documents_BT[:, self.start :]

    def real_first(self) -> PaddingPermutation | None:
        """Return the permutation that moves padding after each row's real tokens; None without padding."""
        valid = self.valid_BL
        if valid is None:
            return None
        return self.once("real first", lambda: PaddingPermutation.of(valid))

    def documents_before(self, count: int) -> Tensor | None:
        """Return the documents of the last real tokens before the window, (B, S) int64, the latest last.

        S is ``count``, or the number of committed tokens if that is less. None for a single document. Rows
        with fewer real tokens begin with the documents of padding.
        """
        if self.documents_BT is None:
            return None
        start = self.start
        valid = None if self.valid_BT is None else self.valid_BT[:, :start]
        return of_last_real(self.documents_BT[:, :start], valid, count)

    def once(self, key: Any, make: Callable[[], _T]) -> _T:
        """Return ``make()``, called once per window and key: masks and rotation tables shared by layers."""
        if key not in self.shared:
            self.shared[key] = make()
        value: _T = self.shared[key]
        return value

    def cut(self, first: int, stop: int) -> Window:
        """Return the window of its tokens from ``first`` up to ``stop``, those before them committed."""
        end = self.start + stop
        return replace(
            self,
            start=self.start + first,
            length=stop - first,
            trailing=False,
            positions_BL=self.positions_BL[:, first:stop],
            valid_BT=None if self.valid_BT is None else self.valid_BT[:, :end],
            documents_BT=None if self.documents_BT is None else self.documents_BT[:, :end],
            u_rows_BL=None if self.u_rows_BL is None else self.u_rows_BL[:, first:stop],
            ids_BL=None if self.ids_BL is None else self.ids_BL[:, first:stop],
            shared={},
        )

    def select_rows(self, rows: Tensor) -> Window:
        """Return the window of these rows, (R,) int64 indices."""
        positions = self.positions_BL if self.positions_BL.shape[0] == 1 else self.positions_BL[rows]
        return replace(
            self,
            batch_size=rows.numel(),
            positions_BL=positions,
            valid_BT=None if self.valid_BT is None else self.valid_BT[rows],
            documents_BT=None if self.documents_BT is None else self.documents_BT[rows],
            u_rows_BL=None if self.u_rows_BL is None else self.u_rows_BL[rows],
            ids_BL=None if self.ids_BL is None else self.ids_BL[rows],
            shared={},
        )


@dataclass(frozen=True)
class SequenceState:
    """The state between windows.

    ``length`` counts the committed tokens T, padding included; ``next_position`` (1 or B,) counts the real
    ones. ``valid_BT`` and ``documents_BT`` are None as long as there was no padding and a single document;
    ``layers`` has the state of each mixer: prelude, core, coda. ``last_BD`` is the solution of each row's
    last real token, from which a warm start begins; None before the first token. Continuing from a state does
    not change it, unless it was created with ``max_seq_len``: the buffers are then shared, and a second
    continuation from the same state overwrites the first. With ``part`` the preceding tokens are not
    committed: other ranks solve them at the same time.
    """

    batch_size: int
    length: int
    next_position: Tensor
    layers: tuple[State, ...]
    valid_BT: Tensor | None = None
    documents_BT: Tensor | None = None
    last_BD: Tensor | None = None
    part: SequencePart | None = None

    def window(
        self,
        length: int,
        *,
        valid_BL: Tensor | None,
        documents_BL: Tensor | None,
        dtype: torch.dtype,
        gaps: bool = True,
        trailing: bool = False,
    ) -> Window:
        """Return the window of the next ``length`` tokens; ``gaps`` and ``trailing`` as in ``Window``."""
        valid = self._extend("valid", self.valid_BT, valid_BL, length, True)
        documents = self._extend("documents", self.documents_BT, documents_BL, length, 0)
        window = Window(
            batch_size=self.batch_size,
            start=self.length,
            length=length,
            positions_BL=self.next_position[:, None] + torch.arange(length, device=self.next_position.device),
            valid_BT=valid,
            documents_BT=documents,
            gaps=gaps,
            trailing=trailing and self.length == 0,
            dtype=dtype,
            part=self.part,
        )
        own = window.valid_BL
        if own is None:
            return window
        positions = (self.next_position[:, None] + own.cumsum(1) - 1).clamp(min=0)  # padding has no position
        return replace(window, positions_BL=positions)

    def _extend(
        self, name: str, before_BT: Tensor | None, new_BL: Tensor | None, length: int, default: bool | int
    ) -> Tensor | None:
        """Concatenate the flags of the committed tokens and of new ones; missing flags take the default.

        New tokens without document numbers, after tokens with them, belong to the document of the row's last
        real token.
        """
        shape = (self.batch_size, length)
        if new_BL is not None and new_BL.shape != shape:
            raise ValueError(f"{name} has shape {tuple(new_BL.shape)}; the window's tokens have {shape}")
        if before_BT is None and new_BL is None:
            return None
        like = before_BT if before_BT is not None else new_BL
        assert like is not None
        if before_BT is None:
            before_BT = like.new_full((self.batch_size, self.length), default)
        elif new_BL is None:
            last = None if name == "valid" else of_last_real(before_BT, self.valid_BT, 1)
            new_BL = before_BT.new_ones(shape) if last is None else last.expand(shape)
        assert new_BL is not None
        return torch.cat((before_BT, new_BL), dim=1)

    def after(self, window: Window, layers: tuple[State, ...], z_BLD: Tensor | None = None) -> SequenceState:
        """Return the state once ``window``, whose solution is ``z_BLD``, has been committed."""
        taken: Tensor | int = window.length
        if window.valid_BL is not None:
            taken = window.valid_BL.sum(1)
        return SequenceState(
            batch_size=self.batch_size,
            length=self.length + window.length,
            next_position=self.next_position + taken,
            layers=layers,
            valid_BT=window.valid_BT,
            documents_BT=window.documents_BT,
            last_BD=None if z_BLD is None else self._last_of(window.valid_BL, z_BLD.detach()),
        )

    def _last_of(self, valid_BL: Tensor | None, z_BLD: Tensor) -> Tensor:
        """Return the solution of each row's last real token so far, (B, D); zeros before the first."""
        if valid_BL is None:
            return z_BLD[:, -1]
        order = torch.arange(1, valid_BL.shape[1] + 1, device=valid_BL.device)
        end = (valid_BL * order).amax(1)  # number of tokens up to and including the last real one
        found = z_BLD[torch.arange(len(end), device=end.device), (end - 1).clamp(min=0)]
        before = torch.zeros_like(found) if self.last_BD is None else self.last_BD
        return torch.where(end[:, None] > 0, found, before)

    def warm_start(self, window: Window, start_BLD: Tensor) -> Tensor:
        """Return the warm start of a window, (B, L, D).

        All tokens of the window start at the solution of the row's last committed real token. Tokens without
        such a predecessor in their row and document start at ``start_BLD``.
        """
        if self.last_BD is None:
            return start_BLD
        follows = (self.next_position > 0)[:, None]
        before = window.documents_before(1)
        if before is not None:
            follows = follows & (window.documents_BL == before)
        return torch.where(follows[:, :, None], self.last_BD[:, None].to(start_BLD.dtype), start_BLD)

    def truncate(self, tokens: int, blocks: Sequence[Block]) -> SequenceState:
        """Return the state without its last ``tokens`` tokens, padding included.

        ``blocks`` are the model's ``state_blocks()``.

        Raises:
            ValueError: if there are fewer tokens, or a mixer cannot remove tokens.

        """
        if not 0 <= tokens <= self.length:
            raise ValueError(
                f"{tokens} tokens cannot be removed from the {self.length} committed ones; choose at most "
                "as many"
            )
        kept = self.length - tokens
        taken: Tensor | int = tokens if self.valid_BT is None else self.valid_BT[:, kept:].sum(1)
        return SequenceState(
            batch_size=self.batch_size,
            length=kept,
            next_position=self.next_position - taken,
            layers=tuple(
                block.mixer.truncate(state, kept) for block, state in zip(blocks, self.layers, strict=True)
            ),
            valid_BT=None if self.valid_BT is None else self.valid_BT[:, :kept],
            documents_BT=None if self.documents_BT is None else self.documents_BT[:, :kept],
            last_BD=self.last_BD if tokens == 0 else None,  # earlier solutions were not kept
        )

    def select_rows(self, rows: Tensor, blocks: Sequence[Block]) -> SequenceState:
        """Return the state of these rows, (R,) int64 indices; rows may repeat, as beam search needs.

        ``blocks`` are the model's ``state_blocks()``.
        """
        one_for_all = self.next_position.shape[0] == 1
        return SequenceState(
            batch_size=rows.numel(),
            length=self.length,
            next_position=self.next_position if one_for_all else self.next_position[rows],
            layers=tuple(
                block.mixer.select_rows(state, rows) for block, state in zip(blocks, self.layers, strict=True)
            ),
            valid_BT=None if self.valid_BT is None else self.valid_BT[rows],
            documents_BT=None if self.documents_BT is None else self.documents_BT[rows],
            last_BD=None if self.last_BD is None else self.last_BD[rows],
        )


class Inputs(NamedTuple):
    """Embedded tokens and the flags that belong to them; ``ids_BL``, the masks and documents may be None.

    ``valid_BL`` (B, L) bool is False at padding, ``gaps`` says whether padding separates real tokens of a
    row, ``trailing`` whether it only follows them. ``first`` is the number of earlier tokens of the call.
    """

    x_BLD: Tensor
    ids_BL: Tensor | None
    valid_BL: Tensor | None
    documents_BL: Tensor | None
    gaps: bool
    first: int = 0
    trailing: bool = False

    @property
    def length(self) -> int:
        """The number of tokens, L."""
        return self.x_BLD.shape[1]

    def windows(self, length: int | None) -> list[Inputs]:
        """Return the inputs of consecutive windows of ``length`` tokens; the last may be shorter."""
        windows: list[Inputs] = []
        if length is None or length >= self.length:
            return [self]
        for first in range(0, self.length, length):
            part = slice(first, first + length)
            window = Inputs(
                self.x_BLD[:, part],
                None if self.ids_BL is None else self.ids_BL[:, part],
                None if self.valid_BL is None else self.valid_BL[:, part],
                None if self.documents_BL is None else self.documents_BL[:, part],
                self.gaps,
                first,
                self.trailing,
            )
            windows.append(window)
        return windows

    def share(self, window: Inputs) -> Tensor | float:
        """Return the share of each row's real tokens, (B,), that a window has; one number without padding."""
        if self.valid_BL is None or window.valid_BL is None:
            return window.length / self.length
        return window.valid_BL.sum(1) / self.valid_BL.sum(1).clamp(min=1)


def check_inputs(
    x_BLD: Tensor,
    *,
    ids_BL: Tensor | None,
    attention_mask: Tensor | None,
    documents: Tensor | None,
    state: SequenceState | None,
    window_length: int | None,
) -> Inputs:
    """Return the inputs of ``encode`` with their padding found, after checking that they fit together.

    Raises:
        ValueError: where shapes or the state do not fit, the window is shorter than a token, or document
            numbers decrease.

    """
    batch, length = x_BLD.shape[:2]
    if window_length is not None:
        require_count("window_length", window_length)
    if state is not None and state.batch_size != batch:
        raise ValueError(
            f"the state has {state.batch_size} rows, the tokens have {batch}; give the next tokens of each "
            "row of the state"
        )
    valid, gaps, trailing = None, False, False
    if attention_mask is not None:
        valid, gaps, trailing = _padding(attention_mask, (batch, length))
        valid = None if valid is None else valid.to(x_BLD.device, non_blocking=True)
    if documents is not None:
        _check_documents(documents, valid, (batch, length))
    return Inputs(x_BLD, ids_BL, valid, documents, gaps, trailing=trailing)


def check_windows(*, commit: bool, bidirectional: bool) -> None:
    """Raise ValueError where tokens are to be committed, but a mixer sees later tokens."""
    if commit and bidirectional:
        raise ValueError(
            "a mixer of this model sees later tokens, so that no token can be committed on its own; "
            "leave out return_state and window_length, and do not generate"
        )


def _padding(attention_mask: Tensor, shape: tuple[int, int]) -> tuple[Tensor | None, bool, bool]:
    """Return where tokens are real, (B, L) bool, None: everywhere; and ``gaps`` and ``trailing``."""
    if attention_mask.shape != shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, the tokens {shape}; give one flag "
            "per token"
        )
    valid = attention_mask.bool()
    begun = (valid[:, 1:] & ~valid[:, :-1]).sum(1) + valid[:, 0]  # runs of real tokens
    facts = torch.stack((valid.all(), (begun > 1).any(), valid[:, 0].all()))
    whole, parted, begins = facts.tolist()  # one synchronization for all, none with a mask on the host
    return (None, False, False) if whole else (valid, parted, begins and not parted)


def _check_documents(documents: Tensor, valid: Tensor | None, shape: tuple[int, int]) -> None:
    """Refuse documents of another shape, and decreasing numbers, which not every mixer could tell apart."""
    if documents.shape != shape:
        raise ValueError(
            f"documents have shape {tuple(documents.shape)}, the tokens {shape}; give one number per token"
        )
    if documents.device.type != "cpu" or torch.compiler.is_compiling():  # reading would synchronize a GPU
        return
    if valid is not None:  # padding may carry any number: it counts to the document before it
        lowest = torch.iinfo(torch.int64).min
        documents = documents.long().masked_fill(~valid, lowest)
        documents = documents.where(valid, documents.cummax(1).values)
    back = (documents[:, 1:] < documents[:, :-1]).nonzero()
    if len(back):
        row, place = back[0].tolist()
        before, after = documents[row, place : place + 2].tolist()
        raise ValueError(
            f"documents of row {row} go back from {before} to {after}; number the documents of a row in "
            "ascending order"
        )

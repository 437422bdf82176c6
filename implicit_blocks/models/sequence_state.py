"""The state after committed tokens, and the windows that follow them.

Shape legend: B batch, L tokens of a window, T committed tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from implicit_blocks._utils.padding import of_last_real
from implicit_blocks.interfaces import State, Window

if TYPE_CHECKING:
    from implicit_blocks.models.stack import Block
    from implicit_blocks.parallel.sequence import SequencePart


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
    ) -> Window:
        """Return the window of the next ``length`` tokens; ``gaps`` as in ``Window``."""
        valid = self._extend("valid", self.valid_BT, valid_BL, length, True)
        documents = self._extend("documents", self.documents_BT, documents_BL, length, 0)
        if valid is None:
            positions = self.next_position[:, None] + torch.arange(length, device=self.next_position.device)
        else:
            steps = valid[:, self.length :].cumsum(1)
            positions = (self.next_position[:, None] + steps - 1).clamp(min=0)
        return Window(
            batch_size=self.batch_size,
            start=self.length,
            length=length,
            positions_BL=positions,
            valid_BT=valid,
            documents_BT=documents,
            gaps=gaps,
            dtype=dtype,
            part=self.part,
        )

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

"""What surrounds the core in decoding slots: prelude and injection before the search, coda after it.

Both run once per token. All tensors have fixed addresses and no value is read from the device.

Shape legend: S slots, R of them in a procedure, D model width, C core width, U width of the mixers' input
projections, E width of what the injection reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from implicit_blocks.interfaces import SlotStates
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.parts import ModelWeights, OutputMap, scaled
from implicit_blocks.models.stack import Block, BoundMap, Stack
from implicit_blocks.weights.cache import WeightCache
from implicit_blocks.windows import Window


class SlotEnds:
    """The inputs of the core and the outputs of the model, of S slots.

    Args:
        model: the model.
        weights: its prepared weights.
        slots: S.
        max_seq_len: maximum number of tokens per slot.
        dtype: of keys and values.

    Raises:
        ValueError: a mixer does not support slots.

    """

    def __init__(
        self, model: LanguageModel, weights: ModelWeights, *, slots: int, max_seq_len: int, dtype: torch.dtype
    ) -> None:
        self.model, self.weights, self.max_seq_len = model, weights, max_seq_len
        device = model.embedding.weight.device

        def states(stack: Stack | None) -> list[SlotStates]:
            blocks: list[Block] = [] if stack is None else stack.blocks()
            return [
                block.mixer.slots(slots, device=device, dtype=dtype, max_seq_len=max_seq_len)
                for block in blocks
            ]

        self.prelude, self.coda = states(model.prelude), states(model.coda)
        x_11D = model.embedding(torch.zeros(1, 1, dtype=torch.int64, device=device))
        u, e = model.inject(x_11D, weights)  # of the shapes and types that a token has
        self.u_SU = None if u is None else u.new_zeros(slots, u.shape[-1])
        self.e_SE = None if e is None else e.new_zeros(slots, e.shape[-1])
        spec, stream = model.spec, model.stream_dtype
        self.core_SC = torch.zeros(slots, spec.core_width, device=device, dtype=stream)
        """The core's output at each slot's last committed token."""
        self.c_SD = self.core_SC.new_zeros(slots, spec.d_model) if spec.core_residual else None
        self.plain = model.coda is None and model.norm is None and model.core_projection is None
        self.hidden_SD = self.core_SC if self.plain else self.core_SC.new_zeros(slots, spec.d_model)
        """The input of the head at each slot's last committed token."""
        self.pending_S = torch.zeros(slots, dtype=torch.bool, device=device)
        """Whether the core's output at the last committed token has not passed the coda."""

    def begin(self, tokens_R: Tensor, rows_R: Tensor, lengths_R: Tensor, on_R: Tensor) -> Tensor:
        """Run the prelude on the next token of each slot where ``on_R`` is True, and store what is injected.

        Returns the start of the search, (R, C).
        """
        model, positions = self.model, lengths_R[:, None]
        x_R1D = scaled(model.embedding(tokens_R[:, None]), model.spec.embedding_scale)
        c_R1D = x_R1D
        if model.prelude is not None:
            stream = x_R1D.to(model.stream_dtype)
            f = self._bind(
                model.prelude, self.prelude, rows_R, lengths_R, stream, tokens_R, self.weights.prelude
            )
            c_R1D, after = f.commit(stream)
            for states, layer in zip(self.prelude, after, strict=True):
                states.write(rows_R, layer, on_R)
        if model.prelude_norm is not None:
            c_R1D = model.prelude_norm(c_R1D)
        u, e = model.inject(c_R1D, self.weights)
        for kept, new in ((self.u_SU, u), (self.e_SE, e), (self.c_SD, c_R1D)):
            if kept is not None and new is not None:
                kept[rows_R] = torch.where(on_R[:, None], new[:, 0].to(kept.dtype), kept[rows_R])
        return model.initial_point(x_R1D, c_R1D, positions)[:, 0]

    def finish(self, rows_R: Tensor, lengths_R: Tensor, tokens_R: Tensor) -> None:
        """Compute the head's input of slots whose last committed token has not passed the coda.

        Slots that search stay as they are: what is computed for them is written after their tokens.
        """
        if self.plain:
            return
        model, pending = self.model, self.pending_S[rows_R]
        at_R = (lengths_R - pending.long()).clamp(max=self.max_seq_len - 1)
        z_R1C = self.core_SC[rows_R][:, None]
        coda = None
        if model.coda is not None:
            coda = self._bind(
                model.coda,
                self.coda,
                rows_R,
                at_R,
                self.hidden_SD[rows_R][:, None],
                tokens_R,
                self.weights.coda,
            )
        c_R1D = None if self.c_SD is None else self.c_SD[rows_R][:, None]
        hidden, after = OutputMap.of(model, c_R1D, coda).commit(z_R1C)
        for states, layer in zip(self.coda, after, strict=True):
            states.write(rows_R, layer, pending)
        self.hidden_SD[rows_R] = torch.where(pending[:, None], hidden[:, 0], self.hidden_SD[rows_R])
        self.pending_S.index_fill_(0, rows_R, False)  # an assigned scalar would be copied from the host

    def _bind(
        self,
        stack: Stack,
        states: Sequence[SlotStates],
        rows_R: Tensor,
        lengths_R: Tensor,
        start_R1D: Tensor,
        tokens_R: Tensor,
        weights: WeightCache | None,
    ) -> BoundMap:
        assert weights is not None
        window = window_of_slots(self.model, lengths_R, tokens_R)
        gathered = tuple(each.gather(rows_R, lengths_R) for each in states)
        return stack.bind(window, states=gathered, start_BLD=start_R1D, weights=weights)


def window_of_slots(model: LanguageModel, lengths_R: Tensor, tokens_R: Tensor | None) -> Window:
    """Return a window of one token in each of some slots, after ``lengths_R`` tokens."""
    ids_R1 = None
    if tokens_R is not None and model.needs_token_ids:
        ids_R1 = tokens_R[:, None]
    return Window(
        batch_size=len(lengths_R),
        start=1,  # at least; the states hold the length of each slot
        length=1,
        positions_BL=lengths_R[:, None],
        dtype=model.stream_dtype,
        ids_BL=ids_R1,
    )

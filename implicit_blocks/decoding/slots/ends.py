"""What surrounds the core in decoding slots: prelude and injection before the search, coda after it.

Both run once per token. All tensors have fixed addresses and no value is read from the device.

Shape legend: S slots, R of them in a procedure, D model width, C core width, U width of the mixers' input
projections, E width of what the injection reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from implicit_blocks.decoding.slots.fused_layers import FusedStep
from implicit_blocks.decoding.slots.fused_map import FusedStack, fused_stack
from implicit_blocks.interfaces import SlotStates
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.parts import ModelWeights, OutputMap, scaled
from implicit_blocks.models.stack import Block, Stack
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
        self.fused_prelude: FusedStack | None = None
        self.fused_coda: FusedStack | None = None
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

    def fuse(self) -> None:
        """Run prelude and coda in fused kernels where these support them."""
        model, weights, room = self.model, self.weights, self.max_seq_len
        self.fused_prelude = fused_stack(model, "prelude", self.prelude, weights.prelude, max_seq_len=room)
        self.fused_coda = fused_stack(model, "coda", self.coda, weights.coda, max_seq_len=room)

    def begin(self, tokens_R: Tensor, rows_R: Tensor, lengths_R: Tensor, on_R: Tensor) -> Tensor:
        """Run the prelude on the next token of each slot where ``on_R`` is True, and store what is injected.

        Returns the start of the search, (R, C).
        """
        model, positions = self.model, lengths_R[:, None]
        x_R1D = scaled(model.embedding(tokens_R[:, None]), model.spec.embedding_scale)
        c_R1D = x_R1D
        if model.prelude is not None:
            stream, at_R = x_R1D.to(model.stream_dtype), lengths_R
            if self.fused_prelude is not None:  # kernels write the keys of all slots: after their tokens
                at_R = torch.where(on_R, lengths_R, (lengths_R + 1).clamp(max=self.max_seq_len - 1))
            c_R1D = self._run("prelude", stream, rows_R, at_R, tokens_R, on_R)
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
        output = OutputMap.of(model, None if self.c_SD is None else self.c_SD[rows_R][:, None])
        h_R1D = output.enter(self.core_SC[rows_R][:, None])
        if model.coda is not None:
            h_R1D = self._run("coda", h_R1D, rows_R, at_R, tokens_R, pending)
        hidden = output.leave(h_R1D)
        self.hidden_SD[rows_R] = torch.where(pending[:, None], hidden[:, 0], self.hidden_SD[rows_R])
        self.pending_S.index_fill_(0, rows_R, False)  # an assigned scalar would be copied from the host

    def _run(
        self, name: str, h_R1D: Tensor, rows_R: Tensor, at_R: Tensor, tokens_R: Tensor, where_R: Tensor
    ) -> Tensor:
        """Return the output of prelude or coda, (R, 1, D); commits where ``where_R`` is True."""
        fused: FusedStack | None = getattr(self, f"fused_{name}")
        if fused is not None:
            step = FusedStep(rows_R, None, at_R, where_R)
            out_RD = fused.core(h_R1D[:, 0].contiguous(), step)
            fused.move_on(step)
            return out_RD[:, None]
        window = window_of_slots(self.model, at_R, tokens_R)
        return self.commit(name, h_R1D, rows_R, window, where_R)

    def commit(
        self,
        name: str,
        h_RLD: Tensor,
        rows_R: Tensor | None,
        window: Window,
        where_R: Tensor,
        prefix: Window | None = None,
    ) -> Tensor:
        """Return the output of prelude or coda, layer by layer; commit where ``where_R`` (R,) bool is True.

        Args:
            name: ``prelude`` or ``coda``.
            h_RLD: its input.
            rows_R: the slot of each row; None: all slots.
            window: of the tokens, each row after those that its slot has committed.
            where_R: the rows that commit.
            prefix: what they commit, as of ``BoundMap.commit``; None: the window.

        """
        stack: Stack = getattr(self.model, name)
        weights: WeightCache = getattr(self.weights, name)
        states: list[SlotStates] = getattr(self, name)
        gathered = tuple(each.gather(rows_R, window.positions_BL[:, 0]) for each in states)
        f = stack.bind(window, states=gathered, start_BLD=h_RLD, weights=weights)
        out, after = f.commit(h_RLD, prefix)
        for each, layer in zip(states, after, strict=True):
            each.write(rows_R, layer, where_R)
        return out


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

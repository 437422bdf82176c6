"""What the chunked scan prepares for a whole window at once, before walking it tile by tile.

Everything here is small beside the inputs: decays are one number a token and head, the Gram matrices Q
numbers a token and group.

Shapes: B batch, L length, H heads, P head width, G groups, N state width, K chunks, Q tokens a chunk. A
lower-case b is batch and groups together.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from implicit_blocks.ops.ssd.recurrence import LOWEST_LOG_DECAY, accumulation_dtype

# Bytes of the largest intermediate of a tile, on a CPU; some six of them are alive at once. Half and twice as
# many cost about the same, at 130M widths and with many rows of small heads; an eighth costs 30 % more.

TILE_BYTES = 1 << 20


class Inputs(NamedTuple):
    """A window as it was given; :func:`implicit_blocks.ops.ssd.ssd` says what each is."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    documents: Tensor | None
    initial_document: Tensor | None


class Window:
    """A window cut into K chunks of equal length, with its decays and Gram matrices.

    The chunks are as few as ``chunk_size`` allows and equally long; fewer than K tokens of padding, with a
    step size of zero, fill the last.
    """

    def __init__(self, inputs: Inputs, chunk_size: int) -> None:
        self.inputs = inputs
        self.batch, self.length, self.heads, self.width = inputs.x.shape
        self.groups, self.d_state = inputs.B.shape[2:]
        self.chunks = -(-self.length // chunk_size)
        self.chunk = -(-self.length // self.chunks)
        self.dtype = accumulation_dtype(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C)
        self.x_BKQHP = self.cut(inputs.x)

        dt_BHKQ = self.cut(inputs.dt).permute(0, 3, 1, 2)
        # Log decays are summed in float64: only their differences count, and a float32 sum over strong decays
        # has lost the digits of the weak ones. Even a float64 sum has, over absurd ones; what is cut off here
        # decays to zero in float64 all the same.
        log_decay = dt_BHKQ.double() * inputs.A.double()[:, None, None]
        self.cut_off_BHKQ = log_decay < LOWEST_LOG_DECAY
        self.log_decay_BHKQ = log_decay.clamp_(min=LOWEST_LOG_DECAY).cumsum(3)
        carry_in = self.log_decay_BHKQ.exp()
        carry_out = (self.log_decay_BHKQ[..., -1:] - self.log_decay_BHKQ).exp_()
        self.B_KbQN, self.C_KbQN = self.by_chunk(inputs.B), self.by_chunk(inputs.C)
        gram_KbQQ = torch.matmul(self.C_KbQN, self.B_KbQN.mT).tril_()
        self.same_KBQQ: Tensor | None = None
        if inputs.documents is not None:
            documents_BKQ = self.cut(inputs.documents)
            if self.padding:
                documents_BKQ.view(self.batch, -1)[:, self.length :] = inputs.documents[:, -1:]
            last_BK = documents_BKQ[:, :, -1]
            first = documents_BKQ[:, 0, 0] if inputs.initial_document is None else inputs.initial_document
            before_BK = torch.cat([first[:, None], last_BK[:, :-1]], dim=1)
            carry_in *= (documents_BKQ == before_BK[..., None])[:, None]
            carry_out *= (documents_BKQ == last_BK[..., None])[:, None]
            self.same_KBQQ = (documents_BKQ[..., :, None] == documents_BKQ[..., None, :]).transpose(0, 1)
            self._cut_documents(gram_KbQQ)
        self.gram_KbQQ = gram_KbQQ
        self.dt_BHKQ = dt_BHKQ.to(self.dtype)
        self.carry_in_BHKQ = carry_in.to(self.dtype)  # from the state before a chunk to each token
        self.carry_out_BHKQ = carry_out.to(self.dtype)  # from each token to the state after the chunk
        self.weight_BHKQ = self.carry_out_BHKQ * self.dt_BHKQ

    @property
    def padding(self) -> int:
        """Tokens added at the end."""
        return self.chunks * self.chunk - self.length

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """(B, H, P, N)."""
        return self.batch, self.heads, self.width, self.d_state

    def row_slices(self) -> list[slice]:
        """Cut the batch so that a tile fits the cache; accelerators take all rows at once."""
        rows = self.batch
        if self.inputs.x.device.type == "cpu":
            widest = max(self.chunk, self.width)
            rows = max(1, TILE_BYTES // (self.dtype.itemsize * self.heads * self.chunk * widest))
            rows = -(-self.batch // -(-self.batch // rows))
        return [slice(start, min(start + rows, self.batch)) for start in range(0, self.batch, rows)]

    def cut(self, t_BL: Tensor) -> Tensor:
        """Cut (B, L, …) into (B, K, Q, …), padded by zeros; a view where nothing needs padding."""
        if self.padding:
            t_BL = pad(t_BL, (0, 0) * (t_BL.ndim - 2) + (0, self.padding))
        return t_BL.view(t_BL.shape[0], self.chunks, self.chunk, *t_BL.shape[2:])

    def by_chunk(self, t_BLGN: Tensor) -> Tensor:
        """Bring B or C to (K, B·G, Q, N), in the type of the accumulation."""
        t = self.cut(t_BLGN).to(self.dtype).permute(1, 0, 3, 2, 4)
        return t.reshape(self.chunks, self.batch * self.groups, self.chunk, self.d_state)

    def from_chunks(self, t_KbQN: Tensor) -> Tensor:
        """Undo :meth:`by_chunk`, but for the type: (B, L, G, N)."""
        t = t_KbQN.view(self.chunks, self.batch, self.groups, self.chunk, self.d_state).permute(1, 0, 3, 2, 4)
        return t.flatten(1, 2)[:, : self.length]

    def finish_gradients(self, given: "DecayGradients", dgram_KbQQ: Tensor) -> tuple[Tensor, Tensor]:
        """Complete the gradients that the tiles left in parts: of dt and A.

        Also masks the gradient of the Gram matrices, in place.
        """
        dgram_KbQQ.tril_()
        self._cut_documents(dgram_KbQQ)
        # A token's decay is passed by everything that goes from an earlier token, or the state before the
        # chunk, to itself or a later token, or the state after it.
        from_start, to_end = given.from_start.double(), given.to_end.double()
        da_BHKQ = given.within + from_start.flip(3).cumsum(3).flip(3) + (to_end.cumsum(3) - to_end)
        da_BHKQ += given.through[..., None]
        da_BHKQ.masked_fill_(self.cut_off_BHKQ, 0.0)
        dA_H = (da_BHKQ * self.dt_BHKQ).sum((0, 2, 3))
        ddt_BHKQ = given.direct + da_BHKQ * self.inputs.A.double()[:, None, None]
        return ddt_BHKQ.permute(0, 2, 3, 1).flatten(1, 2)[:, : self.length], dA_H

    def _cut_documents(self, t_KbQQ: Tensor) -> None:
        if self.same_KBQQ is not None:
            t_KbQQ.view(self.chunks, self.batch, self.groups, self.chunk, self.chunk).mul_(
                self.same_KBQQ[:, :, None]
            )


@dataclass(frozen=True, slots=True)
class DecayGradients:
    """Parts of the gradients of log decays and step sizes, gathered tile by tile: (B, H, K, Q)."""

    within: Tensor  # what passes a token's decay from other tokens of the chunk to it or others
    from_start: Tensor  # from the state before the chunk to a token
    to_end: Tensor  # from a token to the state after its chunk
    through: Tensor  # from state to state, (B, H, K)
    direct: Tensor  # of dt where it multiplies x

    @classmethod
    def zeros(cls, window: Window) -> "DecayGradients":
        """Nothing gathered yet."""
        per_chunk = window.dt_BHKQ.new_zeros(window.dt_BHKQ.shape[:3])
        return cls(
            within=torch.zeros_like(window.dt_BHKQ),
            from_start=torch.zeros_like(window.dt_BHKQ),
            to_end=torch.zeros_like(window.dt_BHKQ),
            through=per_chunk,
            direct=torch.zeros_like(window.dt_BHKQ),
        )

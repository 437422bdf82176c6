"""The chunked scan, tile by tile: the preparation of a window, one tile, and the walk over all tiles.

A tile is a few batch rows by one chunk of tokens. Its intermediate values stay in the processor's cache; the
same passes over whole sequences, with the chunk as one more batch dimension, cost more than the matrix
products. The buffers of a tile are reused for the next. The window's own tensors are small beside the inputs:
decays are one number per token and head, the Gram matrices Q numbers per token and group.

Shapes: B batch (the rows of the tile), L length, H heads, P head width, G groups, N state width, K chunks, Q
tokens per chunk (i and j are positions in it, rows and columns of a Q × Q matrix). A lower-case b is batch
and groups together, F the heads of one group folded with their width, (H/G)·P.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

# The exponential of smaller values is zero, also in float64.
LOWEST_LOG_DECAY = -800.0


def accumulation_dtype(*tensors: Tensor) -> torch.dtype:
    """Return the dtype of decays and states: float64 if any input has it, else float32."""
    return torch.float64 if any(t.dtype == torch.float64 for t in tensors) else torch.float32


# Bytes of the largest intermediate of a tile on a CPU; about six of them exist at the same time. Half and
# twice the size cost about the same, at 130M widths and with many rows of small heads; an eighth of it costs
# 30 % more.

TILE_BYTES = 1 << 20

# Chunks per saved state. Saving every state costs twice the memory of x at 130M widths. The backward pass
# recomputes the states between in the cache: a quarter of the memory for 3 % more time.
KEEP_EVERY = 4


class Inputs(NamedTuple):
    """The arguments of a scan, as :func:`implicit_blocks.ops.ssd.ssd` documents them."""

    x: Tensor
    dt: Tensor
    A: Tensor
    B: Tensor
    C: Tensor
    documents: Tensor | None
    initial_document: Tensor | None


class Window:
    """A window cut into K chunks of equal length, with its decays and Gram matrices.

    There are as few chunks as ``chunk_size`` allows, all of the same length; fewer than K tokens of padding,
    with a step size of zero, fill the last one.
    """

    def __init__(self, inputs: Inputs, chunk_size: int) -> None:
        self.inputs = inputs
        self.batch, self.length, self.heads, self.width = inputs.x.shape
        self.groups, self.d_state = inputs.B.shape[2:]
        self.state_shape = (self.batch, self.heads, self.width, self.d_state)
        self.chunks = -(-self.length // chunk_size)
        self.chunk = -(-self.length // self.chunks)
        self.dtype = accumulation_dtype(inputs.x, inputs.dt, inputs.A, inputs.B, inputs.C)
        self.x_BKQHP = self.cut(inputs.x)

        dt_BHKQ = self.cut(inputs.dt).permute(0, 3, 1, 2)
        # Log decays are summed in float64: only their differences matter, and a float32 sum over strong
        # decays loses the digits of the weak ones. Even a float64 sum does for extreme decays; the values
        # that are clamped here decay to zero in float64 anyway.
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

    def row_slices(self) -> list[slice]:
        """Cut the batch so that a tile fits the cache; accelerators use all rows in one tile."""
        rows = self.batch
        if self.inputs.x.device.type == "cpu":
            widest = max(self.chunk, self.width)
            rows = max(1, TILE_BYTES // (self.dtype.itemsize * self.heads * self.chunk * widest))
            rows = -(-self.batch // -(-self.batch // rows))
        return [slice(start, min(start + rows, self.batch)) for start in range(0, self.batch, rows)]

    def cut(self, t_BL: Tensor) -> Tensor:
        """Cut (B, L, …) into (B, K, Q, …), padded by zeros; a view where no padding is needed."""
        if self.padding:
            t_BL = pad(t_BL, (0, 0) * (t_BL.ndim - 2) + (0, self.padding))
        return t_BL.view(t_BL.shape[0], self.chunks, self.chunk, *t_BL.shape[2:])

    def by_chunk(self, t_BLGN: Tensor) -> Tensor:
        """Arrange B or C as (K, B·G, Q, N), in the dtype of the accumulation."""
        t = self.cut(t_BLGN).to(self.dtype).permute(1, 0, 3, 2, 4)
        return t.reshape(self.chunks, self.batch * self.groups, self.chunk, self.d_state)

    def from_chunks(self, t_KbQN: Tensor) -> Tensor:
        """Invert :meth:`by_chunk` except for the dtype: (B, L, G, N)."""
        t = t_KbQN.view(self.chunks, self.batch, self.groups, self.chunk, self.d_state).permute(1, 0, 3, 2, 4)
        return t.flatten(1, 2)[:, : self.length]

    def finish_gradients(self, given: "DecayGradients", dgram_KbQQ: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the partial gradients of the tiles to those of dt and A.

        Also masks the gradient of the Gram matrices, in place.
        """
        dgram_KbQQ.tril_()
        self._cut_documents(dgram_KbQQ)
        # A token's decay applies to all paths from an earlier token, or the state before the chunk, to the
        # token itself, a later token, or the state after the chunk.
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
    """Partial gradients of log decays and step sizes, accumulated by tile: (B, H, K, Q)."""

    within: Tensor  # paths between tokens of the chunk
    from_start: Tensor  # from the state before the chunk to a token
    to_end: Tensor  # from a token to the state after its chunk
    through: Tensor  # from state to state, (B, H, K)
    direct: Tensor  # of dt where it multiplies x

    @classmethod
    def zeros(cls, window: Window) -> "DecayGradients":
        """Return zeros."""
        per_chunk = window.dt_BHKQ.new_zeros(window.dt_BHKQ.shape[:3])
        return cls(
            within=torch.zeros_like(window.dt_BHKQ),
            from_start=torch.zeros_like(window.dt_BHKQ),
            to_end=torch.zeros_like(window.dt_BHKQ),
            through=per_chunk,
            direct=torch.zeros_like(window.dt_BHKQ),
        )


class Rows:
    """Some batch rows of a window, with views and buffers for their tiles."""

    def __init__(self, window: Window, rows: slice) -> None:
        self.rows = rows
        self.batch = rows.stop - rows.start
        self.chunk, self.heads, self.width = window.chunk, window.heads, window.width
        self.groups, self.d_state, self.dtype = window.groups, window.d_state, window.dtype
        self.x = window.x_BKQHP[rows].unbind(1)
        # Two terms in the tile's own dtype: float64 differences would need a float64 tile.
        log_decay = window.log_decay_BHKQ[rows].to(self.dtype)
        self.log_decay = log_decay.unbind(2)
        self.log_decay_rest: tuple[Tensor, ...] | None = None
        if self.dtype != torch.float64:
            self.log_decay_rest = (window.log_decay_BHKQ[rows] - log_decay).to(self.dtype).unbind(2)
        self.dt = window.dt_BHKQ[rows].unbind(2)
        self.carry_in = window.carry_in_BHKQ[rows].unbind(2)
        self.carry_out = window.carry_out_BHKQ[rows].unbind(2)
        self.weight = window.weight_BHKQ[rows].unbind(2)
        self.groups_rows = slice(rows.start * self.groups, rows.stop * self.groups)
        self.B = window.B_KbQN[:, self.groups_rows].unbind()
        self.C = window.C_KbQN[:, self.groups_rows].unbind()
        self.gram = window.gram_KbQQ[:, self.groups_rows, None].unbind()
        self.decay_BHQQ = self._buffer(self.heads, self.chunk, self.chunk)
        self.decay_bRQQ = self.decay_BHQQ.view(-1, self.heads // self.groups, self.chunk, self.chunk)
        self.decay_hQQ = self.decay_BHQQ.view(-1, self.chunk, self.chunk)
        self.by_head_BHQP = self._buffer(self.heads, self.chunk, self.width)
        self.by_head_hQP = self.by_head_BHQP.view(-1, self.chunk, self.width)
        self.by_token_BQHP = self._buffer(self.chunk, self.heads, self.width)
        self.by_token_bQF = self.by_token_BQHP.view(self.batch * self.groups, self.chunk, -1)
        self.product = self._buffer(self.chunk * self.heads * self.width)

    def _buffer(self, *shape: int) -> Tensor:
        return torch.empty(self.batch, *shape, dtype=self.dtype, device=self.dt[0].device)

    def new_state(self) -> Tensor:
        """Return an uninitialized state for these rows."""
        return self._buffer(self.heads, self.width, self.d_state)

    def decays(self, k: int) -> None:
        """Fill the decay buffer: from j to i, for j ≤ i (and 1 above the diagonal)."""
        s_BHQ = self.log_decay[k]
        torch.sub(s_BHQ[..., :, None], s_BHQ[..., None, :], out=self.decay_BHQQ)
        if self.log_decay_rest is not None:
            rest_BHQ = self.log_decay_rest[k]
            self.decay_BHQQ.add_(rest_BHQ[..., :, None]).sub_(rest_BHQ[..., None, :])
        # Above the diagonal, where the Gram matrix is zero, the exponential must not overflow: 0·inf.
        self.decay_BHQQ.clamp_(max=0.0).exp_()

    def outputs(self, k: int, h_BHPN: Tensor | None, y_BQHP: Tensor) -> None:
        """Write a tile's part of y, given the state before the chunk (None is zero)."""
        self.decays(k)
        x_BHQP = self.x[k].transpose(1, 2)
        torch.mul(x_BHQP, self.dt[k][..., None], out=self.by_head_BHQP)
        self.decay_bRQQ.mul_(self.gram[k])
        within_hQP = self.product.view(self.by_head_hQP.shape)
        torch.bmm(self.decay_hQQ, self.by_head_hQP, out=within_hQP)
        within_BQHP = within_hQP.view_as(self.by_head_BHQP).transpose(1, 2)
        if h_BHPN is None:
            y_BQHP.copy_(within_BQHP)
            return
        carried_BQHP = self.unfold(torch.bmm(self.C[k], self.fold_state(h_BHPN).mT, out=self.by_token_bQF))
        torch.addcmul(within_BQHP, carried_BQHP, _per_token(self.carry_in[k]), out=y_BQHP)

    def next_state(self, k: int, h_BHPN: Tensor | None, out_BHPN: Tensor) -> None:
        """Write the state after the chunk; ``out`` may be the state before it."""
        weighted_bQF = self.fold(torch.mul(self.x[k], _per_token(self.weight[k]), out=self.by_token_BQHP))
        if h_BHPN is None:
            torch.bmm(weighted_bQF.mT, self.B[k], out=self.fold_state(out_BHPN))
            return
        torch.mul(h_BHPN, self.carry_in[k][..., -1, None, None], out=out_BHPN)
        self.fold_state(out_BHPN).baddbmm_(weighted_bQF.mT, self.B[k])

    def fold(self, t_BQHP: Tensor) -> Tensor:
        """Fold the heads of each group into (b, Q, F)."""
        if self.groups == 1:
            return t_BQHP.view(self.batch, self.chunk, -1)
        t = t_BQHP.view(self.batch, self.chunk, self.groups, -1).transpose(1, 2)
        return t.reshape(self.batch * self.groups, self.chunk, -1)

    def unfold(self, t_bQF: Tensor) -> Tensor:
        """Invert ``fold``: (B, Q, H, P)."""
        if self.groups > 1:
            t_bQF = t_bQF.view(self.batch, self.groups, self.chunk, -1).transpose(1, 2).contiguous()
        return t_bQF.view(self.batch, self.chunk, self.heads, self.width)

    def fold_state(self, h_BHPN: Tensor) -> Tensor:
        """View a contiguous state as (b, F, N)."""
        return h_BHPN.view(self.batch * self.groups, -1, self.d_state)


class BackwardRows(Rows):
    """The same rows in reverse order, with the gradient of the state."""

    def __init__(self, window: Window, rows: slice, dfinal_BHPN: Tensor | None) -> None:
        super().__init__(window, rows)
        self.gram_strict = window.gram_KbQQ[:, self.groups_rows, None].tril(-1).unbind()
        self.pairs_hQQ = torch.empty_like(self.decay_hQQ)
        self.pairs_bRQQ = self.pairs_hQQ.view_as(self.decay_bRQQ)
        self.dh_BHPN = self.new_state()
        suffix_QQ = torch.ones(self.chunk, self.chunk, dtype=self.dtype, device=self.dh_BHPN.device).triu_()
        self.suffix_hQQ = suffix_QQ.expand_as(self.pairs_hQQ)
        self.scratch_BHPN = self.new_state()
        self.has_dh = dfinal_BHPN is not None
        if dfinal_BHPN is not None:
            self.dh_BHPN.copy_(dfinal_BHPN)

    def gradients(
        self,
        k: int,
        h_BHPN: Tensor | None,
        dy_BQHP: Tensor,
        dx_BQHP: Tensor,
        dB_bQN: Tensor,
        dC_bQN: Tensor,
        dgram_b1QQ: Tensor,
        decay: DecayGradients,
    ) -> None:
        """Write a tile's gradients, and update the state's gradient from after the chunk to before it.

        ``dB`` and ``dC`` receive the gradients through the states; those through the Gram matrix follow from
        ``dgram``.
        """
        x_BQHP, dt_BHQ = self.x[k].to(self.dtype), self.dt[k]
        dy_BQHP = dy_BQHP.to(self.dtype)
        dy_hQP = dy_BQHP.transpose(1, 2).reshape(self.by_head_hQP.shape)

        # Within the chunk: y_i = Σ_j decay_ij gram_ij dt_j x_j.
        torch.mul(x_BQHP.transpose(1, 2), dt_BHQ[..., None], out=self.by_head_BHQP)
        self.decays(k)
        torch.bmm(dy_hQP, self.by_head_hQP.mT, out=self.pairs_hQQ)
        self.pairs_bRQQ.mul_(self.decay_bRQQ)
        torch.sum(self.pairs_bRQQ, 1, keepdim=True, out=dgram_b1QQ)
        # The gradient of the log decay from j to i; the diagonal has no decay.
        self.pairs_bRQQ.mul_(self.gram_strict[k])
        self.decay_bRQQ.mul_(self.gram[k])
        torch.bmm(self.decay_hQQ.mT, dy_hQP, out=self.by_head_hQP)
        # Token t's decay applies from every j < t to every i ≥ t. Differences of sums of rows and columns
        # would be cheaper, but their rounding errors exceed the gradients through a strong decay.
        torch.bmm(self.suffix_hQQ, self.pairs_hQQ, out=self.decay_hQQ)
        torch.sum(self.decay_BHQQ.tril_(-1), 3, out=decay.within[self.rows, :, k])
        dx_dt_BQHP = self.by_head_BHQP.transpose(1, 2)

        # To the state after the chunk: h = through·h_before + Σ_j carry_out_j dt_j x_j B_jᵀ.
        if self.has_dh:
            dh_bFN = self.fold_state(self.dh_BHPN)
            weighted_BQHP = torch.mul(x_BQHP, _per_token(self.weight[k]), out=self.by_token_BQHP)
            torch.bmm(self.fold(weighted_BQHP), dh_bFN, out=dB_bQN)
            product_bQF = self.product.view(self.by_token_bQF.shape)
            dweighted_BQHP = self.unfold(torch.bmm(self.B[k], dh_bFN.mT, out=product_bQF))
            torch.sum(
                weighted_BQHP.mul_(dweighted_BQHP).transpose(1, 2), 3, out=decay.to_end[self.rows, :, k]
            )
            dx_dt_BQHP = torch.addcmul(
                dx_dt_BQHP, dweighted_BQHP, _per_token(self.carry_out[k]), out=dweighted_BQHP
            )
        else:
            dB_bQN.zero_()

        torch.mul(dx_dt_BQHP, x_BQHP, out=self.by_token_BQHP)
        torch.sum(self.by_token_BQHP.transpose(1, 2), 3, out=decay.direct[self.rows, :, k])
        torch.mul(dx_dt_BQHP, _per_token(dt_BHQ), out=dx_BQHP)

        # From the state before the chunk: y_i += carry_in_i h C_i.
        if h_BHPN is None:
            dC_bQN.zero_()
            return
        dy_scaled = self.fold(torch.mul(dy_BQHP, _per_token(self.carry_in[k]), out=self.by_token_BQHP))
        h_bFN = self.fold_state(h_BHPN)
        torch.bmm(dy_scaled, h_bFN, out=dC_bQN)
        product_bQF = torch.bmm(self.C[k], h_bFN.mT, out=self.product.view(self.by_token_bQF.shape))
        arriving_BQHP = self.unfold(product_bQF.mul_(dy_scaled))
        torch.sum(arriving_BQHP.transpose(1, 2), 3, out=decay.from_start[self.rows, :, k])
        if self.has_dh:
            self.dh_BHPN.mul_(self.carry_in[k][..., -1, None, None])
            torch.mul(self.dh_BHPN, h_BHPN, out=self.scratch_BHPN)
            decay.through[self.rows, :, k] = self.scratch_BHPN.sum((2, 3))
            self.fold_state(self.dh_BHPN).baddbmm_(dy_scaled.mT, self.C[k])
        else:
            torch.bmm(dy_scaled.mT, self.C[k], out=self.fold_state(self.dh_BHPN))
            self.has_dh = True


def _per_token(t_BHQ: Tensor) -> Tensor:
    """Reshape (B, H, Q) to broadcast with (B, Q, H, P)."""
    return t_BHQ.transpose(1, 2)[..., None]


# ------------------------------------------------------------------------------------ the whole window


def scan_tiles(
    window: Window, initial: Tensor | None, *, return_final_state: bool, keep_states: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return y, the final state, and on request the state before every KEEP_EVERY-th chunk but the first."""
    x, dtype = window.inputs.x, window.dtype
    y = torch.empty(window.x_BKQHP.shape, dtype=x.dtype, device=x.device)
    final = torch.empty(window.state_shape, dtype=dtype, device=x.device) if return_final_state else None
    kept = None
    if keep_states:
        kept = torch.empty(
            (window.chunks - 1) // KEEP_EVERY, *window.state_shape, dtype=dtype, device=x.device
        )
    for rows in window.row_slices():
        tiles = Rows(window, rows)
        h = None if initial is None else _rows_of(initial, rows, dtype)
        buffer = None
        for k, y_BQHP in enumerate(y[rows].unbind(1)):
            tiles.outputs(k, h, y_BQHP)
            following = k + 1
            if following == window.chunks:
                if final is not None:
                    tiles.next_state(k, h, final[rows])
                break
            if kept is not None and following % KEEP_EVERY == 0:
                after = kept[following // KEEP_EVERY - 1, rows]
            else:  # in place where possible, but neither in the caller's state nor in a saved one
                after = buffer = tiles.new_state() if buffer is None else buffer
            tiles.next_state(k, h, after)
            h = after
    return y.flatten(1, 2)[:, : window.length], final, kept


def tile_gradients(
    window: Window, initial: Tensor | None, kept: Tensor, dy: Tensor | None, dfinal: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Walk the tiles backwards; return the gradients of the inputs and of the initial state."""
    inputs, dtype = window.inputs, window.dtype
    dy_BKQHP = window.cut(torch.zeros_like(inputs.x) if dy is None else dy)
    dx_BKQHP = torch.empty(dy_BKQHP.shape, dtype=inputs.x.dtype, device=inputs.x.device)
    dB_KbQN, dC_KbQN = (
        torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (window.B_KbQN, window.C_KbQN)
    )
    dgram_KbQQ = torch.empty_like(window.gram_KbQQ)
    decay = DecayGradients.zeros(window)
    dinitial = None if initial is None else torch.empty(initial.shape, dtype=dtype, device=initial.device)
    for rows in window.row_slices():
        tiles = BackwardRows(window, rows, None if dfinal is None else dfinal[rows])
        groups = tiles.groups_rows
        first = None if initial is None else _rows_of(initial, rows, dtype)
        dy_by_chunk, dx_by_chunk = dy_BKQHP[rows].unbind(1), dx_BKQHP[rows].unbind(1)
        recomputed = [tiles.new_state() for _ in range(min(KEEP_EVERY, window.chunks) - 1)]
        for start in reversed(range(0, window.chunks, KEEP_EVERY)):
            h = kept[start // KEEP_EVERY - 1, rows] if start > 0 else first
            before = [h]
            for k in range(start, min(start + KEEP_EVERY, window.chunks) - 1):
                tiles.next_state(k, before[-1], recomputed[k - start])
                before.append(recomputed[k - start])
            for k in reversed(range(start, start + len(before))):
                tiles.gradients(
                    k,
                    before[k - start],
                    dy_by_chunk[k],
                    dx_by_chunk[k],
                    dB_KbQN[k, groups],
                    dC_KbQN[k, groups],
                    dgram_KbQQ[k, groups, None],
                    decay,
                )
        if dinitial is not None:
            dinitial[rows] = tiles.dh_BHPN
    ddt, dA = window.finish_gradients(decay, dgram_KbQQ)
    dB_KbQN += dgram_KbQQ.mT @ window.C_KbQN
    dC_KbQN += dgram_KbQQ @ window.B_KbQN
    return (
        dx_BKQHP.flatten(1, 2)[:, : window.length],
        ddt.to(inputs.dt.dtype),
        dA.to(inputs.A.dtype),
        window.from_chunks(dB_KbQN).to(inputs.B.dtype),
        window.from_chunks(dC_KbQN).to(inputs.C.dtype),
        None,
        None,
        None if initial is None or dinitial is None else dinitial.to(initial.dtype),
    )


def _rows_of(state: Tensor, rows: slice, dtype: torch.dtype) -> Tensor:
    return state[rows].to(dtype).contiguous()

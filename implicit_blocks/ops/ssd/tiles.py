"""What the chunked scan computes for one tile: a few batch rows by one chunk of tokens.

The sequence is walked tile by tile so that all intermediate values stay in the processor's cache: at 130M
widths an elementwise pass then costs a tenth of a matrix product, where the same passes over whole sequences,
with the chunk as one more batch dimension, cost more than the products.

Shapes: B batch, L length, H heads, P head width, G groups, N state width, Q length of a chunk (i and j are
positions in it, rows and columns of a Q × Q matrix). A lower-case b is batch and groups together, F the heads
of one group folded with their width, (H/G)·P.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.ops.ssd.recurrence import accumulation_dtype

# Bytes of the largest intermediate of a tile, on a CPU; some eight of them are alive at once.
TILE_BYTES = 1 << 19


class Inputs(NamedTuple):
    """A window's inputs as they were given."""

    x_BLHP: Tensor
    dt_BLH: Tensor
    A_H: Tensor
    B_BLGN: Tensor
    C_BLGN: Tensor
    documents_BL: Tensor | None
    initial_document_B: Tensor | None

    @property
    def dtype(self) -> torch.dtype:
        """The type of decays and states."""
        return accumulation_dtype(self.x_BLHP, self.dt_BLH, self.A_H, self.B_BLGN, self.C_BLGN)

    def row_slices(self, chunk_size: int) -> list[slice]:
        """Cut the batch so that a tile fits the cache; accelerators take all rows at once."""
        batch, length, heads, width = self.x_BLHP.shape
        rows = batch
        if self.x_BLHP.device.type == "cpu":
            chunk = min(length, chunk_size)
            widest = max(chunk, width, self.B_BLGN.shape[3])
            rows = max(1, TILE_BYTES // (self.dtype.itemsize * heads * chunk * widest))
        return [slice(start, min(start + rows, batch)) for start in range(0, batch, rows)]

    def chunks(self, chunk_size: int) -> list[slice]:
        """Cut the length; the last chunk may be shorter."""
        length = self.x_BLHP.shape[1]
        return [slice(start, min(start + chunk_size, length)) for start in range(0, length, chunk_size)]


class Gradients(NamedTuple):
    """Where a tile's gradients go, in the inputs' types; A's is summed over rows and chunks."""

    x_BLHP: Tensor
    dt_BLH: Tensor
    A_H: Tensor
    B_BLGN: Tensor
    C_BLGN: Tensor


class Tile:
    """One tile: its inputs in the type of the accumulation, and the decays between its tokens."""

    def __init__(self, inputs: Inputs, rows: slice, chunk: slice) -> None:
        dtype = inputs.dtype
        self.index = (rows, chunk)
        self.x_BQHP = inputs.x_BLHP[rows, chunk].to(dtype)
        batch, length, heads, width = self.x_BQHP.shape
        groups, d_state = inputs.B_BLGN.shape[2:]
        self.batch, self.length, self.heads, self.width = batch, length, heads, width
        self.groups, self.d_state = groups, d_state
        self.A_H1 = inputs.A_H.to(dtype)[:, None]
        dt_BHQ = inputs.dt_BLH[rows, chunk].transpose(1, 2)
        self.dt_BHQ = dt_BHQ.to(dtype)
        self.B_bQN = inputs.B_BLGN[rows, chunk].to(dtype).transpose(1, 2).reshape(-1, length, d_state)
        self.C_bQN = inputs.C_BLGN[rows, chunk].to(dtype).transpose(1, 2).reshape(-1, length, d_state)

        # Log decays are summed in float64: only differences count, and a float32 sum over strong decays has
        # lost the digits of the weak ones. These are small tensors.
        s_BHQ = (dt_BHQ.double() * inputs.A_H.double()[:, None]).cumsum(2)
        decay_BHQQ = torch.empty(batch, heads, length, length, dtype=dtype, device=s_BHQ.device)
        torch.sub(s_BHQ[..., :, None], s_BHQ[..., None, :], out=decay_BHQQ)
        # Above the diagonal, where the gram matrix is zero, the exponential must not overflow: 0·inf.
        self.decay_bRQQ = decay_BHQQ.clamp_(max=0.0).exp_().view(-1, heads // groups, length, length)
        carry_in = s_BHQ.exp()
        carry_out = (s_BHQ[..., -1:] - s_BHQ).exp_()
        self.gram_b1QQ = torch.bmm(self.C_bQN, self.B_bQN.mT).tril_()[:, None]
        self.same_B1QQ: Tensor | None = None
        if inputs.documents_BL is not None:
            documents_BQ = inputs.documents_BL[rows, chunk]
            carried_B1 = documents_BQ[:, :1]
            if chunk.start > 0:
                carried_B1 = inputs.documents_BL[rows, chunk.start - 1, None]
            elif inputs.initial_document_B is not None:
                carried_B1 = inputs.initial_document_B[rows, None]
            self.same_B1QQ = (documents_BQ[:, :, None] == documents_BQ[:, None, :])[:, None]
            self.gram_b1QQ.view(batch, groups, length, length).mul_(self.same_B1QQ)
            carry_in *= (documents_BQ == carried_B1)[:, None]
            carry_out *= (documents_BQ == documents_BQ[:, -1:])[:, None]
        self.carry_in_BHQ = carry_in.to(dtype)  # from the state before the chunk to each token
        self.carry_out_BHQ = carry_out.to(dtype)  # from each token to the state after the chunk
        self.through_BH11 = self.carry_in_BHQ[..., -1, None, None]  # from state to state

    def outputs(self, h_BHPN: Tensor | None, y_BLHP: Tensor) -> None:
        """Write this tile's part of y, given the state before the chunk (None is zero)."""
        x_dt = self._by_head(self.x_BQHP, self.dt_BHQ)
        scores_bRQQ = self.decay_bRQQ * self.gram_b1QQ
        within = torch.bmm(scores_bRQQ.view(-1, self.length, self.length), x_dt)
        within_BQHP = within.view(self.batch, self.heads, self.length, self.width).transpose(1, 2)
        if h_BHPN is None:
            y_BLHP[self.index].copy_(within_BQHP)
            return
        carried_BQHP = self._unfold(torch.bmm(self.C_bQN, self._fold_state(h_BHPN).mT))
        scale = self.carry_in_BHQ.transpose(1, 2)[..., None]
        torch.addcmul(within_BQHP, carried_BQHP, scale, out=y_BLHP[self.index])

    def next_state(self, h_BHPN: Tensor | None) -> Tensor:
        """Return the state after the chunk, as a new tensor."""
        weighted_bFQ = self._fold(self.x_BQHP, self.carry_out_BHQ * self.dt_BHQ).mT
        if h_BHPN is None:
            return torch.bmm(weighted_bFQ, self.B_bQN).view(self.batch, self.heads, self.width, self.d_state)
        h = h_BHPN * self.through_BH11
        self._fold_state(h).baddbmm_(weighted_bFQ, self.B_bQN)
        return h

    def gradients(
        self,
        h_BHPN: Tensor | None,
        dy_BLHP: Tensor,
        dh_BHPN: Tensor | None,
        out: Gradients,
        *,
        want_state: bool,
    ) -> Tensor | None:
        """Write this tile's gradients, given those of its outputs and of the state after the chunk.

        Returns the gradient of the state before the chunk, where it is wanted.
        """
        batch, length, heads, width = self.batch, self.length, self.heads, self.width
        dy_BQHP = dy_BLHP[self.index].to(self.x_BQHP.dtype)
        dy_HQP = self._by_head(dy_BQHP)
        x_dt_HQP = self._by_head(self.x_BQHP, self.dt_BHQ)

        # Within the chunk: y_i = Σ_j decay_ij gram_ij dt_j x_j.
        dscores = torch.bmm(dy_HQP, x_dt_HQP.mT).view_as(self.decay_bRQQ)
        dgram_terms = dscores.mul_(self.decay_bRQQ)
        dgram_bQQ = dgram_terms.sum(1).tril_()
        if self.same_B1QQ is not None:
            dgram_bQQ.view(batch, -1, length, length).mul_(self.same_B1QQ)
        scores = self.decay_bRQQ.mul_(self.gram_b1QQ).view(-1, length, length)
        dx_dt_BHQP = torch.bmm(scores.mT, dy_HQP).view(batch, heads, length, width)
        # Gradient of the log decay from j to i, the diagonal left out: nothing decays there, and in strong
        # decays its rounding would drown the rest.
        ddecay_HQQ = dgram_terms.mul_(self.gram_b1QQ.tril(-1)).view(batch, heads, length, length)
        dlog_BHQ = ddecay_HQQ.sum(3) - ddecay_HQQ.sum(2)
        dC_bQN = torch.bmm(dgram_bQQ, self.B_bQN)
        dB_bQN = torch.bmm(dgram_bQQ.mT, self.C_bQN)
        dx_BQHP = dx_dt_BHQP.transpose(1, 2)

        # From the state before the chunk: y_i += carry_in_i h C_i.
        dh_before: Tensor | None = None
        da_through_BH1: Tensor | None = None
        if h_BHPN is not None or want_state:
            dy_scaled_bQF = self._fold(dy_BQHP, self.carry_in_BHQ)
            if h_BHPN is not None:
                h_bFN = self._fold_state(h_BHPN)
                dC_bQN.baddbmm_(dy_scaled_bQF, h_bFN)
                carried_bQF = torch.bmm(self.C_bQN, h_bFN.mT).mul_(dy_scaled_bQF)
                dlog_BHQ += self._unfold(carried_bQF).sum(3).transpose(1, 2)
            if want_state:
                if dh_BHPN is None:
                    dh_before = torch.bmm(dy_scaled_bQF.mT, self.C_bQN).view(batch, heads, width, -1)
                else:
                    dh_before = dh_BHPN * self.through_BH11
                    if h_BHPN is not None:
                        da_through_BH1 = (dh_before * h_BHPN).sum((2, 3))[..., None]
                    self._fold_state(dh_before).baddbmm_(dy_scaled_bQF.mT, self.C_bQN)

        # To the state after the chunk: h = through·h_before + Σ_j carry_out_j dt_j x_j B_jᵀ.
        da_BHQ = torch.matmul(dlog_BHQ, torch.ones_like(self.gram_b1QQ[0, 0]).tril_())
        if dh_BHPN is not None:
            dh_bFN = self._fold_state(dh_BHPN)
            weight_BHQ = self.carry_out_BHQ * self.dt_BHQ
            weighted_bQF = self._fold(self.x_BQHP, weight_BHQ)
            dB_bQN.baddbmm_(weighted_bQF, dh_bFN)
            dweighted_BQHP = self._unfold(torch.bmm(self.B_bQN, dh_bFN.mT))
            dx_BQHP = torch.addcmul(dx_BQHP, dweighted_BQHP, self.carry_out_BHQ.transpose(1, 2)[..., None])
            dcarry_BHQ = (dweighted_BQHP * self.x_BQHP).sum(3).transpose(1, 2) * weight_BHQ
            da_BHQ += dcarry_BHQ.cumsum(2) - dcarry_BHQ
            if da_through_BH1 is not None:
                da_BHQ += da_through_BH1

        # dx_BQHP is so far the gradient of dt·x.
        ddt_BHQ = torch.addcmul((dx_BQHP * self.x_BQHP).sum(3).transpose(1, 2), da_BHQ, self.A_H1)
        torch.mul(dx_BQHP, self.dt_BHQ.transpose(1, 2)[..., None], out=out.x_BLHP[self.index])
        out.dt_BLH[self.index].copy_(ddt_BHQ.transpose(1, 2))
        out.A_H.add_((da_BHQ * self.dt_BHQ).sum((0, 2)))
        out.B_BLGN[self.index].copy_(dB_bQN.view(batch, -1, length, self.d_state).transpose(1, 2))
        out.C_BLGN[self.index].copy_(dC_bQN.view(batch, -1, length, self.d_state).transpose(1, 2))
        return dh_before

    def _by_head(self, t_BQHP: Tensor, scale_BHQ: Tensor | None = None) -> Tensor:
        """Copy tokens × heads to heads × tokens, (B·H, Q, P), scaled on the way."""
        out = t_BQHP.new_empty(self.batch, self.heads, self.length, self.width)
        if scale_BHQ is None:
            out.copy_(t_BQHP.transpose(1, 2))
        else:
            torch.mul(t_BQHP.transpose(1, 2), scale_BHQ[..., None], out=out)
        return out.view(-1, self.length, self.width)

    def _fold(self, t_BQHP: Tensor, scale_BHQ: Tensor) -> Tensor:
        """Scale, and fold the heads of each group: (b, Q, F)."""
        scaled = t_BQHP * scale_BHQ.transpose(1, 2)[..., None]
        scaled = scaled.reshape(self.batch, self.length, self.groups, -1)
        return scaled.transpose(1, 2).reshape(self.batch * self.groups, self.length, -1)

    def _unfold(self, t_bQF: Tensor) -> Tensor:
        """Undo the folding of :meth:`_fold`: (B, Q, H, P)."""
        t = t_bQF.view(self.batch, self.groups, self.length, -1).transpose(1, 2)
        return t.reshape(self.batch, self.length, self.heads, self.width)

    def _fold_state(self, h_BHPN: Tensor) -> Tensor:
        """View a contiguous state as (b, F, N)."""
        return h_BHPN.view(self.batch * self.groups, -1, self.d_state)

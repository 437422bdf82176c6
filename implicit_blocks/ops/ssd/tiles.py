"""What the chunked scan computes for one tile: a few batch rows by one chunk of tokens.

The window is walked tile by tile so that intermediate values stay in the processor's cache; the same passes
over whole sequences, with the chunk as one more batch dimension, cost more than the matrix products. The
buffers of a tile are used again for the next.

Shapes: B batch (the rows of the tile), H heads, P head width, G groups, N state width, K chunks, Q tokens a
chunk (i and j are positions in it, rows and columns of a Q × Q matrix). A lower-case b is batch and groups
together, F the heads of one group folded with their width, (H/G)·P.
"""

import torch
from torch import Tensor

from implicit_blocks.ops.ssd.window import DecayGradients, Window


class Rows:
    """Some batch rows of a window, with views and buffers for their tiles."""

    def __init__(self, window: Window, rows: slice) -> None:
        self.rows = rows
        self.batch = rows.stop - rows.start
        self.chunk, self.heads, self.width = window.chunk, window.heads, window.width
        self.groups, self.d_state, self.dtype = window.groups, window.d_state, window.dtype
        self.x = window.x_BKQHP[rows].unbind(1)
        # In two parts of the tile's own type: float64 differences would need a float64 tile to pass through.
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
        """Fold the heads of each group: (b, Q, F)."""
        if self.groups == 1:
            return t_BQHP.view(self.batch, self.chunk, -1)
        t = t_BQHP.view(self.batch, self.chunk, self.groups, -1).transpose(1, 2)
        return t.reshape(self.batch * self.groups, self.chunk, -1)

    def unfold(self, t_bQF: Tensor) -> Tensor:
        """Undo the folding: (B, Q, H, P)."""
        if self.groups > 1:
            t_bQF = t_bQF.view(self.batch, self.groups, self.chunk, -1).transpose(1, 2).contiguous()
        return t_bQF.view(self.batch, self.chunk, self.heads, self.width)

    def fold_state(self, h_BHPN: Tensor) -> Tensor:
        """View a contiguous state as (b, F, N)."""
        return h_BHPN.view(self.batch * self.groups, -1, self.d_state)


class BackwardRows(Rows):
    """The same rows, walked backwards; the gradient of the state travels along."""

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
        """Write a tile's gradients, and turn that of the state after the chunk into that of the state before.

        ``dB`` and ``dC`` get what passes the states; what passes the Gram matrix follows from ``dgram``.
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
        # The gradient of the log decay from j to i; the diagonal decays nothing.
        self.pairs_bRQQ.mul_(self.gram_strict[k])
        self.decay_bRQQ.mul_(self.gram[k])
        torch.bmm(self.decay_hQQ.mT, dy_hQP, out=self.by_head_hQP)
        # Token t's decay is passed from every j < t to every i ≥ t. Differences of sums of rows and columns
        # would be cheaper, but their rounding drowns what passes a strong decay.
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
    """Bring a number a head and token beside (B, Q, H, P)."""
    return t_BHQ.transpose(1, 2)[..., None]

"""Mamba2's scan of windows of a few tokens in each of a few rows, between its projections.

The state of a slot is read once for all tokens of its window. It is written only when tokens are committed,
with the inputs of the convolution that later windows read.

Shape legend: S slots, R rows of a call, each in a slot; L tokens of a window, T = R · L tokens of a call, row
by row; U projection width, I inner width, H heads, P head width, N state width.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.decoding_mamba2 import ScanTiles
from implicit_blocks.ops.kernels.decoding_window import Operand, WindowConv
from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous


def window_scan_tiles(length: int) -> ScanTiles:
    """Return the tiles of the scan of windows of this length."""
    return ScanTiles(16, 8 if length > 4 else 4)


def scan_window(
    prepared_TU: Tensor,
    rows_R: Tensor,
    commits_R: Tensor,
    h_SHPN: Tensor,
    conv: WindowConv,
    *,
    length: int,
    A_log_H: Tensor,
    D_H: Tensor,
    groups: int,
    norm_I: Tensor | None,
    norm_eps: float,
    dtype: torch.dtype,
) -> Operand:
    """Return ``y · silu(gate)`` of all tokens, (T, I), and commit the first tokens of each row.

    Args:
        prepared_TU: ``[silu(gate), x, B, C, softplus(dt)]`` of ``linear_window`` with ``conv``, float32.
        rows_R: int64, the slot of each row, all different.
        commits_R: int64, the number of tokens of each row whose state replaces that of its slot.
        h_SHPN: states, P and N powers of 2.
        conv: that of the projection; the taps of slots that commit are replaced.
        length: L.
        A_log_H: ``log(−A)``.
        D_H: the skip connection.
        groups: number of groups of heads that share B and C.
        norm_I: the weight of the norm over all heads, whose divisor the result lacks; None: no norm.
        norm_eps: that norm's.
        dtype: of the result.

    """
    _, heads, head_dim, d_state = h_SHPN.shape
    rows = len(rows_R)
    tokens, device, inputs = rows * length, h_SHPN.device, conv.inputs
    out = torch.empty(tokens, heads * head_dim, dtype=dtype, device=device)
    tiles = window_scan_tiles(length)
    part = min(head_dim, tiles.features)
    parts = heads * (head_dim // part)
    squares = torch.empty(tokens, parts, dtype=torch.float32, device=device)
    channels = conv.own_TC.shape[1]
    padded = triton.next_power_of_2(length)
    with on_device(device):
        _scan_window[(parts, rows)](
            prepared_TU,
            rows_R,
            commits_R,
            h_SHPN,
            A_log_H,
            D_H,
            D_H if norm_I is None else norm_I,
            out,
            squares,
            inputs.entries_S,
            inputs.taps_SWC,
            conv.own_TC,
            prepared_TU.shape[1],
            channels,
            triton.cdiv(channels, parts),
            L=length,
            BLOCK_L=padded,
            H=heads,
            P=head_dim,
            N=d_state,
            G=groups,
            W=inputs.taps,
            NORM=norm_I is not None,
            BLOCK_P=part,
            BLOCK_C=triton.next_power_of_2(triton.cdiv(channels, parts)),
            **overlapping(device),
            num_warps=tiles.warps,
        )
    if norm_I is None:
        return Operand(out)
    return Operand(out, squares, heads * head_dim, norm_eps)


@triton.jit
def _scan_window(
    p_ptr, rows_ptr, commits_ptr, h_ptr, a_log_ptr, d_ptr, norm_ptr, out_ptr, squares_ptr, entries_ptr,
    taps_ptr, own_ptr, U, C, share, L: tl.constexpr, BLOCK_L: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, G: tl.constexpr, W: tl.constexpr, NORM: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C:
    tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    head = tl.program_id(0) // (P // BLOCK_P)
    part = tl.program_id(0) % (P // BLOCK_P)
    row = tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = H * P
    slot = tl.load(rows_ptr + row)
    width, state, token = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, N), tl.arange(0, BLOCK_L)
    place = h_ptr + (slot * H + head) * P * N + width[:, None] * N + state[None, :]
    h = tl.load(place, eviction_policy="evict_first").to(tl.float32)  # read once: keep out of the cache
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    skip = tl.load(d_ptr + head).to(tl.float32)
    wait_for_previous(PDL)  # for the projection; the state is that of an earlier call
    commits = tl.load(commits_ptr + row)
    used = token < L
    p_ptr += row * L * U
    line = p_ptr + token[:, None] * U
    wide = used[:, None]
    gate = tl.load(line + (head * P + width)[None, :], mask=wide, other=0.0)
    x = tl.load(line + (inner + head * P + width)[None, :], mask=wide, other=0.0)
    group = head // (H // G) * N + state
    B = tl.load(line + (2 * inner + group)[None, :], mask=wide, other=0.0)
    c = tl.load(line + (2 * inner + G * N + group)[None, :], mask=wide, other=0.0)
    step_ptr = p_ptr + 2 * inner + 2 * G * N + head
    dt = tl.load(step_ptr + token * U, mask=used, other=0.0)
    # y_j = exp(s_j) C_j h + Σ_{i ≤ j} exp(s_j − s_i) dt_i (C_j B_i) x_i, with s_j = A (dt_0 + … + dt_j).
    # Values of later tokens, which may not be finite, are selected, not multiplied by 0.
    causal = token[:, None] >= token[None, :]
    sums = tl.sum(tl.where(causal, dt[None, :], 0.0), axis=1) * rate
    y = tl.exp(sums)[:, None] * tl.sum(h[None, :, :] * c[:, None, :], axis=2)
    before = tl.sum(tl.where(token[:, None] <= token[None, :], dt[:, None], 0.0), axis=0) * rate
    decays = tl.exp(tl.where(causal, sums[:, None] - before[None, :], 0.0))
    products = tl.sum(c[:, None, :] * B[None, :, :], axis=2)
    factors = decays * products * dt[None, :]
    y += tl.sum(tl.where(causal[:, :, None], factors[:, :, None] * x[None, :, :], 0.0), axis=1)
    y = (y + skip * x) * gate
    index = row * L + token
    tl.store(squares_ptr + index * tl.num_programs(0) + tl.program_id(0), tl.sum(y * y, axis=1), mask=used)
    if NORM:
        y *= tl.load(norm_ptr + head * P + width).to(tl.float32)[None, :]
    target = out_ptr + index[:, None] * inner + (head * P + width)[None, :]
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=wide)
    if commits > 0:
        h = tl.load(place).to(tl.float32)  # loaded again to free registers in between
        for number in tl.static_range(L):
            if number < commits:
                dt_now = tl.load(step_ptr + number * U)
                x_now = tl.load(p_ptr + number * U + inner + head * P + width)
                B_now = tl.load(p_ptr + number * U + 2 * inner + group)
                h = h * tl.exp(dt_now * rate) + (dt_now * x_now)[:, None] * B_now[None, :]
        tl.store(place, h.to(h_ptr.dtype.element_ty))
        # The last inputs of the convolution: an entry is read before the one after it replaces it.
        first = tl.program_id(0) * share
        channel = first + tl.arange(0, BLOCK_C)
        mine = (channel < first + share) & (channel < C)
        entry = tl.load(entries_ptr + slot)
        for tap in tl.static_range(W - 1):
            kept = mine & (tap + commits < W - 1)
            old = taps_ptr + (slot * W + (entry + 1 + tap + commits) % W) * C + channel
            new = own_ptr + (row * L + commits + tap - (W - 1)) * C + channel
            fresh = mine & (tap + commits >= W - 1)
            value = tl.load(old, mask=kept, other=0.0)
            value = tl.where(fresh, tl.load(new, mask=fresh, other=0.0), value)
            tl.store(taps_ptr + (slot * W + (entry + 1 + tap) % W) * C + channel, value, mask=mine)

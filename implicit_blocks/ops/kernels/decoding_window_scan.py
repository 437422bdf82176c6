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

TILES = ScanTiles(16, 4)


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
    part = min(head_dim, TILES.features)
    parts = heads * (head_dim // part)
    squares = torch.empty(tokens, parts, dtype=torch.float32, device=device)
    channels = conv.own_TC.shape[1]
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
            BLOCK_L=max(16, triton.next_power_of_2(length)),  # rows of a product of matrix units
            H=heads,
            P=head_dim,
            N=d_state,
            G=groups,
            W=inputs.taps,
            BLOCK_W=triton.next_power_of_2(max(1, inputs.taps - 1)),
            NORM=norm_I is not None,
            PRECISION="tf32x3",  # as exact as float32 up to its last bits
            SPLIT=max(1, min(TILES.warps, d_state // 16)),
            BLOCK_P=part,
            BLOCK_C=triton.next_power_of_2(triton.cdiv(channels, parts)),
            **overlapping(device),
            num_warps=TILES.warps,
        )
    if norm_I is None:
        return Operand(out)
    return Operand(out, squares, heads * head_dim, norm_eps)


@triton.jit
def _scan_window(
    p_ptr, rows_ptr, commits_ptr, h_ptr, a_log_ptr, d_ptr, norm_ptr, out_ptr, squares_ptr, entries_ptr,
    taps_ptr, own_ptr, U, C, share, L: tl.constexpr, BLOCK_L: tl.constexpr, H: tl.constexpr, P: tl.constexpr,
    N: tl.constexpr, G: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, NORM: tl.constexpr, PRECISION:
    tl.constexpr, SPLIT: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    head = tl.program_id(0) // (P // BLOCK_P)
    part = tl.program_id(0) % (P // BLOCK_P)
    row = tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = H * P
    slot = tl.load(rows_ptr + row)
    width, token = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_L)
    # The parts of a state are those of warps, each with its own sums.
    state = (tl.arange(0, SPLIT) * (N // SPLIT))[:, None, None] + tl.arange(0, N // SPLIT)[None, None, :]
    place = h_ptr + (slot * H + head) * P * N + width[None, :, None] * N + state
    h = tl.load(place, eviction_policy="evict_first").to(tl.float32)  # read once: keep out of the cache
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    skip = tl.load(d_ptr + head).to(tl.float32)
    entry = tl.load(entries_ptr + slot)
    if NORM:
        norm = tl.load(norm_ptr + head * P + width).to(tl.float32)
    wait_for_previous(PDL)  # for the projection; the state is that of an earlier call
    commits = tl.load(commits_ptr + row)
    used = token < L
    p_ptr += row * L * U
    line = p_ptr + token[:, None] * U
    wide = used[:, None]
    # Unused tokens become 0 after all loads: a change of layout after each would make the next one wait.
    group = p_ptr + token[None, :, None] * U + 2 * inner + head // (H // G) * N + state
    gate = tl.load(line + (head * P + width)[None, :], mask=wide)
    x = tl.load(line + (inner + head * P + width)[None, :], mask=wide)
    B = tl.load(group, mask=used[None, :, None])
    c = tl.load(group + G * N, mask=used[None, :, None])
    dt = tl.load(p_ptr + token * U + 2 * inner + 2 * G * N + head, mask=used)
    gate = tl.where(wide, gate, 0.0)
    x = tl.where(wide, x, 0.0)
    B = tl.where(used[None, :, None], B, 0.0)
    c = tl.where(used[None, :, None], c, 0.0)
    dt = tl.where(used, dt, 0.0)
    # y_j = exp(s_j) C_j h + Σ_{i ≤ j} exp(s_j − s_i) dt_i (C_j B_i) x_i, with s_j = A (dt_0 + … + dt_j).
    # Later tokens have factors of 0. Because 0 · NaN is NaN, an x that is not finite is replaced by 0, and
    # its step by NaN, which is selected, not multiplied by 0.
    finite = tl.abs(x) < float("inf")
    dt = tl.where(tl.max((finite == 0).to(tl.int32), axis=1) > 0, float("nan"), dt)
    causal = token[:, None] >= token[None, :]
    sums = tl.sum(tl.where(causal, dt[None, :], 0.0), axis=1) * rate
    factors = tl.exp(tl.where(causal, sums[:, None] - sums[None, :], 0.0)) * dt[None, :]
    products = tl.dot(c, tl.permute(B, (0, 2, 1)), input_precision=PRECISION)
    products = tl.where(causal[None, :, :], products * factors[None, :, :], 0.0)
    y = tl.dot(c, tl.permute(h, (0, 2, 1)), input_precision=PRECISION) * tl.exp(sums)[None, :, None]
    inputs = tl.broadcast_to(tl.where(finite, x, 0.0)[None, :, :], (SPLIT, BLOCK_L, BLOCK_P))
    y = tl.sum(tl.dot(products, inputs, y, input_precision=PRECISION), axis=0)
    y = (y + skip * x) * gate
    index = row * L + token
    tl.store(squares_ptr + index * tl.num_programs(0) + tl.program_id(0), tl.sum(y * y, axis=1), mask=used)
    if NORM:
        y *= norm[None, :]
    target = out_ptr + index[:, None] * inner + (head * P + width)[None, :]
    tl.store(target, y.to(out_ptr.dtype.element_ty), mask=wide)
    if commits > 0:
        # The last inputs of the convolution, old ones and the window's own.
        first = tl.program_id(0) * share
        tap, channel = tl.arange(0, BLOCK_W)[:, None], first + tl.arange(0, BLOCK_C)[None, :]
        mine = (tap < W - 1) & (channel < first + share) & (channel < C)
        kept = tap + commits < W - 1
        old = taps_ptr + (slot * W + (entry + 1 + tap + commits) % W) * C + channel
        own = own_ptr + (row * L + commits + tap - (W - 1)) * C + channel
        old, own = tl.load(old, mask=mine & kept), tl.load(own, mask=mine & (kept == 0))
        taken = token < commits
        total = tl.sum(tl.where(taken, dt, 0.0), axis=0) * rate
        shares = tl.where(taken, tl.exp(tl.where(taken, total - sums, 0.0)) * dt, 0.0)
        scaled = tl.trans(tl.where(taken[:, None], x * shares[:, None], 0.0))
        scaled = tl.broadcast_to(scaled[None, :, :], (SPLIT, BLOCK_P, BLOCK_L))
        read = tl.where(taken[None, :, None], B, 0.0)
        h = tl.dot(scaled, read, h * tl.exp(total), input_precision=PRECISION)
        tl.store(place, h.to(h_ptr.dtype.element_ty))
        tl.debug_barrier()  # each entry has been read before another one replaces it
        replaced = taps_ptr + (slot * W + (entry + 1 + tap) % W) * C + channel
        tl.store(replaced, tl.where(kept, old, own), mask=mine)

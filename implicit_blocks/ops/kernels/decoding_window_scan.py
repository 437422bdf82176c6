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
from implicit_blocks.ops.kernels.instructions import NVIDIA
from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous

TILES = ScanTiles(16, 8)


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
            H=heads,
            P=head_dim,
            N=d_state,
            G=groups,
            W=inputs.taps,
            BLOCK_W=triton.next_power_of_2(max(1, inputs.taps - 1)),
            NORM=norm_I is not None,
            LANES=min(32, d_state),
            WARPS=TILES.warps,
            BLOCK_P=part,
            BLOCK_C=triton.next_power_of_2(triton.cdiv(channels, parts)),
            **overlapping(device),
            num_warps=TILES.warps,
            # Two programs per multiprocessor instead of one with 8 tokens, which does not spill.
            **({"maxnreg": 128} if NVIDIA.value and length <= 8 and d_state <= 128 else {}),
        )
    if norm_I is None:
        return Operand(out)
    return Operand(out, squares, heads * head_dim, norm_eps)


@triton.jit
def _scan_window(
    p_ptr, rows_ptr, commits_ptr, h_ptr, a_log_ptr, d_ptr, norm_ptr, out_ptr, squares_ptr, entries_ptr,
    taps_ptr, own_ptr, U, C, share, L: tl.constexpr, H: tl.constexpr, P: tl.constexpr, N: tl.constexpr,
    G: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, NORM: tl.constexpr, LANES: tl.constexpr,
    WARPS: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    head = tl.program_id(0) // (P // BLOCK_P)
    part = tl.program_id(0) % (P // BLOCK_P)
    row = tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = H * P
    slot = tl.load(rows_ptr + row)
    # A state in registers: some of N in each thread, the others in the lanes of a warp, some of P in each
    # warp. Everything is loaded as the threads need it, so that nothing is exchanged but sums of squares.
    lane = tl.arange(0, LANES)[None, :, None, None]
    warp = tl.arange(0, WARPS)[None, None, :, None] * (BLOCK_P // WARPS)
    width = part * BLOCK_P + warp + tl.arange(0, BLOCK_P // WARPS)[None, None, None, :] + lane * 0
    state = tl.arange(0, N // LANES)[:, None, None, None] + lane * (N // LANES)
    place = h_ptr + (slot * H + head) * P * N + width * N + state
    h = tl.load(place, eviction_policy="evict_first").to(tl.float32)  # read once: keep out of the cache
    rate = -tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    skip = tl.load(d_ptr + head).to(tl.float32)
    entry = tl.load(entries_ptr + slot)
    if NORM:
        norm = tl.load(norm_ptr + head * P + width).to(tl.float32)
    wait_for_previous(PDL)  # for the projection; the state is that of an earlier call
    commits = tl.load(commits_ptr + row)
    p_ptr += row * L * U
    gates, inputs, Bs, cs, steps = (), (), (), (), ()
    for token in tl.static_range(L):
        gates += (tl.load(p_ptr + token * U + head * P + width),)
        inputs += (tl.load(p_ptr + token * U + inner + head * P + width),)
        group = p_ptr + token * U + 2 * inner + head // (H // G) * N + state
        Bs += (tl.load(group),)
        cs += (tl.load(group + G * N),)
        steps += (tl.load(p_ptr + token * U + 2 * inner + 2 * G * N + head),)
    # Otherwise the assembler moves some of these loads behind what needs the others, and that before them.
    tl.debug_barrier()
    if U > 0:  # always
        squares = tl.zeros((1, LANES, WARPS), tl.float32)
        for token in tl.static_range(L):
            h = h * tl.exp(steps[token] * rate) + inputs[token] * steps[token] * Bs[token]
            y = tl.sum(tl.sum(h * cs[token], axis=0), axis=0)[None, None, :, :]
            y = (y + skip * inputs[token]) * gates[token]
            squares = tl.where(tl.arange(0, LANES)[None, :, None] == token, tl.sum(y * y, axis=3), squares)
            if NORM:
                y *= norm
            target = out_ptr + (row * L + token) * inner + head * P + width
            tl.store(target, y.to(out_ptr.dtype.element_ty), mask=lane == 0)
            tl.store(place, h.to(h_ptr.dtype.element_ty), mask=token + 1 == commits)
        number = tl.arange(0, LANES)
        target = squares_ptr + (row * L + number) * tl.num_programs(0) + tl.program_id(0)
        tl.store(target, tl.sum(tl.sum(squares, axis=2), axis=0), mask=number < L)
    if commits > 0:
        # The last inputs of the convolution, old ones and the window's own.
        first = tl.program_id(0) * share
        tap, channel = tl.arange(0, BLOCK_W)[:, None], first + tl.arange(0, BLOCK_C)[None, :]
        mine = (tap < W - 1) & (channel < first + share) & (channel < C)
        kept = tap + commits < W - 1
        old = taps_ptr + (slot * W + (entry + 1 + tap + commits) % W) * C + channel
        own = own_ptr + (row * L + commits + tap - (W - 1)) * C + channel
        old, own = tl.load(old, mask=mine & kept), tl.load(own, mask=mine & (kept == 0))
        tl.debug_barrier()  # each entry has been read before another one replaces it
        replaced = taps_ptr + (slot * W + (entry + 1 + tap) % W) * C + channel
        tl.store(replaced, tl.where(kept, old, own), mask=mine)

"""Mamba2 for one token in each of a few rows, between its projections: convolution, then scan and gate.

Shape legend: S slots, R rows of a step, each in a slot; U projection width, I inner width, C convolved
channels, W taps, H heads, P head width, G groups, N state width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.decoding import Mamba2Inputs, mamba2_history, mamba2_prepared
from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous


def prepare_mamba2(projected_RU: Tensor, u_SU: Tensor | None, rows_R: Tensor, inputs: Mamba2Inputs) -> Tensor:
    """Return ``[silu(gate), x, B, C, softplus(dt)]``, (R, U) float32, of one token in each row's slot.

    ``x, B, C`` are convolved, with SiLU. The token's inputs to the convolution are written to their entry.

    Args:
        projected_RU: gate, x, B, C, dt; contiguous.
        u_SU: the injection of each slot, or None.
        rows_R: int64, the slot of each row, all different.
        inputs: parameters of the convolution, and the bias of dt.

    """
    rows, width = projected_RU.shape
    out = torch.empty(rows, width, dtype=torch.float32, device=projected_RU.device)
    with on_device(out.device):
        _prepare_mamba2[(triton.cdiv(width, 512), rows)](
            projected_RU,
            projected_RU if u_SU is None else u_SU,
            rows_R,
            out,
            width,
            *inputs.pointers(),
            HAS_U=u_SU is not None,
            W=inputs.taps,
            HAS_BIAS=inputs.conv_bias_C is not None,
            BLOCK=512,
            **overlapping(out.device),
            num_warps=4,
        )
    return out


class ScanTiles(NamedTuple):
    """The tiles of a scan: features of a head per program, warps."""

    features: int
    warps: int


def scan_tiles(rows: int) -> ScanTiles:
    """Return the tiles of the scan of this many rows."""
    return ScanTiles(16 if rows < 4 else 32, 4)


def scan_step(
    prepared_RU: Tensor,
    rows_R: Tensor,
    committing_R: Tensor,
    h_SHPN: Tensor,
    *,
    A_log_H: Tensor,
    D_H: Tensor,
    groups: int,
    norm_I: Tensor | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """Return ``y · silu(gate)``, (R, I), of one token in each row's slot, and partial squares, (R, X).

    Args:
        prepared_RU: result of ``prepare_mamba2``.
        rows_R: int64, the slot of each row, all different.
        committing_R: bool, the rows that commit: only their ``h`` is replaced.
        h_SHPN: states, P and N powers of 2.
        A_log_H: ``log(−A)``.
        D_H: the skip connection.
        groups: number of groups of heads that share B and C.
        norm_I: scales the result but not its squares: to complete an RMS norm over the heads, divide by the
            root of their mean.
        dtype: type of the result.

    """
    _, heads, head_dim, d_state = h_SHPN.shape
    rows = len(rows_R)
    out = torch.empty(rows, heads * head_dim, dtype=dtype, device=h_SHPN.device)
    tiles = scan_tiles(rows)
    part = min(head_dim, tiles.features)
    parts = heads * (head_dim // part)
    squares = torch.empty(rows, parts, dtype=torch.float32, device=h_SHPN.device)
    with on_device(out.device):
        _scan_step[(parts, rows)](
            prepared_RU,
            rows_R,
            committing_R.view(torch.int8),
            h_SHPN,
            A_log_H,
            D_H,
            D_H if norm_I is None else norm_I,
            out,
            squares,
            prepared_RU.shape[1],
            H=heads,
            P=head_dim,
            N=d_state,
            G=groups,
            NORM=norm_I is not None,
            BLOCK_P=part,
            **overlapping(out.device),
            num_warps=tiles.warps,
        )
    return out, squares


@triton.jit
def _prepare_mamba2(
    p_ptr, u_ptr, rows_ptr, out_ptr, U, entries_ptr, taps_ptr, conv_ptr, conv_bias_ptr, dt_bias_ptr, inner,
    C, HAS_U: tl.constexpr, W: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    start_next(PDL)  # late, because the scan reads states before it waits
    row = tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = m < U
    y = tl.load(p_ptr + row * U + m, mask=real, other=0.0).to(tl.float32)
    slot = tl.load(rows_ptr + row)
    if HAS_U:
        y += tl.load(u_ptr + slot * U + m, mask=real, other=0.0).to(tl.float32)
    entry = tl.load(entries_ptr + slot)
    taps_ptr += slot * W * C
    newest, earlier = mamba2_history(
        m, real, entry, taps_ptr, conv_ptr, conv_bias_ptr, dt_bias_ptr, inner, C, W, HAS_BIAS
    )
    y = mamba2_prepared(y, newest, earlier, m, real, taps_ptr + entry * C, inner, C)
    tl.store(out_ptr + row * U + m, y, mask=real)


@triton.jit
def _scan_step(
    p_ptr, rows_ptr, committing_ptr, h_ptr, a_log_ptr, d_ptr, norm_ptr, out_ptr, squares_ptr, U,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, G: tl.constexpr, NORM: tl.constexpr,
    BLOCK_P: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    head = tl.program_id(0) // (P // BLOCK_P)
    part = tl.program_id(0) % (P // BLOCK_P)
    row = tl.program_id(1).to(tl.int64)
    inner: tl.constexpr = H * P
    rate = tl.exp(tl.load(a_log_ptr + head).to(tl.float32))
    slot = tl.load(rows_ptr + row)
    p_ptr += row * U
    width, state = part * BLOCK_P + tl.arange(0, BLOCK_P), tl.arange(0, N)
    place = h_ptr + (slot * H + head) * P * N + width[:, None] * N + state[None, :]
    h = tl.load(place, eviction_policy="evict_first").to(tl.float32)  # read once: keep out of the cache
    wait_for_previous(PDL)  # for the projection; the state is that of an earlier call
    group = head // (H // G) * N + state
    gate = tl.load(p_ptr + head * P + width)
    x = tl.load(p_ptr + inner + head * P + width)
    B = tl.load(p_ptr + 2 * inner + group)
    c = tl.load(p_ptr + 2 * inner + G * N + group)
    dt = tl.load(p_ptr + 2 * inner + 2 * G * N + head)
    decay = tl.exp(-dt * rate)
    # C (decay h + dt x Bᵀ) without computing the sum in brackets: usually the next h is not needed.
    skip = dt * tl.sum(B * c) + tl.load(d_ptr + head).to(tl.float32)
    y = decay * tl.sum(h * c[None, :], axis=1) + skip * x
    y *= gate
    tl.store(squares_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.sum(y * y))
    if NORM:
        y *= tl.load(norm_ptr + head * P + width).to(tl.float32)
    tl.store(out_ptr + row * inner + head * P + width, y.to(out_ptr.dtype.element_ty))
    if tl.load(committing_ptr + row) != 0:
        h = tl.load(place).to(tl.float32)  # loaded again to free registers in between
        h = h * decay + (dt * x)[:, None] * B[None, :]
        tl.store(place, h.to(h_ptr.dtype.element_ty))

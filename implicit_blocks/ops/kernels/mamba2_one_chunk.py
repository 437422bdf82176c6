"""Gradients of Mamba2's scan for short sequences: all pairs of blocks of tokens in parallel.

``mamba2_walk`` contains the scan, and defines the shapes and ``conv``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.instructions import exp
from implicit_blocks.ops.kernels.mamba2_walk import LAUNCH, Steps, block_of, constants, padded

if TYPE_CHECKING:
    from implicit_blocks.ops.mamba2_mix import Mamba2Sizes


def backward(
    dy_BLI: Tensor, conv_BLC: Tensor, steps: Steps, A_log_H: Tensor, D_H: Tensor, *, sizes: Mamba2Sizes
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of ``conv`` (B, L, C), and of dt (B, H, L), A_log (H,), D (H,) in float32."""
    batch, length, _ = conv_BLC.shape
    block = block_of(length, sizes)
    blocks = triton.cdiv(length, block)
    pairs = batch * sizes.n_groups
    dconv = torch.empty_like(conv_BLC)
    like_steps = (blocks, *steps.dt_BHL.shape)
    by_column = torch.empty(like_steps, dtype=torch.float32, device=dy_BLI.device)  # sums of a tile over t …
    by_row = torch.empty_like(by_column)  # … and over s
    tiles = dy_BLI.new_empty(pairs, blocks * (blocks + 1) // 2, block, block)
    dD = torch.empty(batch, blocks, sizes.n_heads, dtype=torch.float32, device=dy_BLI.device)
    ddt, dA = torch.empty_like(steps.dt_BHL), torch.empty_like(steps.dt_BHL[:, :, 0])
    given = constants(sizes, block)
    with torch.cuda.device(dy_BLI.device):
        _products_backward[(tiles.shape[1] * pairs,)](
            dy_BLI, conv_BLC, *steps, tiles, by_column, by_row, length, batch, **given, **LAUNCH
        )
        _maps_backward[(blocks * pairs,)](tiles, conv_BLC, dconv, length, blocks, **given, num_warps=4)
        _inputs_backward[(blocks * batch * sizes.n_heads,)](
            dy_BLI, conv_BLC, *steps, D_H, dconv, dD, length, blocks, **given, **LAUNCH
        )
        _steps_backward[(batch * sizes.n_heads,)](
            *steps,
            A_log_H,
            by_column,
            by_row,
            ddt,
            dA,
            length,
            blocks,
            batch,
            sizes.n_heads,
            TOKENS=padded(length),
            BLOCK=block,
        )
    return dconv, ddt, dA.sum(0), dD.sum((0, 1))


@triton.jit
def _products_backward(
    dy_ptr, conv_ptr, dt_ptr, a_ptr, tiles_ptr, column_ptr, row_ptr, L, batch,
    HEADS: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # A tile: tokens t of one block, s of the same or an earlier one. It computes the gradient of C · B,
    # summed over heads, and for each head the sums needed by the step sizes.
    inner: tl.constexpr = HEADS * P
    channels: tl.constexpr = inner + 2 * GROUPS * N
    per_group: tl.constexpr = HEADS // GROUPS
    pairs = batch * GROUPS
    number = tl.program_id(0) // pairs
    pair = tl.program_id(0) % pairs
    late = 0
    while (late + 1) * (late + 2) // 2 <= number:
        late += 1
    early = number - late * (late + 1) // 2
    row = (pair // GROUPS).to(tl.int64)
    group = pair % GROUPS
    t = late * BLOCK + tl.arange(0, BLOCK)
    s = early * BLOCK + tl.arange(0, BLOCK)
    state = tl.arange(0, N)
    entry = tl.arange(0, P)
    maps = conv_ptr + row * L * channels + inner + group * N
    C = tl.load(maps + GROUPS * N + t[:, None] * channels + state[None, :], mask=(t < L)[:, None], other=0.0)
    B = tl.load(maps + s[None, :] * channels + state[:, None], mask=(s < L)[None, :], other=0.0)
    products = tl.where(t[:, None] >= s[None, :], tl.dot(C, B), 0.0)
    dproducts = tl.zeros((BLOCK, BLOCK), tl.float32)
    for one in range(per_group):
        head = group * per_group + one
        steps = (row * HEADS + head) * L
        a_t = tl.load(a_ptr + steps + t, mask=t < L, other=0.0)
        a_s = tl.load(a_ptr + steps + s, mask=s < L, other=0.0)
        dt = tl.load(dt_ptr + steps + s, mask=s < L, other=0.0)
        dy = tl.load(
            dy_ptr + (row * L + t)[:, None] * inner + head * P + entry[None, :],
            mask=(t < L)[:, None],
            other=0.0,
        )
        x = tl.load(
            conv_ptr + (row * L + s)[None, :] * channels + head * P + entry[:, None],
            mask=(s < L)[None, :],
            other=0.0,
        )
        decayed = tl.dot(dy, x) * exp(tl.minimum(a_t[:, None] - a_s[None, :], 0.0))
        dproducts += decayed * dt[None, :]
        decayed *= products
        tl.store(column_ptr + late * batch * HEADS * L + steps + s, tl.sum(decayed, axis=0), mask=s < L)
        tl.store(
            row_ptr + early * batch * HEADS * L + steps + t,
            tl.sum(decayed * dt[None, :], axis=1),
            mask=t < L,
        )
    dproducts = tl.where(t[:, None] >= s[None, :], dproducts, 0.0)
    place = (pair.to(tl.int64) * (tl.num_programs(0) // pairs) + number) * BLOCK * BLOCK
    offset = tl.arange(0, BLOCK)[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    tl.store(tiles_ptr + place + offset, dproducts.to(tiles_ptr.dtype.element_ty))


@triton.jit
def _maps_backward(
    tiles_ptr, conv_ptr, dconv_ptr, L, blocks,
    HEADS: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inner: tl.constexpr = HEADS * P
    channels: tl.constexpr = inner + 2 * GROUPS * N
    mine = tl.program_id(0) % blocks
    pair = tl.program_id(0) // blocks
    row = (pair // GROUPS).to(tl.int64)
    first = inner + (pair % GROUPS) * N
    token = mine * BLOCK + tl.arange(0, BLOCK)
    state = tl.arange(0, N)
    one = tl.arange(0, BLOCK)
    tiles_ptr += pair.to(tl.int64) * (blocks * (blocks + 1) // 2) * BLOCK * BLOCK
    dC = tl.zeros((BLOCK, N), tl.float32)
    for block in range(mine + 1):
        other = block * BLOCK + one
        tile = tiles_ptr + (mine * (mine + 1) // 2 + block) * BLOCK * BLOCK
        weights = tl.load(tile + one[:, None] * BLOCK + one[None, :])
        source = conv_ptr + (row * L + other)[:, None] * channels + first + state[None, :]
        dC += tl.dot(weights, tl.load(source, mask=(other < L)[:, None], other=0.0))
    dB = tl.zeros((BLOCK, N), tl.float32)
    for block in range(mine, blocks):
        other = block * BLOCK + one
        tile = tiles_ptr + (block * (block + 1) // 2 + mine) * BLOCK * BLOCK
        weights = tl.load(tile + one[None, :] * BLOCK + one[:, None])
        source = conv_ptr + (row * L + other)[:, None] * channels + first + GROUPS * N + state[None, :]
        dB += tl.dot(weights, tl.load(source, mask=(other < L)[:, None], other=0.0))
    target = dconv_ptr + (row * L + token)[:, None] * channels + first + state[None, :]
    tl.store(target, dB.to(dconv_ptr.dtype.element_ty), mask=(token < L)[:, None])
    tl.store(target + GROUPS * N, dC.to(dconv_ptr.dtype.element_ty), mask=(token < L)[:, None])


@triton.jit
def _inputs_backward(
    dy_ptr, conv_ptr, dt_ptr, a_ptr, D_ptr, dconv_ptr, dD_ptr, L, blocks,
    HEADS: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inner: tl.constexpr = HEADS * P
    channels: tl.constexpr = inner + 2 * GROUPS * N
    head = tl.program_id(0) % HEADS  # adjacent programs: heads that read the same B and C
    mine = tl.program_id(0) // HEADS % blocks
    row = (tl.program_id(0) // HEADS // blocks).to(tl.int64)
    group = head // (HEADS // GROUPS)
    steps = (row * HEADS + head) * L
    s = mine * BLOCK + tl.arange(0, BLOCK)
    known = s < L
    state = tl.arange(0, N)
    entry = tl.arange(0, P)
    maps = conv_ptr + row * L * channels + inner + group * N
    B = tl.load(maps + s[:, None] * channels + state[None, :], mask=known[:, None], other=0.0)
    a_s = tl.load(a_ptr + steps + s, mask=known, other=0.0)
    dt = tl.load(dt_ptr + steps + s, mask=known, other=0.0)
    dx = tl.zeros((BLOCK, P), tl.float32)
    for block in range(mine, blocks):
        t = block * BLOCK + tl.arange(0, BLOCK)
        C = tl.load(
            maps + GROUPS * N + t[None, :] * channels + state[:, None], mask=(t < L)[None, :], other=0.0
        )
        a_t = tl.load(a_ptr + steps + t, mask=t < L, other=0.0)
        decay = exp(tl.minimum(a_t[None, :] - a_s[:, None], 0.0))
        weight = tl.where(t[None, :] >= s[:, None], tl.dot(B, C) * decay * dt[:, None], 0.0)
        dy = tl.load(
            dy_ptr + (row * L + t)[:, None] * inner + head * P + entry[None, :],
            mask=(t < L)[:, None],
            other=0.0,
        )
        dx += tl.dot(weight.to(dy.dtype), dy)
    own = (row * L + s)[:, None] * inner + head * P + entry[None, :]
    dy = tl.load(dy_ptr + own, mask=known[:, None], other=0.0).to(tl.float32)
    dx += tl.load(D_ptr + head).to(tl.float32) * dy
    place = (row * L + s)[:, None] * channels + head * P + entry[None, :]
    x = tl.load(conv_ptr + place, mask=known[:, None], other=0.0).to(tl.float32)
    tl.store(dD_ptr + (row * blocks + mine) * HEADS + head, tl.sum(dy * x))
    tl.store(dconv_ptr + place, dx.to(dconv_ptr.dtype.element_ty), mask=known[:, None])


@triton.jit
def _steps_backward(
    dt_ptr, a_ptr, A_log_ptr, column_ptr, row_ptr, ddt_ptr, dA_ptr, L, blocks, batch, HEADS,
    TOKENS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # a_t enters every weight of its row with + and of its column with −; it is the sum of A dt up to t.
    steps = tl.program_id(0).to(tl.int64) * L
    whole = batch.to(tl.int64) * HEADS * L
    token = tl.arange(0, TOKENS)
    here = token < L
    dt = tl.load(dt_ptr + steps + token, mask=here, other=0.0)
    by_column = tl.zeros((TOKENS,), tl.float32)
    by_row = tl.zeros((TOKENS,), tl.float32)
    for block in range(blocks):
        source = block * whole + steps + token
        by_column += tl.load(column_ptr + source, mask=here & (token // BLOCK <= block), other=0.0)
        by_row += tl.load(row_ptr + source, mask=here & (token // BLOCK >= block), other=0.0)
    da = by_row - dt * by_column
    after = tl.cumsum(da, axis=0, reverse=True)
    A = -tl.exp(tl.load(A_log_ptr + tl.program_id(0) % HEADS).to(tl.float32))
    tl.store(ddt_ptr + steps + token, by_column + A * after, mask=here)
    tl.store(dA_ptr + tl.program_id(0), tl.sum(dt * after) * A)

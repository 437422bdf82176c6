"""Mamba2's scan: a program processes the blocks of one head in order, with the state in registers.

With ``a`` the running sum of ``A dt``, ``y_t = D x_t + Σ_{s ≤ t} (C_t · B_s) exp(a_t − a_s) dt_s x_s``:
attention with decay within a block of tokens, and a state for earlier tokens (T. Dao and A. Gu, "Transformers
are SSMs", ICML 2024, section 6). Separate kernels for the states of chunks write and read these states; this
kernel does not, but needs at least as many heads times sequences as the GPU has multiprocessors.

Shapes: B batch, L tokens, H heads, P head width, G groups, N state width, U projection width, I = H · P, C =
I + 2GN convolved channels. ``conv`` contains x, B and C side by side, as the convolution writes them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.instructions import exp, prefetch
from implicit_blocks.ops.kernels.mamba2_parts import Added, _load_sum

if TYPE_CHECKING:
    from implicit_blocks.ops.mamba2_mix import Mamba2Sizes

HEADS_AT_ONCE = 16  # heads per program of the step sizes
BLOCK = 64  # tokens
WHOLE_ROW = 64  # 16-bit columns from which on a tile's layout in shared memory is independent of its width
LAUNCH = {"num_warps": 4, "num_stages": 1}


class Steps(NamedTuple):
    """Step sizes and running sums of ``A dt``, each (B, H, L) float32."""

    dt_BHL: Tensor
    a_BHL: Tensor


def step_sizes(
    projected_BLU: Tensor,
    added: Added,
    dt_bias_H: Tensor,
    A_log_H: Tensor,
    *,
    sizes: Mamba2Sizes,
    by_block: bool,
) -> Steps:
    """Return ``dt = softplus(projected + u + dt_bias)`` of the last H columns, and the running sums.

    ``by_block``: sums restart at each block, for long sequences, whose total sums would be large compared to
    their differences.
    """
    batch, length, width = projected_BLU.shape
    heads = dt_bias_H.shape[0]
    dt = torch.empty(batch, heads, length, dtype=torch.float32, device=projected_BLU.device)
    a = torch.empty_like(dt)
    tokens = block_of(length, sizes) if by_block else padded(length)
    with torch.cuda.device(dt.device):
        _step_sizes[(batch, triton.cdiv(heads, HEADS_AT_ONCE), triton.cdiv(length, tokens))](
            projected_BLU,
            *added.given(projected_BLU),
            dt_bias_H,
            A_log_H,
            dt,
            a,
            *(length, heads, projected_BLU.stride(1), width),
            **added.constants(),
            TOKENS=tokens,
            HEADS=HEADS_AT_ONCE,
        )
    return Steps(dt, a)


def forward(
    conv_BLC: Tensor, steps: Steps, D_H: Tensor, *, sizes: Mamba2Sizes, return_state: bool, by_block: bool
) -> tuple[Tensor, Tensor | None]:
    """Return ``y``, (B, L, I), and if requested the final state, (B, H, P, N) float32."""
    batch, length, _ = conv_BLC.shape
    y = conv_BLC.new_empty(batch, length, sizes.inner)
    shape = (batch, sizes.n_heads, sizes.head_dim, sizes.d_state)
    state = torch.empty(shape, dtype=torch.float32, device=y.device) if return_state else None
    block = block_of(length, sizes)
    with torch.cuda.device(y.device):
        _forward[(batch * sizes.n_heads,)](
            conv_BLC,
            *steps,
            D_H,
            y,
            state if state is not None else steps.dt_BHL,
            length,
            triton.cdiv(length, block),
            STATE=return_state,
            BY_BLOCK=by_block,
            **constants(sizes, block),
            **LAUNCH,
        )
    return y, state


def padded(length: int) -> int:
    """Return the next power of two, at least 16."""
    return max(16, 1 << (length - 1).bit_length())


def block_of(length: int, sizes: Mamba2Sizes) -> int:
    """Return the number of tokens per block.

    Blocks of 64 tokens use Hopper's matrix instructions on tiles of N and of P columns, one after another at
    one place in shared memory. Where the layouts of these tiles differ, ptxas 12.8, the assembler of Triton
    3.6, may compute the address of the second tile from a register that no instruction has written, and the
    kernel ends with "an illegal memory access was encountered" (``tools/unset_registers.py`` finds this).
    Blocks of 32 use instructions without such addresses.
    """
    alike = min(sizes.head_dim, WHOLE_ROW) == min(sizes.d_state, WHOLE_ROW)
    return min(BLOCK if alike else BLOCK // 2, padded(length))


def constants(sizes: Mamba2Sizes, block: int) -> dict[str, int]:
    """Return the compile-time constants of kernels."""
    return {
        "HEADS": sizes.n_heads,
        "P": sizes.head_dim,
        "GROUPS": sizes.n_groups,
        "N": sizes.d_state,
        "BLOCK": block,
    }


@triton.jit
def _step_sizes(
    p_ptr, u_ptr, rows_ptr, bias_ptr, A_log_ptr, dt_ptr, a_ptr, L, H, stride, width,
    HAS_U: tl.constexpr, HAS_ROWS: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    mask = (token < L)[:, None] & (head < H)[None, :]
    place, column = (row * L + token)[:, None], (width - H + head)[None, :]
    real = (token < L)[:, None]
    raw = _load_sum(p_ptr, u_ptr, rows_ptr, place, real, stride, width, column, mask, HAS_U, HAS_ROWS)
    raw += tl.load(bias_ptr + head, mask=head < H, other=0.0).to(tl.float32)[None, :]
    grown = tl.exp(tl.minimum(raw, 20.0))
    more = 1.0 + grown  # corrects the rounding of 1 + e in log(1 + e)
    dt = tl.where(raw > 20.0, raw, tl.where(more == 1.0, grown, tl.log(more) * (grown / (more - 1.0))))
    dt = tl.where(mask, dt, 0.0)
    A = -tl.exp(tl.load(A_log_ptr + head, mask=head < H, other=0.0).to(tl.float32))
    a = tl.cumsum(dt * A[None, :], axis=0)
    target = (row * H + head)[None, :] * L + token[:, None]
    tl.store(dt_ptr + target, dt, mask=mask)
    tl.store(a_ptr + target, a, mask=mask)


@triton.jit
def _forward(
    conv_ptr, dt_ptr, a_ptr, D_ptr, y_ptr, state_ptr, L, blocks, STATE: tl.constexpr, BY_BLOCK: tl.constexpr,
    HEADS: tl.constexpr, P: tl.constexpr, GROUPS: tl.constexpr, N: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    inner: tl.constexpr = HEADS * P
    channels: tl.constexpr = inner + 2 * GROUPS * N
    head = tl.program_id(0) % HEADS  # adjacent programs: heads that read the same B and C
    row = (tl.program_id(0) // HEADS).to(tl.int64)
    steps = (row * HEADS + head) * L
    state = tl.arange(0, N)
    entry = tl.arange(0, P)
    first = inner + head // (HEADS // GROUPS) * N
    D = tl.load(D_ptr + head).to(tl.float32)
    h = tl.zeros((N, P), tl.float32)
    a_before = 0.0
    maps = conv_ptr + row * L * channels + first
    for block in range(blocks):
        token = block * BLOCK + tl.arange(0, BLOCK)
        here = token < L
        tokens = (row * L + token)[:, None]
        last = tl.minimum((block + 1) * BLOCK, L) - 1
        B = tl.load(maps + token[None, :] * channels + state[:, None], mask=here[None, :], other=0.0)
        C = tl.load(
            maps + GROUPS * N + token[:, None] * channels + state[None, :], mask=here[:, None], other=0.0
        )
        x = tl.load(conv_ptr + tokens * channels + head * P + entry[None, :], mask=here[:, None], other=0.0)
        a = tl.load(a_ptr + steps + token, mask=here, other=0.0)
        dt = tl.load(dt_ptr + steps + token, mask=here, other=0.0)
        a_after = tl.load(a_ptr + steps + last)  # before the store below, for which a load would wait
        if block + 1 < blocks:  # x of the next block; B and C are in the cache, because other heads read them
            ahead = conv_ptr + (row * L + tl.minimum(token + BLOCK, L - 1)[:, None]) * channels
            prefetch(ahead + head * P + 64 * tl.arange(0, (P + 63) // 64)[None, :])
        decay = exp(a[:, None] - a[None, :])  # infinite only where the weight is 0
        weight = tl.where(token[:, None] >= token[None, :], tl.dot(C, B) * decay * dt[None, :], 0.0)
        y = D * x.to(tl.float32) + tl.dot(weight.to(x.dtype), x)
        if block > 0:
            y += tl.dot(C, h.to(C.dtype)) * exp(a - a_before)[:, None]
        target = y_ptr + tokens * inner + head * P + entry[None, :]
        tl.store(target, y.to(y_ptr.dtype.element_ty), mask=here[:, None])
        if STATE or BY_BLOCK or block + 1 < blocks:
            weight_x = x.to(tl.float32) * (exp(tl.minimum(a_after - a, 0.0)) * dt)[:, None]
            h = h * tl.exp(a_after - a_before) + tl.dot(B, weight_x.to(B.dtype))
            if not BY_BLOCK:
                a_before = a_after
    if STATE:
        place = (row * HEADS + head) * P * N + entry[None, :] * N + state[:, None]
        tl.store(state_ptr + place, h)

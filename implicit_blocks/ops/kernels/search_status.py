"""The status of a search's elements, updated after a call of its map by one launch.

The same rule in plain operators is ``implicit_blocks.search.state.StatusRule.update``: on a GPU these take a
launch each, and a running maximum over the tokens takes one thread per row.

Shapes: B rows, T elements of a row (its tokens with prefix scope, else 1); all with a last dimension of 1.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def updated(
    residual: Tensor,
    last_residual: Tensor,
    lowest_residual: Tensor,
    token_residual: Tensor,
    iterations: Tensor,
    active: Tensor,
    *,
    prefix_residual: Tensor | None,
    tolerance: float,
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return the status after a call with these residuals, which elements improved, and counts per row.

    All inputs are contiguous float32, except int64 ``iterations`` and bool ``active``; ``prefix_residual``
    (B, …, 1) is the largest residual of the tokens before each row's first one. The status is the five inputs
    after ``residual``, in their order. The counts are (3, B) float32: active elements, improved elements, and
    the lowest deciding residual.
    """
    rows = residual.shape[0]
    tokens = residual.numel() // rows
    old = (last_residual, lowest_residual, token_residual, iterations, active)
    counts = torch.empty(3, rows, dtype=torch.float32, device=residual.device)
    new, improved = [torch.empty_like(tensor) for tensor in old], torch.empty_like(active)
    block = max(16, min(1024, triton.next_power_of_2(tokens)))
    with torch.cuda.device(residual.device):
        _update[(rows,)](
            residual,
            *old,
            lowest_residual if prefix_residual is None else prefix_residual,
            *new,
            improved,
            counts,
            tokens,
            rows,
            tolerance,
            PREFIX=residual.ndim > 2,
            BEFORE=prefix_residual is not None,
            BLOCK=block,
        )
    return new, improved, counts


@triton.jit
def freeze(active, residual, last_residual):
    """Return the last residual of elements after a call, and the same with Inf in place of NaN.

    Inactive elements keep theirs. Comparisons with the second need no rule for NaN.
    """
    last_residual = tl.where(active, residual, last_residual)
    return last_residual, tl.where(last_residual == last_residual, last_residual, float("inf"))


@triton.jit
def decide(deciding, lowest_residual, tolerance):
    """Return where the deciding residual improved, its lowest value, and whether elements stay active.

    They do unless they have converged or diverged. ``deciding`` holds no NaN.
    """
    improved = deciding < lowest_residual
    active = (deciding > tolerance) & (deciding < float("inf"))
    return improved, tl.where(improved, deciding, lowest_residual), active


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _update(
    residual_ptr, last_ptr, lowest_ptr, token_ptr, iterations_ptr, active_ptr, prefix_ptr,
    new_last_ptr, new_lowest_ptr, new_token_ptr, new_iterations_ptr, new_active_ptr, improved_ptr, counts_ptr,
    T, rows, tolerance, PREFIX: tl.constexpr, BEFORE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    largest_before = tl.full((), 0.0, tl.float32)
    if BEFORE:
        largest_before = tl.load(prefix_ptr + row)
        largest_before = tl.where(largest_before == largest_before, largest_before, float("inf"))
    going = tl.full((), 0, tl.int32)
    better = tl.full((), 0, tl.int32)
    least = tl.full((), float("inf"), tl.float32)
    for first in range(0, T, BLOCK):
        token = first + tl.arange(0, BLOCK)
        inside = token < T
        at = row * T + token
        was = tl.load(active_ptr + at, mask=inside, other=0).to(tl.int1)
        residual = tl.load(residual_ptr + at, mask=inside, other=0.0)
        last_residual = tl.load(last_ptr + at, mask=inside, other=0.0)
        last_residual, deciding = freeze(was, residual, last_residual)
        tl.store(new_last_ptr + at, last_residual, mask=inside)
        if PREFIX:
            deciding = tl.maximum(tl.associative_scan(deciding, 0, _larger), largest_before)
            largest_before = tl.max(deciding, 0)
        lowest_residual = tl.load(lowest_ptr + at, mask=inside, other=0.0)
        improved, lowest_residual, active = decide(deciding, lowest_residual, tolerance)
        improved, active = inside & improved, inside & active
        tl.store(new_lowest_ptr + at, lowest_residual, mask=inside)
        own = lowest_residual
        if PREFIX:
            own = tl.where(improved, last_residual, tl.load(token_ptr + at, mask=inside, other=0.0))
        tl.store(new_token_ptr + at, own, mask=inside)
        tl.store(new_active_ptr + at, active, mask=inside)
        tl.store(improved_ptr + at, improved, mask=inside)
        count = tl.load(iterations_ptr + at, mask=inside, other=0)
        tl.store(new_iterations_ptr + at, count + was.to(tl.int64), mask=inside)
        going += tl.sum(active.to(tl.int32), 0)
        better += tl.sum(improved.to(tl.int32), 0)
        least = tl.minimum(least, tl.min(tl.where(inside, deciding, float("inf")), 0))
    tl.store(counts_ptr + row, going.to(tl.float32))
    tl.store(counts_ptr + rows + row, better.to(tl.float32))
    tl.store(counts_ptr + 2 * rows + row, least)

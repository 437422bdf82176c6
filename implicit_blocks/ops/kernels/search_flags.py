"""What a search knows of its elements, brought up to date after a call of its map by one launch.

On a GPU the operators of ``implicit_blocks.search.search``'s own rule take a launch each, and a running
maximum over the tokens is one thread a row.

Shapes: B rows, T elements of a row (its tokens with prefix scope, else 1); all with a last dimension of 1.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class Flags(NamedTuple):
    """What the driver keeps of each element, (B, T, 1) or (B, 1), and what it reads of each row."""

    last_residual: Tensor
    lowest_residual: Tensor
    token_residual: Tensor
    iterations: Tensor
    active: Tensor
    improved: Tensor
    counts: Tensor
    """(3, B) float32: how many are active, how many improved, and the lowest residual that decides."""


def updated(
    residual: Tensor,
    *,
    last_residual: Tensor,
    lowest_residual: Tensor,
    token_residual: Tensor,
    iterations: Tensor,
    active: Tensor,
    prefix_residual: Tensor | None,
    tolerance: float,
) -> Flags:
    """Return the flags after a call with these residuals, as the driver's ``measure`` defines them.

    All are contiguous float32, int64 ``iterations`` and bool ``active``; ``prefix_residual`` (B, …, 1) is the
    largest residual seen before each row's first element.
    """
    rows = residual.shape[0]
    tokens = residual.numel() // rows
    prefix = residual.ndim > 2
    counts = torch.empty(3, rows, dtype=torch.float32, device=residual.device)
    kept = (last_residual, lowest_residual, token_residual, iterations, active, active)
    new = Flags(*[*map(torch.empty_like, kept), counts])
    old = (
        residual,
        last_residual,
        lowest_residual,
        token_residual,
        iterations,
        active,
        lowest_residual if prefix_residual is None else prefix_residual,
    )
    block = max(16, min(1024, triton.next_power_of_2(tokens)))
    with torch.cuda.device(residual.device):
        _update[(rows,)](
            *old,
            *new,
            tokens,
            rows,
            tolerance,
            PREFIX=prefix,
            BEFORE=prefix_residual is not None,
            BLOCK=block,
        )
    return new


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
        last_residual = tl.where(was, residual, tl.load(last_ptr + at, mask=inside, other=0.0))
        tl.store(new_last_ptr + at, last_residual, mask=inside)
        # comparisons below then need no rule for NaN
        largest = tl.where(last_residual == last_residual, last_residual, float("inf"))
        if PREFIX:
            largest = tl.maximum(tl.associative_scan(largest, 0, _larger), largest_before)
            largest_before = tl.max(largest, 0)
        lowest_residual = tl.load(lowest_ptr + at, mask=inside, other=0.0)
        improved = inside & (largest < lowest_residual)
        lowest_residual = tl.where(improved, largest, lowest_residual)
        tl.store(new_lowest_ptr + at, lowest_residual, mask=inside)
        own = lowest_residual
        if PREFIX:
            own = tl.where(improved, last_residual, tl.load(token_ptr + at, mask=inside, other=0.0))
        tl.store(new_token_ptr + at, own, mask=inside)
        active = inside & (largest > tolerance) & (largest < float("inf"))
        tl.store(new_active_ptr + at, active, mask=inside)
        tl.store(improved_ptr + at, improved, mask=inside)
        count = tl.load(iterations_ptr + at, mask=inside, other=0)
        tl.store(new_iterations_ptr + at, count + was.to(tl.int64), mask=inside)
        going += tl.sum(active.to(tl.int32), 0)
        better += tl.sum(improved.to(tl.int32), 0)
        least = tl.minimum(least, tl.min(tl.where(inside, largest, float("inf")), 0))
    tl.store(counts_ptr + row, going.to(tl.float32))
    tl.store(counts_ptr + rows + row, better.to(tl.float32))
    tl.store(counts_ptr + 2 * rows + row, least)

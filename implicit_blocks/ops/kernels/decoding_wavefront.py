"""The kernels around the map in a call on tokens in flight: begin tokens, measure values, decide.

They compute what ``implicit_blocks.decoding.slots.wavefront`` computes in about two hundred operators of a
microsecond or two, for Picard iteration: one kernel before the map, one after it, and one that decides.

Shape legend: S slots, R rows of a call, each in a slot; W tokens in flight, T = R · W, row by row; D model
width.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous
from implicit_blocks.ops.kernels.residual import narrow, relative_residual
from implicit_blocks.solution import RELATIVE_FLOOR, SMALLEST_SCALE


class Windows(NamedTuple):
    """The fields of ``Flight`` and ``Wavefront`` that the kernels update in place, (S, W, …) and (S,).

    Points are float32, numbers float32 but float64 scales, counts int64, flags bool.
    """

    tokens: Tensor
    next: Tensor
    z: Tensor
    best: Tensor
    lowest: Tensor
    residual: Tensor
    scale: Tensor
    iterations: Tensor
    as_head: Tensor
    fresh: Tensor
    clean: Tensor
    within: Tensor
    done: Tensor
    converged: Tensor
    count_S: Tensor
    lengths_S: Tensor
    limit_S: Tensor

    def pointers(self) -> tuple[Tensor, ...]:
        """Return the arguments for kernels."""
        return tuple(t.view(torch.int8) if t.dtype == torch.bool else t for t in self)


class Entry(NamedTuple):
    """What precedes the first products of a call: embedding times ``factor``, and two RMS norms."""

    embedding_VD: Tensor
    factor: float
    norm_D: Tensor
    """The weight of the norm of embedded tokens."""
    norm_eps: float
    first_D: Tensor
    """The weight of the norm of points."""
    first_eps: float
    dtype: torch.dtype
    """Of the normalized vectors."""


class Begun(NamedTuple):
    """The inputs of the map: points (T, D), lengths (R,), numbers of tokens that it commits (R,).

    ``x_TD`` are the normalized embeddings of the tokens, and ``first_TD`` the normalized points.
    """

    z_TD: Tensor
    lengths_R: Tensor
    commits_R: Tensor
    x_TD: Tensor
    first_TD: Tensor


def begin_tokens(windows: Windows, rows_R: Tensor, entry: Entry, start_TD: Tensor | None = None) -> Begun:
    """Begin fresh tokens at ``start_TD``, or at zeros, count the calls, and return the inputs of the map."""
    rows, (_, tokens, width) = len(rows_R), windows.z.shape
    z = windows.z.new_empty(rows * tokens, width)
    x, first = torch.empty_like(z, dtype=entry.dtype), torch.empty_like(z, dtype=entry.dtype)
    lengths, commits = torch.empty_like(rows_R), torch.empty_like(rows_R)
    with on_device(z.device):
        _begin_tokens[(rows * tokens,)](
            rows_R,
            *windows.pointers(),
            z,
            lengths,
            commits,
            entry.embedding_VD,
            entry.norm_D,
            entry.first_D,
            z if start_TD is None else start_TD,
            x,
            first,
            entry.factor,
            entry.norm_eps,
            entry.first_eps,
            width,
            START=start_TD is not None,
            SMALLEST=SMALLEST_SCALE,  # as an argument it would be a float32, 0
            W=tokens,
            BLOCK_W=triton.next_power_of_2(tokens),
            BLOCK=triton.next_power_of_2(width),
            **overlapping(z.device),
            num_warps=4,
        )
    return Begun(z, lengths, commits, x, first)


def take_values(
    windows: Windows,
    rows_R: Tensor,
    fz_TD: Tensor,
    *,
    norm_D: Tensor | None,
    eps: float,
    value_TD: Tensor,
    following_TD: Tensor,
    damping: float,
    relative: bool,
    dtype: torch.dtype,
) -> Tensor:
    """Store values and next points, and update residuals; return the values in ``dtype``.

    The values are those of ``fz_TD`` after an RMS norm with ``norm_D``, if there is one. A value that is not
    finite is replaced by its point, after its residual is measured.
    """
    tokens, width = windows.z.shape[1:]
    hidden = torch.empty_like(fz_TD, dtype=dtype)
    with on_device(fz_TD.device):
        _take_values[(len(fz_TD),)](
            rows_R,
            fz_TD,
            fz_TD if norm_D is None else norm_D,
            windows.z,
            windows.residual,
            windows.scale,
            value_TD,
            following_TD,
            hidden,
            width,
            damping,
            RELATIVE_FLOOR,
            eps,
            NORM=norm_D is not None,
            RELATIVE=relative,
            W=tokens,
            BLOCK=triton.next_power_of_2(width),
            **overlapping(fz_TD.device),
            num_warps=4,
        )
    return hidden


def choose_tokens(logits_TV: Tensor, chosen_T: Tensor) -> None:
    """Write the index of the largest logit of each row, the first one of equal ones."""
    rows, words = logits_TV.shape
    with on_device(logits_TV.device):
        _choose_tokens[(rows,)](
            logits_TV,
            chosen_T,
            words,
            BLOCK=min(8192, triton.next_power_of_2(words)),
            **overlapping(logits_TV.device),
            num_warps=16,
        )


def decide_tokens(
    windows: Windows,
    rows_R: Tensor,
    *,
    value_RWD: Tensor,
    following_RWD: Tensor,
    chosen_RW: Tensor,
    report_5RW: Tensor,
    counts_3: Tensor,
    limits_S: tuple[Tensor, Tensor],
) -> None:
    """Decide by ``SlotSearch.limits`` which tokens are solved, begin anew or continue; move the windows."""
    rows, tokens, width = value_RWD.shape
    padded, block = triton.next_power_of_2(tokens), triton.next_power_of_2(width)
    with on_device(value_RWD.device):
        _decide_tokens[(rows,)](
            rows_R,
            *windows.pointers(),
            value_RWD,
            following_RWD,
            chosen_RW,
            report_5RW,
            counts_3,
            width,
            rows * tokens,
            *limits_S,
            W=tokens,
            BLOCK_W=padded,
            BLOCK=block,
            TOGETHER=min(padded, max(1, 4096 // block)),  # points at a time
            **overlapping(value_RWD.device),
            num_warps=8,
        )


@triton.jit
def _begin_tokens(
    rows_ptr, tokens_ptr, next_ptr, z_ptr, best_ptr, lowest_ptr, residual_ptr, scale_ptr, iterations_ptr,
    as_head_ptr, fresh_ptr, clean_ptr, within_ptr, done_ptr, converged_ptr, count_ptr, lengths_ptr, limit_ptr,
    z_out_ptr, lengths_out_ptr, commits_out_ptr,
    embedding_ptr, norm_ptr, first_ptr, start_ptr, x_out_ptr, first_out_ptr, factor, norm_eps, first_eps, D,
    START: tl.constexpr, SMALLEST: tl.constexpr, W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    other, column = tl.arange(0, BLOCK_W), tl.arange(0, BLOCK)
    real = column < D
    first_weight = tl.load(first_ptr + column, mask=real, other=0.0).to(tl.float32)
    weight = tl.load(norm_ptr + column, mask=real, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    start_next(PDL)  # late, as the first kernel of a call
    row = tl.program_id(0).to(tl.int64) // W
    number = tl.program_id(0).to(tl.int64) % W
    slot = tl.load(rows_ptr + row)
    every = tl.load(done_ptr + slot * W + other, mask=other < W, other=0).to(tl.int64)
    commits = tl.sum(every, axis=0)
    at = slot * W + number
    fresh = tl.load(fresh_ptr + at) != 0
    done = tl.load(done_ptr + at) != 0
    as_head = tl.load(as_head_ptr + at)
    iterations = tl.load(iterations_ptr + at)
    word = tl.load(tokens_ptr + at)
    z = tl.load(z_ptr + at * D + column, mask=real, other=0.0)
    x = tl.load(embedding_ptr + word * D + column, mask=real, other=0.0)
    tl.debug_barrier()  # all threads have loaded what the stores below replace
    head = number == commits
    begins = head & (fresh | (as_head == 0))
    here = tl.program_id(0).to(tl.int64) * D + column
    start = 0.0
    if START:
        start = tl.load(start_ptr + here, mask=real, other=0.0)
    z = tl.where(fresh, start, z)
    tl.store(z_ptr + at * D + column, z, mask=real)
    tl.store(z_out_ptr + here, z, mask=real)
    first = z * (1.0 / tl.sqrt(tl.sum(z * z) / D + first_eps)) * first_weight
    tl.store(first_out_ptr + here, first.to(first_out_ptr.dtype.element_ty), mask=real)
    x = (x * factor).to(embedding_ptr.dtype.element_ty).to(tl.float32)
    x = x * (1.0 / tl.sqrt(tl.sum(x * x) / D + norm_eps)) * weight
    tl.store(x_out_ptr + here, x.to(x_out_ptr.dtype.element_ty), mask=real)
    tl.store(best_ptr + at * D + column, z, mask=real & begins)
    tl.store(lowest_ptr + at, float("inf"), mask=begins)
    tl.store(scale_ptr + at, SMALLEST, mask=fresh)
    tl.store(iterations_ptr + at, tl.where(fresh, 0, iterations) + (done == 0).to(tl.int64))
    tl.store(as_head_ptr + at, tl.where(fresh, 0, as_head) + head.to(tl.int64))
    tl.store(clean_ptr + at, head.to(tl.int8), mask=fresh)
    tl.store(within_ptr + at, float("inf"), mask=fresh)
    tl.store(fresh_ptr + at, 0)
    if number == 0:
        tl.store(lengths_out_ptr + row, tl.load(lengths_ptr + slot))
        tl.store(commits_out_ptr + row, commits)


@triton.jit
def _take_values(
    rows_ptr, fz_ptr, norm_ptr, z_ptr, residual_ptr, scale_ptr, value_ptr, following_ptr, hidden_ptr,
    D, damping, floor, eps, NORM: tl.constexpr, RELATIVE: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    token = tl.program_id(0).to(tl.int64)
    at = tl.load(rows_ptr + token // W) * W + token % W
    column = tl.arange(0, BLOCK)
    real = column < D
    if NORM:
        weight = tl.load(norm_ptr + column, mask=real, other=0.0).to(tl.float32)
    wait_for_previous(PDL)
    fz = tl.load(fz_ptr + token * D + column, mask=real, other=0.0)
    z = tl.load(z_ptr + at * D + column, mask=real, other=0.0)
    if RELATIVE:
        scale = tl.load(scale_ptr + at)
    if NORM:
        fz = fz * (1.0 / tl.sqrt(tl.sum(fz * fz) / D + eps)) * weight
    step = fz - z
    wide = step.to(tl.float64)  # float32 cannot hold squares of numbers above 2e19
    residual = tl.sqrt(tl.sum(wide * wide))
    if RELATIVE:
        size = tl.sqrt(tl.sum(fz.to(tl.float64) * fz.to(tl.float64)))
        residual, scale = relative_residual(residual, size, scale, floor)
        tl.store(scale_ptr + at, scale)
    tl.store(residual_ptr + at, narrow(residual))
    # as torch.lerp
    further = tl.where(damping < 0.5, z + damping * step, fz - step * (1.0 - damping))
    value = tl.where(tl.abs(tl.sum(fz)) < float("inf"), fz, z)
    tl.store(value_ptr + token * D + column, value, mask=real)
    tl.store(following_ptr + token * D + column, further, mask=real)
    tl.store(hidden_ptr + token * D + column, value.to(hidden_ptr.dtype.element_ty), mask=real)


@triton.jit
def _choose_tokens(logits_ptr, chosen_ptr, V, BLOCK: tl.constexpr, PDL: tl.constexpr):
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), float("-inf"), tl.float32)
    index = tl.zeros((BLOCK,), tl.int32)
    for first in range(0, V, BLOCK):
        value = tl.load(logits_ptr + row * V + first + place, mask=first + place < V, other=float("-inf"))
        larger = value > largest
        largest = tl.where(larger, value, largest)
        index = tl.where(larger, first + place, index)
    most = tl.max(largest, axis=0)
    tl.store(chosen_ptr + row, tl.min(tl.where(largest == most, index, V), axis=0).to(tl.int64))


@triton.jit
def _any(flags):
    return tl.max(flags.to(tl.int32), axis=0) > 0


@triton.jit
def _decide_tokens(
    rows_ptr, tokens_ptr, next_ptr, z_ptr, best_ptr, lowest_ptr, residual_ptr, scale_ptr, iterations_ptr,
    as_head_ptr, fresh_ptr, clean_ptr, within_ptr, done_ptr, converged_ptr, count_ptr, lengths_ptr, limit_ptr,
    value_ptr, following_ptr, chosen_ptr, report_ptr, counts_ptr, D, T, tolerance_ptr, most_ptr,
    W: tl.constexpr, BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, TOGETHER: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    order = tl.arange(0, BLOCK_W).to(tl.int64)
    real = order < W
    at, here = slot * W + order, row * W + order
    count, length = tl.load(count_ptr + slot), tl.load(lengths_ptr + slot)
    limit = tl.load(limit_ptr + slot)
    tolerance, most = tl.load(tolerance_ptr + slot), tl.load(most_ptr + slot)
    tokens = tl.load(tokens_ptr + at, mask=real, other=0)
    lowest = tl.load(lowest_ptr + at, mask=real, other=0.0)
    residual = tl.load(residual_ptr + at, mask=real, other=0.0)
    scale = tl.load(scale_ptr + at, mask=real, other=0.0)
    iterations = tl.load(iterations_ptr + at, mask=real, other=0)
    as_head = tl.load(as_head_ptr + at, mask=real, other=0)
    clean = tl.load(clean_ptr + at, mask=real, other=0) != 0
    was_within = tl.load(within_ptr + at, mask=real, other=0.0)
    done = tl.load(done_ptr + at, mask=real, other=0) != 0
    converged = tl.load(converged_ptr + at, mask=real, other=0) != 0
    chosen = tl.load(chosen_ptr + here, mask=real, other=0)
    chosen = tl.where(done & converged, tl.load(next_ptr + at, mask=real, other=0), chosen)
    later = real & (order > 0)
    known = tl.load(done_ptr + at - 1, mask=later, other=0) & tl.load(
        converged_ptr + at - 1, mask=later, other=0
    )
    before = tl.load(chosen_ptr + here - 1, mask=later, other=0)
    before = tl.where(known != 0, tl.load(next_ptr + at - 1, mask=later, other=0), before)
    tl.debug_barrier()  # all threads have loaded what the stores below replace
    commits = tl.sum(done.to(tl.int64), axis=0)
    flying = real & (order < count)
    head = (order == commits) & flying
    finite = tl.abs(residual) < float("inf")
    # A successor that is in flight stays so if its own token is still the one chosen, and finite.
    bad = _any(head & (finite == 0))
    stays = ((tokens == before) & (finite | head | done)) | (order == 0)
    stays = stays & ((order <= commits) | (bad == 0)) & flying
    causal = order[:, None] >= order[None, :]
    stays = tl.min(tl.where(causal, stays.to(tl.int32)[None, :], 1), axis=1) > 0
    end = tl.sum(stays.to(tl.int64), axis=0)  # the number of tokens that stay in flight
    own = tl.where(done, 0.0, tl.where(residual == residual, residual, float("inf")))
    deciding = tl.max(tl.where(causal, own[None, :], 0.0), axis=1)
    within = stays & (done == 0) & (deciding <= tolerance)
    solved = within & (was_within < float("inf"))
    # The head decides as in sequential decoding.
    improved = head & (residual < lowest)
    lowest = tl.where(improved, residual, lowest)
    stops = head & stays & (solved == 0) & ((finite == 0) | ((as_head >= most) & (within == 0)))
    given_up, again = stops & clean, stops & (clean == 0)
    reported = solved | (done & (converged == 0))
    report = report_ptr + here
    tl.store(report, reported.to(tl.float64), mask=real)
    tl.store(report + T, chosen.to(tl.float64), mask=real)
    tl.store(report + 2 * T, (iterations - (done == 0).to(tl.int64)).to(tl.float64), mask=real)
    tl.store(report + 3 * T, tl.where(done, lowest, was_within).to(tl.float64), mask=real)
    tl.store(report + 4 * T, ((done == 0) | (lowest <= tolerance)).to(tl.float64), mask=real)
    new_within = tl.where(within, residual, float("inf"))
    new_done = solved | given_up
    # The windows move past the committed tokens; one token begins after those that stay.
    last = order == tl.maximum(end - 1, 0)
    usable = _any(last & (finite | new_done | (order < commits)))
    begins = (count > 0) & (end - commits < W) & (length + end < limit) & usable
    token = tl.sum(tl.where(last, chosen, 0), axis=0)
    place = end - commits
    kept = order < place
    fresh = (order == place) & begins
    moves = tl.minimum(order + commits, W - 1).to(tl.int32)
    # All flags are moved together, one bit each.
    IMPROVED: tl.constexpr = 1
    CONTINUES: tl.constexpr = 2
    SOLVED: tl.constexpr = 4
    GIVEN_UP: tl.constexpr = 8
    AGAIN: tl.constexpr = 16
    CLEAN: tl.constexpr = 32
    flags = IMPROVED * improved.to(tl.int32) + CONTINUES * (stays & (done == 0)).to(tl.int32)
    flags += SOLVED * solved.to(tl.int32) + GIVEN_UP * given_up.to(tl.int32)
    flags += AGAIN * again.to(tl.int32) + CLEAN * clean.to(tl.int32)
    moved = tl.gather(flags, moves, 0)
    anew = ((moved & AGAIN) > 0) & kept
    tl.store(tokens_ptr + at, tl.where(fresh, token, tl.gather(tokens, moves, 0)), mask=real)
    tl.store(next_ptr + at, tl.gather(chosen, moves, 0), mask=real)
    tl.store(lowest_ptr + at, tl.gather(lowest, moves, 0), mask=real)
    tl.store(residual_ptr + at, tl.gather(residual, moves, 0), mask=real)
    tl.store(scale_ptr + at, tl.gather(scale, moves, 0), mask=real)
    tl.store(iterations_ptr + at, tl.gather(iterations, moves, 0), mask=real)
    tl.store(as_head_ptr + at, tl.gather(as_head, moves, 0), mask=real)
    tl.store(fresh_ptr + at, (anew | fresh).to(tl.int8), mask=real)
    tl.store(clean_ptr + at, ((moved & CLEAN) > 0).to(tl.int8), mask=real)
    tl.store(within_ptr + at, tl.gather(new_within, moves, 0), mask=real)
    tl.store(done_ptr + at, (((moved & (SOLVED | GIVEN_UP)) > 0) & kept).to(tl.int8), mask=real)
    tl.store(converged_ptr + at, ((moved & SOLVED) > 0).to(tl.int8), mask=real)
    tl.store(count_ptr + slot, place + begins.to(tl.int64))
    tl.store(lengths_ptr + slot, length + commits)
    tl.atomic_add(counts_ptr, count)
    tl.atomic_add(counts_ptr + 1, (count > 0).to(tl.int64))
    restarts = ((end < count) & begins).to(tl.int64) + _any(anew).to(tl.int64)
    tl.atomic_add(counts_ptr + 2, restarts)
    column = tl.arange(0, BLOCK)
    for first in tl.static_range(0, W, TOGETHER):
        number = first + tl.arange(0, TOGETHER)
        source = tl.minimum(number + commits, W - 1)
        moved = tl.gather(flags, source.to(tl.int32), 0)[:, None]
        mask = (number < W)[:, None] & (column < D)[None, :]
        here_z = (slot * W + source)[:, None] * D + column[None, :]
        here_value = (row * W + source)[:, None] * D + column[None, :]
        old = tl.load(z_ptr + here_z, mask=mask, other=0.0)
        best = tl.load(best_ptr + here_z, mask=mask, other=0.0)
        value = tl.load(value_ptr + here_value, mask=mask, other=0.0)
        following = tl.load(following_ptr + here_value, mask=mask, other=0.0)
        tl.debug_barrier()  # points are read before those of earlier places replace them
        best = tl.where((moved & IMPROVED) > 0, value, best)
        z = tl.where((moved & CONTINUES) > 0, following, old)
        z = tl.where((moved & SOLVED) > 0, value, z)
        z = tl.where((moved & GIVEN_UP) > 0, best, z)
        z = tl.where((tl.abs(tl.sum(z, axis=1)) < float("inf"))[:, None], z, old)
        z = tl.where((number < place)[:, None], z, 0.0)
        target = (slot * W + number)[:, None] * D + column[None, :]
        tl.store(z_ptr + target, z, mask=mask)
        tl.store(best_ptr + target, best, mask=mask)

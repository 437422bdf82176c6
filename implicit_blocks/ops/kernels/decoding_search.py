"""The kernels around the map in a decoding step: gather the slots' points, and update them by its values.

In plain operators these are about forty kernels of a microsecond or two; here they are one before the map and
one after it.

Shape legend: S slots, R rows of a step, each in a slot, D model width, Y layers.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.overlap import on_device, overlapping, start_next, wait_for_previous
from implicit_blocks.ops.kernels.residual import narrow, relative_residual
from implicit_blocks.ops.kernels.search_status import decide, freeze
from implicit_blocks.solution import RELATIVE_FLOOR


def take_up(
    z_SD: Tensor, lengths_S: Tensor, busy_S: Tensor, done_S: Tensor, rows_R: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the rows' z (R, D), lengths (R,), and which of them are both busy and done, (R,) bool."""
    rows, width = len(rows_R), z_SD.shape[1]
    z = torch.empty(rows, width, dtype=z_SD.dtype, device=z_SD.device)
    lengths = torch.empty_like(rows_R)
    committing = torch.empty(rows, dtype=torch.bool, device=z_SD.device)
    with on_device(z.device):
        _take_up[(rows,)](
            z_SD,
            lengths_S,
            busy_S.view(torch.int8),
            done_S.view(torch.int8),
            rows_R,
            z,
            lengths,
            committing.view(torch.int8),
            width,
            BLOCK=triton.next_power_of_2(width),
            **overlapping(z.device),
            num_warps=4,
        )
    return z, lengths, committing


def take_in(
    fz_RD: Tensor,
    rows_R: Tensor,
    committing_R: Tensor,
    busy_S: Tensor,
    *,
    z_SD: Tensor,
    best_SD: Tensor,
    hidden_SD: Tensor,
    residual_S: Tensor,
    scale_S: Tensor,
    iterations_S: Tensor,
    converged_S: Tensor,
    done_S: Tensor,
    lengths_S: Tensor,
    entries_YS: Tensor | None,
    taps: int,
    damping: float,
    limits_S: tuple[Tensor, Tensor],
    relative: bool,
) -> None:
    """Take a Picard step in slots that search; in those that commit, count the token and keep ``f(z)``.

    Computes what ``SlotSearch.take`` computes, with its ``limits``. All other tensors but the first four are
    updated in place, in the rows' slots. ``entries_YS`` advance by one, modulo ``taps``, where a token is
    committed. ``scale_S`` is that of the relative residual, float64.
    """
    width = fz_RD.shape[1]
    layers = 1 if entries_YS is None else entries_YS.shape[0]
    with on_device(fz_RD.device):
        _take_in[(len(rows_R),)](
            fz_RD,
            rows_R,
            committing_R.view(torch.int8),
            busy_S.view(torch.int8),
            z_SD,
            best_SD,
            hidden_SD,
            residual_S,
            scale_S,
            iterations_S,
            converged_S.view(torch.int8),
            done_S.view(torch.int8),
            lengths_S,
            lengths_S if entries_YS is None else entries_YS,
            busy_S.shape[0],
            width,
            layers,
            taps,
            damping,
            *limits_S,
            RELATIVE_FLOOR,
            RELATIVE=relative,
            HAS_ENTRIES=entries_YS is not None,
            BLOCK=triton.next_power_of_2(width),
            BLOCK_Y=triton.next_power_of_2(layers),
            **overlapping(fz_RD.device),
            num_warps=4,
        )


def take_coarse(
    fz_RD: Tensor,
    rows_R: Tensor,
    *,
    z_SD: Tensor,
    best_SD: Tensor,
    busy_S: Tensor,
    done_S: Tensor,
    coarse_S: Tensor,
    scale_S: Tensor,
    iterations_S: Tensor,
    damping: float,
    begin_fine: float,
    limits_S: tuple[Tensor, Tensor],
    relative: bool,
) -> None:
    """Take a Picard step by a value with weights in 8 bits, in slots that search.

    Computes what ``QuantizedSearch`` computes: a slot leaves ``coarse_S`` at a residual up to ``begin_fine``
    or its tolerance, after half of its iterations, or if its value is not finite, and then keeps its point.
    """
    width = fz_RD.shape[1]
    with on_device(fz_RD.device):
        _take_coarse[(len(rows_R),)](
            fz_RD,
            rows_R,
            z_SD,
            best_SD,
            busy_S.view(torch.int8),
            done_S.view(torch.int8),
            coarse_S.view(torch.int8),
            scale_S,
            iterations_S,
            width,
            damping,
            begin_fine,
            *limits_S,
            RELATIVE_FLOOR,
            RELATIVE=relative,
            BLOCK=triton.next_power_of_2(width),
            **overlapping(fz_RD.device),
            num_warps=4,
        )


@triton.jit
def _take_up(
    z_ptr, lengths_ptr, busy_ptr, done_ptr, rows_ptr, z_out_ptr, lengths_out_ptr, committing_ptr, D,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    start_next(PDL)  # late, as the first kernel of a call
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    column = tl.arange(0, BLOCK)
    z = tl.load(z_ptr + slot * D + column, mask=column < D)
    tl.store(z_out_ptr + row * D + column, z, mask=column < D)
    tl.store(lengths_out_ptr + row, tl.load(lengths_ptr + slot))
    tl.store(committing_ptr + row, tl.load(busy_ptr + slot) & tl.load(done_ptr + slot))


@triton.jit
def _take_in(
    fz_ptr, rows_ptr, committing_ptr, busy_ptr, z_ptr, best_ptr, hidden_ptr, residual_ptr, scale_ptr,
    iterations_ptr, converged_ptr, done_ptr, lengths_ptr, entries_ptr, S, D, Y, taps, damping,
    tolerance_ptr, most_ptr, floor, RELATIVE: tl.constexpr, HAS_ENTRIES: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_Y: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    column = tl.arange(0, BLOCK)
    real = column < D
    committing = tl.load(committing_ptr + row) != 0
    active = (tl.load(busy_ptr + slot) != 0) & (committing == 0)
    fz = tl.load(fz_ptr + row * D + column, mask=real, other=0.0)
    z = tl.load(z_ptr + slot * D + column, mask=real, other=0.0)
    step = fz - z
    squares = step.to(tl.float64) * step.to(tl.float64)  # float32 cannot hold squares of numbers above 2e19
    residual = tl.sqrt(tl.sum(squares))
    if RELATIVE:
        size = tl.sqrt(tl.sum(fz.to(tl.float64) * fz.to(tl.float64)))
        scale = tl.load(scale_ptr + slot)
        residual, scale = relative_residual(residual, size, scale, floor)
        tl.store(scale_ptr + slot, scale, mask=active)
    before = tl.load(residual_ptr + slot)
    # An inactive slot is measured by its lowest residual again, and does not improve.
    _, deciding = freeze(active, narrow(residual), before)
    tolerance = tl.load(tolerance_ptr + slot)
    improved, lowest, above = decide(deciding, before, tolerance)
    iterations = tl.load(iterations_ptr + slot) + active.to(tl.int64)
    reached = active & (deciding <= tolerance)
    ended = active & ((above == 0) | (iterations >= tl.load(most_ptr + slot)))
    best = tl.load(best_ptr + slot * D + column, mask=real, other=0.0)
    best = tl.where(improved, fz, best)
    # as torch.lerp
    further = tl.where(damping < 0.5, z + damping * step, fz - step * (1.0 - damping))
    z = tl.where(active, tl.where(ended, best, further), z)
    converged = (tl.load(converged_ptr + slot) != 0) | reached
    done = (tl.load(done_ptr + slot) != 0) | ended
    tl.debug_barrier()  # all threads have loaded what the stores below replace
    tl.store(best_ptr + slot * D + column, best, mask=real)
    tl.store(z_ptr + slot * D + column, z, mask=real)
    tl.store(residual_ptr + slot, lowest)
    tl.store(iterations_ptr + slot, iterations)
    tl.store(converged_ptr + slot, converged.to(tl.int8))
    tl.store(done_ptr + slot, (done & (committing == 0)).to(tl.int8))
    if committing:
        sound = tl.abs(tl.sum(fz)) < float("inf")  # after an overflow the value stays what it was
        tl.store(hidden_ptr + slot * D + column, tl.where(sound, fz, z), mask=real)
        tl.store(lengths_ptr + slot, tl.load(lengths_ptr + slot) + 1)
        if HAS_ENTRIES:
            layer = tl.arange(0, BLOCK_Y)
            entry = entries_ptr + layer.to(tl.int64) * S + slot
            moved = (tl.load(entry, mask=layer < Y, other=0) + 1) % taps
            tl.store(entry, moved, mask=layer < Y)


@triton.jit
def _take_coarse(
    fz_ptr, rows_ptr, z_ptr, best_ptr, busy_ptr, done_ptr, coarse_ptr, scale_ptr, iterations_ptr, D,
    damping, begin_fine, tolerance_ptr, most_ptr, floor, RELATIVE: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    start_next(PDL)
    wait_for_previous(PDL)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(rows_ptr + row)
    column = tl.arange(0, BLOCK)
    real = column < D
    active = (tl.load(busy_ptr + slot) != 0) & (tl.load(done_ptr + slot) == 0)
    coarse = tl.load(coarse_ptr + slot) != 0
    iterations = tl.load(iterations_ptr + slot) + active.to(tl.int64)
    fz = tl.load(fz_ptr + row * D + column, mask=real, other=0.0)
    z = tl.load(z_ptr + slot * D + column, mask=real, other=0.0)
    step = fz - z
    squares = step.to(tl.float64) * step.to(tl.float64)  # float32 cannot hold squares of numbers above 2e19
    residual = tl.sqrt(tl.sum(squares))
    if RELATIVE:
        size = tl.sqrt(tl.sum(fz.to(tl.float64) * fz.to(tl.float64)))
        residual, _ = relative_residual(residual, size, tl.load(scale_ptr + slot), floor)
    residual = narrow(residual)
    # as torch.lerp
    further = tl.where(damping < 0.5, z + damping * step, fz - step * (1.0 - damping))
    finite = (tl.abs(tl.sum(further)) < float("inf")) & (residual < float("inf"))
    moves = active & finite
    far = finite & (residual > begin_fine) & (residual > tl.load(tolerance_ptr + slot))
    far = far & (2 * iterations < tl.load(most_ptr + slot))
    tl.debug_barrier()  # all threads have loaded what the stores below replace
    tl.store(z_ptr + slot * D + column, further, mask=real & moves)
    tl.store(best_ptr + slot * D + column, further, mask=real & moves)
    tl.store(iterations_ptr + slot, iterations)
    tl.store(coarse_ptr + slot, (coarse & (far | (active == 0))).to(tl.int8))

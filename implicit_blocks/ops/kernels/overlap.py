"""Launches that overlap: a decoding kernel starts while the one before it is still running.

A call of a decoder is a chain of more than a hundred kernels of a few microseconds, each of which reads its
weights and waits for the result of the one before it. In sequence, memory is idle between two of them: while
the last programs of one end, and the first programs of the next one are launched and wait for their first
loads. With programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization"; compute capability 9.0), the next kernel is launched once all programs of this one have
called ``start_next``, reads its weights, and waits in ``wait_for_previous`` until this one has ended. In a
captured graph the dependency becomes a programmatic edge.

Rules for a kernel that is launched with the options of ``overlapping``:

- All its programs call ``wait_for_previous``, before they read or write anything that a kernel of the chain
  writes. Since its predecessor has done the same, all kernels before it have ended then.
- Before that they read weights alone, which no kernel of a call writes, or prefetch into the L2 cache, which
  reads no value.
- ``start_next`` is best called first: several kernels may then wait at the same time, with their weights.
  Where the next kernel reads states before it waits, this one calls it after ``wait_for_previous`` (LATE):
  all kernels before this one have ended then, and the states are those of earlier calls.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

ENABLED = True
"""Whether launches overlap where that is supported."""


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which kernels launch on this device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def overlapping(device: torch.device) -> dict[str, Any]:
    """Return the options of a launch on this device, which overlaps where that is supported."""
    if ENABLED and device.type == "cuda" and _supported(device):
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


@cache
def _supported(device: torch.device) -> bool:
    """Whether GPU and Triton (3.4 and later) support programmatic dependent launch."""
    known = hasattr(getattr(tl.extra, "cuda", None), "gdc_wait")
    return known and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 9


@triton.jit
def start_next(PDL: tl.constexpr):
    """Let the next kernel start, once all programs have called this."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(PDL: tl.constexpr):
    """Wait until all kernels before this one have ended."""
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch(ptr, first, end, COUNT: tl.constexpr, THREADS: tl.constexpr, PDL: tl.constexpr):
    """Prefetch into the L2 cache COUNT elements from ``first`` on, of those before ``end``.

    Every eighth of the THREADS, a power of 2, prefetches a part, because a warp issues one at a time. A part
    is a multiple of 16 bytes, and its address is rounded down to one; one that passes ``end`` is left out.
    """
    if PDL:
        parts: tl.constexpr = THREADS // 8
        bits: tl.constexpr = ptr.dtype.element_ty.primitive_bitwidth
        each: tl.constexpr = (COUNT * bits // 8 + parts * 16 - 1) // (parts * 16) * 16
        size: tl.constexpr = each * 8 // bits
        thread = tl.arange(0, THREADS)
        start = first + (thread // 8).to(tl.int64) * size
        issues = ((thread % 8 == 0) & (start + size <= end)).to(tl.int32)
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $3;"
            " mov.u32 $0, 0; }",
            "=r,l,r,r",
            [(ptr + start).to(tl.int64) & -16, issues, tl.full((THREADS,), each, tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

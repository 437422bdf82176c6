"""Launches that overlap: a decoding kernel starts while the one before it is still running.

A call of a decoder is a chain of more than a hundred kernels of a few microseconds, each of which reads its
weights and waits for the result of the one before it. In sequence, memory is idle between two of them: while
the last programs of one end, and the first programs of the next one are launched and wait for their first
loads. With programmatic dependent launch (CUDA C++ Programming Guide, "Programmatic Dependent Launch and
Synchronization"; compute capability 9.0), the next kernel is launched once all programs of this one have
called ``start_next``, reads its weights, and waits in ``wait_for_previous`` until this one has ended. In a
captured graph the dependency becomes a programmatic edge.

Rules for a kernel that is launched with the options of ``overlapping``:

- All its programs call ``wait_for_previous``, before they read or write anything that a kernel of the same
  call writes. Since its predecessor has done the same, all kernels before it have ended then.
- Before that they may read weights, and states that earlier calls have written: the first kernel of a call
  calls ``start_next`` after ``wait_for_previous``, when the calls before have ended.
- Where the next kernel reads something from this call before it waits, as the number of a text's tokens, this
  one calls ``start_next`` after ``wait_for_previous`` (LATE): then all kernels before this one have ended.
- The next kernel takes room and bandwidth from this one as soon as it starts. Where all programs of this one
  run at the same time, ``start_next`` therefore comes after its last loads.
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

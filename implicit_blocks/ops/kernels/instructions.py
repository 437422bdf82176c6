"""Instructions of Nvidia's GPUs that Triton does not generate: short exponentials, and prefetches.

``tl.exp`` and divisions also handle denormal numbers. This takes six more instructions per value, which limit
the speed of kernels that do little else. ``exp`` and ``sigmoid`` treat denormal numbers as zero and otherwise
have relative errors of about 2⁻²² (PTX ISA, ``ex2.approx.ftz.f32`` and ``rcp.approx.ftz.f32``).
"""

from __future__ import annotations

import os

import torch
import triton
import triton.language as tl

NVIDIA = tl.constexpr(os.environ.get("TRITON_INTERPRET") != "1" and torch.version.hip is None)
"""Whether kernels may contain instructions of Nvidia's GPUs, which the interpreter does not know."""


@triton.jit
def exp(x):
    """Return ``exp(x)`` of a block of float32."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;",
            "=f,f",
            [x * 1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    return tl.exp(x)


@triton.jit
def sigmoid(x):
    """Return ``1 / (1 + exp(-x))`` of a block of float32."""
    if NVIDIA:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [1.0 + exp(-x)], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.sigmoid(x)


@triton.jit
def prefetch(pointers):
    """Prefetch the 128-byte lines of a block of pointers into the L2 cache."""
    if NVIDIA:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
            "=r,l",
            [pointers.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

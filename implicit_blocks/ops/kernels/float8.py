"""Quantization to 8-bit floats: of many weights in one launch, and of the product within a SwiGLU.

Shapes: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.kernels.instructions import sigmoid
from implicit_blocks.ops.kernels.weight_norm import Entry, matrix_of, table_line, tables


def quantize_all(
    sources_NK: Sequence[Tensor],
    codes_NK: Sequence[Tensor],
    scales_N: Sequence[Tensor],
    *,
    largest: float,
    smallest: float,
) -> None:
    """Write the codes of each source and the scales of its rows; contiguous tensors of one type on one GPU.

    The largest entry of a row, which is at least ``smallest``, has the code ``largest``. Codes may have more
    rows than the source, which stay as they are.
    """
    entries = []
    for source, codes, scales in zip(sources_NK, codes_NK, scales_N, strict=True):
        rows, columns = source.shape
        entries.append(Entry((source, scales, scales, codes), columns, columns, rows, rows))
    for table in tables(entries):
        table.launch(_quantize, LARGEST=largest, SMALLEST=smallest)


def swiglu(
    gate_NK: Tensor, up_NK: Tensor, codes_NK: Tensor, scales_N: Tensor, *, largest: float, smallest: float
) -> None:
    """Write the codes and scales of the rows of ``silu(gate) · up``; contiguous tensors (…, K) on one GPU."""
    columns = gate_NK.shape[-1]
    block = triton.next_power_of_2(columns)
    with torch.cuda.device(gate_NK.device):
        _swiglu[(gate_NK.numel() // columns,)](
            gate_NK,
            up_NK,
            codes_NK,
            scales_N,
            columns,
            LARGEST=largest,
            SMALLEST=smallest,
            BLOCK=block,
            num_warps=min(16, max(1, block // 512)),
        )


@triton.jit
def _swiglu(
    gate_ptr, up_ptr, codes_ptr, scales_ptr, K, LARGEST: tl.constexpr, SMALLEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0).to(tl.int64) * K
    column = tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + first + column, mask=column < K, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + first + column, mask=column < K, other=0.0).to(tl.float32)
    value = gate * sigmoid(gate) * up
    scale = tl.maximum(tl.max(tl.abs(value), 0), SMALLEST) / LARGEST
    tl.store(scales_ptr + tl.program_id(0), scale)
    tl.store(codes_ptr + first + column, (value / scale).to(codes_ptr.dtype.element_ty), mask=column < K)


@triton.jit
def _quantize(
    table_ptr, count, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, UNIT: tl.constexpr,
    SOURCE: tl.constexpr, DTYPE: tl.constexpr, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    line, row = table_line(table_ptr, count, 8, STEPS)
    K = tl.load(line + 2) * UNIT
    column = tl.arange(0, BLOCK)
    w = tl.load(matrix_of(line, 0, SOURCE, UNIT) + row * K + column, mask=column < K, other=0.0)
    w = w.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(w), 0), SMALLEST) / LARGEST
    tl.store(tl.load(line + 5).to(tl.pointer_type(tl.float32)) + row, scale)
    tl.store(matrix_of(line, 3, DTYPE, UNIT) + row * K + column, (w / scale).to(DTYPE), mask=column < K)

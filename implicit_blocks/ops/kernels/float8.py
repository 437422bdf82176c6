"""Quantization of many weights to 8-bit floats in one launch.

Shapes: N rows, K columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import triton
import triton.language as tl
from torch import Tensor

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


@triton.jit
def _quantize(
    table_ptr,
    count,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
    UNIT: tl.constexpr,
    SOURCE: tl.constexpr,
    DTYPE: tl.constexpr,
    STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    line, row = table_line(table_ptr, count, 8, STEPS)
    K = tl.load(line + 2) * UNIT
    column = tl.arange(0, BLOCK)
    w = tl.load(matrix_of(line, 0, SOURCE, UNIT) + row * K + column, mask=column < K, other=0.0)
    w = w.to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(w), 0), SMALLEST) / LARGEST
    tl.store(tl.load(line + 5).to(tl.pointer_type(tl.float32)) + row, scale)
    tl.store(matrix_of(line, 3, DTYPE, UNIT) + row * K + column, (w / scale).to(DTYPE), mask=column < K)

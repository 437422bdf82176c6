"""Weight norm of many matrices, cast and padded in one pass over the weights, and its gradients in another.

Plain operators read and write a weight about ten times per forward pass and again in backward: 8 ms per step
of the 130M Llama, here 0.5 ms (H100). Separate launches for its 84 matrices took the host 17 ms before the
first iteration could start; therefore all matrices with the same block size share one launch, which reads
their addresses from a table.

Shapes: R rows, C columns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from implicit_blocks.ops.backends import first_derivatives_only

LARGEST_ROW = 1 << 15  # largest row that a program processes at once
UNIT = 16  # if all widths are multiples of this, the compiler loads 16 bytes at a time
_TYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
    torch.float8_e4m3fn: tl.float8e4nv,
}


class Layout(NamedTuple):
    """The output layout of a weight: its type, and added rows and columns of zeros."""

    dtype: torch.dtype
    rows: int
    columns: int


def normed_weights(
    gains_R1: Sequence[Tensor],
    weights_RC: Sequence[Tensor],
    layouts: Sequence[Layout],
    groups: Sequence[int] | None = None,
) -> list[Tensor]:
    """Return each ``g · v / ‖v‖``, row by row, in its layout; float32 inputs on one GPU.

    A weight of more than two dimensions, such as a convolution's, is not padded; its first dimension is the
    rows.

    All are computed together before the first iteration; weights with equal numbers in ``groups`` share a
    backward pass, so that gradients become available layer by layer. None: one group.
    """
    whole = [v if v.is_contiguous() else v.detach().contiguous() for v in weights_RC]
    normed, inverses = _computed(gains_R1, whole, layouts)
    members: dict[int, list[int]] = {}
    for place in range(len(normed)):
        members.setdefault(0 if groups is None else groups[place], []).append(place)
    for places in members.values():
        given = [each for every in (gains_R1, weights_RC) for each in [every[place] for place in places]]
        made = _Normed.apply(
            [normed[place] for place in places], [inverses[place] for place in places], *given
        )
        for place, weight in zip(places, made, strict=True):
            normed[place] = weight
    return normed


@torch.no_grad()
def _computed(
    gains_R1: Sequence[Tensor], weights_RC: Sequence[Tensor], layouts: Sequence[Layout]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the normed weights and the inverse norms of the rows."""
    device = weights_RC[0].device
    rows = [v.shape[0] for v in weights_RC]
    inverses = list(torch.empty(sum(rows), dtype=torch.float32, device=device).split(rows))
    found = []
    entries = []
    for g, v, i, (dtype, more_rows, columns) in zip(gains_R1, weights_RC, inverses, layouts, strict=True):
        shape = v.shape if v.ndim > 2 else (v.shape[0] + more_rows, v.shape[1] + columns)
        w = torch.empty(shape, dtype=dtype, device=device)
        found.append(w)
        entries.append(Entry((v, g, i, w), _width(v), _width(w), v.shape[0], w.shape[0]))
    for table in tables(entries):
        table.launch(_forward)
    return found, inverses


class _Normed(torch.autograd.Function):
    """Precomputed normed weights with the gradients of their gains and weights."""

    @staticmethod
    def forward(ctx: Any, normed: list[Tensor], inverses: list[Tensor], *given: Tensor) -> tuple[Tensor, ...]:
        ctx.inverses = inverses
        ctx.save_for_backward(*given)
        ctx.set_materialize_grads(False)
        return tuple(normed)

    @staticmethod
    @first_derivatives_only(
        "the fused kernel of weight norm",
        "select the plain backend, or run on the CPU",
    )
    def backward(ctx: Any, *dw: Tensor | None) -> tuple[Tensor | None, ...]:
        inverses, given = ctx.inverses, ctx.saved_tensors
        gains, weights = given[: len(dw)], [v.contiguous() for v in given[len(dw) :]]
        dg: list[Tensor | None] = [
            None if d is None else torch.empty_like(g) for d, g in zip(dw, gains, strict=True)
        ]
        dv: list[Tensor | None] = [
            None if d is None else torch.empty_like(v) for d, v in zip(dw, weights, strict=True)
        ]
        entries = []
        for number, d in enumerate(dw):
            if d is not None:
                d, v = d.contiguous(), weights[number]
                tensors = (v, gains[number], inverses[number], d, dg[number], dv[number])
                entries.append(Entry(tensors, _width(v), _width(d), v.shape[0], v.shape[0]))
        for table in tables(entries):
            table.launch(_backward)
        return (None, None, *dg, *dv)


def _width(weight: Tensor) -> int:
    """Return the number of entries per row."""
    return weight.numel() // weight.shape[0]


class Entry(NamedTuple):
    """Tensors of a weight (matrices at places 0, 3, …), columns, padded columns, rows, programs."""

    tensors: tuple[Any, ...]
    columns: int
    width: int
    rows: int
    programs: int


class Table(NamedTuple):
    """Weights with equal block sizes and types."""

    entries: list[Entry]
    block: int
    unit: int

    def launch(self, kernel: Any, **constants: Any) -> None:
        """Run a kernel that reads the table, with one program per row; further constants are passed on."""
        device = self.entries[0].tensors[0].device
        lines, first = [], 0
        for entry in self.entries:
            places = [tensor.data_ptr() for tensor in entry.tensors]
            lines.append([first, entry.rows, entry.columns // self.unit, entry.width // self.unit, *places])
            first += entry.programs
        table = torch.tensor(lines, dtype=torch.int64, pin_memory=device.type == "cuda")
        with torch.cuda.device(device):
            kernel[(first,)](
                table.to(device, non_blocking=True),
                len(lines),
                UNIT=self.unit,
                SOURCE=_TYPES[self.entries[0].tensors[0].dtype],
                DTYPE=_TYPES[self.entries[0].tensors[3].dtype],
                STEPS=(len(lines) - 1).bit_length(),
                BLOCK=self.block,
                num_warps=min(16, max(1, self.block // 512)),
                **constants,
            )


def tables(entries: Sequence[Entry]) -> Iterator[Table]:
    """Yield the tables of weights that one launch can process."""
    # The device waits for this function. Triton's next_power_of_2 takes 4 µs.
    kinds: dict[Any, list[Entry]] = {}
    for entry in entries:
        numbers = entry.columns | entry.width
        for tensor in entry.tensors[::3]:
            numbers |= tensor.data_ptr()
        unit = 1 if numbers % UNIT else UNIT
        kind = (entry.width - 1).bit_length(), unit, entry.tensors[0].dtype, entry.tensors[3].dtype
        kinds.setdefault(kind, []).append(entry)
    for (bits, unit, *_), alike in kinds.items():
        yield Table(alike, 1 << bits, unit)


@triton.jit
def table_line(table_ptr, count, WIDTH: tl.constexpr, STEPS: tl.constexpr):
    """Return the table's line of this program, and the program's row: a binary search."""
    program = tl.program_id(0).to(tl.int64)
    low = tl.full((), 0, tl.int32)
    high = count - 1
    for _ in tl.static_range(STEPS):
        middle = (low + high + 1) // 2
        here = tl.load(table_ptr + middle * WIDTH) <= program
        low = tl.where(here, middle, low)
        high = tl.where(here, high, middle - 1)
    line = table_ptr + low * WIDTH
    return line, program - tl.load(line)


@triton.jit
def matrix_of(line, number: tl.constexpr, DTYPE: tl.constexpr, UNIT: tl.constexpr):
    """Return the address of a tensor of a line."""
    return tl.multiple_of(tl.load(line + 4 + number).to(tl.pointer_type(DTYPE)), UNIT)


@triton.jit
def _forward(
    table_ptr, count, UNIT: tl.constexpr, SOURCE: tl.constexpr, DTYPE: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    line, row = table_line(table_ptr, count, 8, STEPS)
    R = tl.load(line + 1)
    C = tl.load(line + 2) * UNIT
    width = tl.load(line + 3) * UNIT
    column = tl.arange(0, BLOCK)
    real = (column < C) & (row < R)
    v = tl.load(matrix_of(line, 0, SOURCE, UNIT) + row * C + column, mask=real, other=0.0)
    norm = tl.sqrt(tl.sum(v * v))
    g = tl.load(tl.load(line + 5).to(tl.pointer_type(tl.float32)) + row, mask=row < R, other=0.0)
    inverse = tl.where(row < R, 1.0 / tl.where(norm == 0.0, 1.0, norm), 0.0)  # a row of zeros stays zero
    tl.store(tl.load(line + 6).to(tl.pointer_type(tl.float32)) + row, inverse, mask=row < R)
    w = tl.where(real, g * (v * inverse), 0.0)
    tl.store(matrix_of(line, 3, DTYPE, UNIT) + row * width + column, w.to(DTYPE), mask=column < width)


@triton.jit
def _backward(
    table_ptr, count, UNIT: tl.constexpr, SOURCE: tl.constexpr, DTYPE: tl.constexpr, STEPS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    line, row = table_line(table_ptr, count, 10, STEPS)
    C = tl.load(line + 2) * UNIT
    width = tl.load(line + 3) * UNIT
    column = tl.arange(0, BLOCK)
    real = column < C
    inverse = tl.load(tl.load(line + 6).to(tl.pointer_type(tl.float32)) + row)
    unit = tl.load(matrix_of(line, 0, SOURCE, UNIT) + row * C + column, mask=real, other=0.0) * inverse
    dw = tl.load(matrix_of(line, 3, DTYPE, UNIT) + row * width + column, mask=real, other=0.0).to(tl.float32)
    g = tl.load(tl.load(line + 5).to(tl.pointer_type(tl.float32)) + row)
    dg = tl.sum(dw * unit)
    tl.store(tl.load(line + 8).to(tl.pointer_type(tl.float32)) + row, dg)
    dv = g * inverse * (dw - unit * dg)
    tl.store(matrix_of(line, 5, tl.float32, UNIT) + row * C + column, dv, mask=real)

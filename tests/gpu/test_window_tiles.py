"""Products of windows whose operands stay in the registers into which they were loaded.

With ``TRITON_INTERPRET=1`` they run in Triton's interpreter, without a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.interpreter import HALF, MARKS, random

pytestmark = MARKS

DIRECT = {
    "M8-W4": {"outputs": 8, "parts": 4, "warps": 4, "ahead": 99, "direct": 16},
    "M16-W8": {"outputs": 16, "parts": 8, "warps": 8, "ahead": 99, "direct": 8},
    "M8-W8-some-ahead": {"outputs": 8, "parts": 8, "warps": 8, "ahead": 1, "direct": 2, "trigger": 2},
    "M8-W2-groups": {"outputs": 8, "parts": 2, "warps": 2, "ahead": 3, "direct": 1, "trigger": 1},
}


def direct(case):
    from implicit_blocks.ops.kernels.decoding_window import Tiles

    return Tiles(**({"inputs": 32, "stages": 0, "trigger": 0} | DIRECT[case]))


def error(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm().clamp(min=1e-30))


@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize(
    ("rows", "length", "width", "outputs"),
    [(1, 1, 64, 48), (1, 2, 70, 37), (1, 4, 520, 20), (1, 8, 256, 24), (3, 8, 96, 40)],
    ids=["R1-L1-K64-M48", "R1-L2-K70-M37", "R1-L4-K520-M20", "R1-L8-K256-M24", "R3-L8-K96-M40"],
)
@pytest.mark.parametrize("case", DIRECT)
def test_products_from_registers_are_those_through_shared_memory(
    case, rows, length, width, outputs, gated, dtype
):
    """Both of a gate, and of a product that adds to the residual stream before a norm."""
    from implicit_blocks.ops.kernels.decoding_window import Operand, linear_window

    tokens = rows * length
    x, squares = random(tokens, width).to(dtype), random(tokens, 300).square()
    up, gate = (random(outputs, width).to(dtype) for _ in range(2))
    operand = Operand(x, squares, width, 1e-5)
    ends = {"gate_MK": gate, "gate_bias_M": random(outputs)} if gated else {}
    if not gated:
        ends |= {"z_TM": random(tokens, outputs), "next_norm_M": random(outputs), "next_eps": 1e-6}
    bias = random(outputs)
    found, after = linear_window(operand, up, bias, length=length, tiles=direct(case), **ends)
    expected, wanted = linear_window(operand, up, bias, length=length, **ends)
    assert error(found, expected) < 1e-5
    assert (after is None) == gated
    if after is not None:
        assert error(after.value_TK, wanted.value_TK) < (1e-5 if dtype == torch.float32 else 5e-3)
        assert error(after.squares_TX.sum(1), wanted.squares_TX.sum(1)) < 1e-5

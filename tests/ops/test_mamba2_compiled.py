"""Mamba2's kernels as compiled for Hopper read no uniform register that no instruction has written.

The assembler of Triton 3.6 does compile such kernels, which read outside of their memory. No GPU is needed.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from implicit_blocks.ops.mamba2_mix import Mamba2Sizes

TOOLS = Path(__file__).resolve().parents[2] / "tools"
UNSET = """
        .section        .text._inputs_backward,"ax",@progbits
        /*0620*/                   USHF.R.U32.HI UR14, URZ, 0x4, UR13 ;
        /*0700*/                   UMOV UR5, URZ ;
        /*0930*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT ;
        /*2c10*/                   UMOV UR11, 0x80000020 ;
        /*2c20*/                   HGMMA.64x32x16.F32.BF16 R24, R52, gdesc[UR8].tnspB, R24 ;
        /*2cb0*/              @!P1 UIADD3 UR4, UP0, UR6, 0x40, URZ ;
        /*2d30*/                   UIADD3.X UR5, UR6, -0x7fffffe0, URZ, UP0, !UPT ;
        .section        .text._other,"ax",@progbits
        /*0010*/                   ULDC.64 UR4, c[0x0][0x210] ;
        /*0020*/                   S2UR UR6, SR_CTAID.X ;
        /*0030*/                   UISETP.GE.AND UP0, UPT, UR6, UR7, UPT ;
        /*0040*/                   LDG.E R2, desc[UR4][R2.64] ;
        /*0050*/                   STS [R3+UR5], R2 ;
"""


@pytest.fixture
def tool(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("unset_registers")


def test_reads_of_unset_registers_are_found_in_each_kernel(tool):
    found = [line.split()[0] for line in tool.unset_registers(UNSET)]
    assert found == ["0620", "0930", "2cb0", "0030"]


def compiled(kernel, constants, *, one_block, **options):
    """Return the kernel as compiled for an H100: pointers and numbers are multiples of 16."""
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    narrow = ("dy_ptr", "conv_ptr", "dconv_ptr", "tiles_ptr", "y_ptr")
    constants = {**constants, **({"blocks": 1} if one_block and "blocks" in kernel.arg_names else {})}
    kinds = {
        name: "constexpr" if name in constants
        else ("*bf16" if name in narrow else "*fp32") if name.endswith("_ptr")
        else "i32"
        for name in kernel.arg_names
    }  # fmt: skip
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    whole = {
        places[name]: [["tt.divisibility", 16]]
        for name, kind in kinds.items()
        if kind != "constexpr" and name != "blocks"
    }
    source = ASTSource(kernel, kinds, {places[name]: value for name, value in constants.items()}, whole)
    return compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm["cubin"]


@pytest.mark.parametrize("length", [64, 256])
@pytest.mark.parametrize(("width", "states"), [(32, 64), (16, 32), (64, 128), (128, 64)])
def test_no_kernel_for_short_sequences_reads_an_unset_register(width, states, length, tool, tmp_path):
    pytest.importorskip("triton")
    from implicit_blocks.ops.kernels import mamba2_one_chunk, mamba2_walk

    sizes = Mamba2Sizes(8, width, 1, states, 1, 1e-5)
    block = mamba2_walk.block_of(length, sizes)
    given = mamba2_walk.constants(sizes, block)
    for kernel, constants, options in (
        (mamba2_walk._forward, {"STATE": False, "BY_BLOCK": False}, mamba2_walk.LAUNCH),
        (mamba2_walk._forward, {"STATE": True, "BY_BLOCK": True}, mamba2_walk.LAUNCH),
        (mamba2_one_chunk._products_backward, {}, mamba2_walk.LAUNCH),
        (mamba2_one_chunk._maps_backward, {}, {"num_warps": 4}),
        (mamba2_one_chunk._inputs_backward, {}, mamba2_walk.LAUNCH),
    ):
        file = tmp_path / "kernel.cubin"
        file.write_bytes(compiled(kernel, {**given, **constants}, one_block=length == block, **options))
        assert tool.unset_registers(tool.disassembled(file)) == [], kernel.__name__

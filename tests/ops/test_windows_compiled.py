"""Products of windows as compiled for Hopper, without a GPU: where weights wait for their input."""

from __future__ import annotations

import re

import pytest

SHAPES = {
    "out-K2048": {"K": 2048, "SPLIT": 8, "DIRECT": 8, "HAS_Z": True, "NEXT": True},
    "gate-K2048": {"K": 2048, "SPLIT": 8, "DIRECT": 8, "GATE": True},
    "down-K5504-M16": {"K": 5504, "SPLIT": 8, "DIRECT": 8, "BLOCK_M": 16, "HAS_Z": True, "NEXT": True},
}
OFF = ("HAS_BIAS", "GATE", "HAS_GATE_BIAS", "HAS_U", "HAS_Z", "CONV", "HAS_CONV_BIAS", "NEXT", "ROUNDED")
SIZES = {
    "L": 1, "PARTS": 0, "BLOCK_X": 1, "W": 1, "PRECISION": "tf32", "BLOCK_M": 8, "BLOCK_T": 8, "BLOCK_K": 32,
    "STAGES": 0, "TRIGGER": 0, "PDL": True,
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_weights_go_from_memory_to_matrix_units_without_shared_memory(shape, monkeypatch):
    """All are loaded, 16 bytes at a time, before the wait for the input, which is loaded likewise."""
    pytest.importorskip("triton")
    from triton import compile as compile_kernel
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from implicit_blocks.ops.kernels.decoding_window import _linear_window as kernel

    if not hasattr(kernel, "arg_names") or type(kernel).__name__ != "JITFunction":
        pytest.skip("the interpreter compiles nothing")
    tiles = -(-shape["K"] // (32 * shape["SPLIT"]))
    constants = dict.fromkeys(OFF, False) | SIZES | {"AHEAD": tiles} | shape
    numbers = {"eps": "fp32", "rows_ptr": "*i64", "entries_ptr": "*i64"} | dict.fromkeys(
        ("T", "M", "together", "norm_width", "inner", "C"), "i32"
    )
    narrow = ("x_ptr", "w_ptr", "gate_ptr", "next_ptr")
    kinds = {
        name: "constexpr" if name in constants else numbers.get(name, "*bf16" if name in narrow else "*fp32")
        for name in kernel.arg_names
    }
    places = {name: (place,) for place, name in enumerate(kernel.arg_names)}
    whole = {places[name]: [["tt.divisibility", 16]] for name, kind in kinds.items() if kind.startswith("*")}
    source = ASTSource(kernel, kinds, {places[name]: value for name, value in constants.items()}, whole)
    options = {"num_warps": shape["SPLIT"], "launch_pdl": True}
    code = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    before, after = code.split("griddepcontrol.wait", 1)
    lines = constants["BLOCK_M"] // 8 * (1 + constants["GATE"])
    assert len(re.findall(r"ld\.global\.v4\.b32", before)) == tiles * lines
    until_last = after[: after.rindex("mma.sync")]
    assert len(re.findall(r"ld\.global\.v4\.b32", until_last)) == tiles
    assert until_last.count("mma.sync") == 2 * tiles * (1 + constants["GATE"]) - 1
    assert re.findall(r"(?:ld|st)\.shared|matrix|shfl|bar\.", before + until_last) == []

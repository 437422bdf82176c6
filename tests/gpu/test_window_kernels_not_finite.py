"""In the decoding kernels of windows, a token that is not finite changes no token before it.

With ``TRITON_INTERPRET=1`` they run in Triton's interpreter, without a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.gpu.interpreter import DEVICE, MARKS, random

pytestmark = MARKS


@pytest.fixture(autouse=True)
def _seeded():
    pytest.importorskip("triton", reason="Triton is not installed")
    torch.manual_seed(0)


@pytest.mark.parametrize("normed", [False, True], ids=["plain", "qk-norm"])
@pytest.mark.parametrize("part", [slice(None), slice(64, 96), slice(100, 101)], ids=["all", "keys", "value"])
def test_attention(part, normed):
    from implicit_blocks.ops.kernels.decoding_attention import HeadNorms
    from implicit_blocks.ops.kernels.decoding_window_attention import attention_window

    rows, lengths = torch.zeros(1, dtype=torch.int64, device=DEVICE), torch.tensor([3], device=DEVICE)
    keys, values = random(2, 1, 2, 9, 16).unbind()
    tables = random(2, 9, 8).unbind()
    projected, found = random(3, 8 * 16), []
    norms = HeadNorms(random(16), random(16), 1e-6) if normed else None
    for bad in (1.0, torch.nan, torch.inf):
        projected[2, part] = bad
        options = {"length": 3, "n_heads": 4, "dtype": torch.float32, "norms": norms}
        found.append(
            attention_window(projected, rows, lengths, keys.clone(), values.clone(), *tables, **options)
        )
    assert torch.equal(found[0][:2], found[1][:2])
    assert torch.equal(found[0][:2], found[2][:2])
    features = slice(4, 5) if part.start == 100 else slice(None)
    assert not found[1][2, features].isfinite().any()


@pytest.mark.parametrize("part", ["x", "B", "C", "dt"])
def test_mamba2(part):
    """Neither its result nor the state that is committed; its own result is not finite."""
    from implicit_blocks.ops.kernels.decoding import Mamba2Inputs
    from implicit_blocks.ops.kernels.decoding_window import WindowConv
    from implicit_blocks.ops.kernels.decoding_window_scan import scan_window

    own, rows, commits = random(4, 64), *(torch.tensor([n], device=DEVICE) for n in (0, 2))
    inputs = Mamba2Inputs(rows.clone(), random(1, 4, 64), random(4, 64), None, random(2), 32)
    state, a, d = random(1, 2, 16, 16), random(2), random(2)
    prepared, found = torch.cat((random(4, 96), random(4, 2).abs()), 1), []
    place = {"x": 35, "B": 70, "C": 90, "dt": 96}[part]
    for bad in (1.0, torch.nan, torch.inf):
        prepared[2, place], h = bad, state.clone()
        options = {"A_log_H": a, "D_H": d, "groups": 1, "norm_I": None, "norm_eps": 0.0}
        conv = WindowConv(inputs, rows, own)
        y = scan_window(prepared, rows, commits, h, conv, length=4, dtype=torch.float32, **options)
        found.append((y.value_TK, h))
    for y, h in found[1:]:
        assert torch.equal(y[:2], found[0][0][:2])
        assert torch.equal(h, found[0][1])
        features = slice(place - 32, place - 31) if part == "x" else slice(16)
        assert not y[2, features].isfinite().any()

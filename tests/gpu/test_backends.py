"""Accelerated backends against the plain ones, in output, final state and every gradient."""

from __future__ import annotations

import pytest
import torch

from implicit_blocks.ops.accelerated import load
from implicit_blocks.ops.causal_conv import causal_conv, cuda
from implicit_blocks.ops.ssd import mamba_ssm, ssd

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SHAPES = {"B2-L256-H4-P64-G1-N128": (2, 256, 4, 64, 1, 128), "B3-L300-H8-P64-G2-N64": (3, 300, 8, 64, 2, 64)}


def error(found, expected):
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("with_state", [False, True], ids=["start", "state"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_mamba_ssm_scan(shape, with_state):
    if isinstance(reason := load(mamba_ssm.MODULE), str):
        pytest.skip(reason)
    batch, length, heads, width, groups, states = shape
    torch.manual_seed(0)
    tensors = {
        "x": torch.randn(batch, length, heads, width, device="cuda"),
        "dt": torch.rand(batch, length, heads, device="cuda") * 0.1,
        "A": -1 - 15 * torch.rand(heads, device="cuda"),
        "B": torch.randn(batch, length, groups, states, device="cuda"),
        "C": torch.randn(batch, length, groups, states, device="cuda"),
        "h": torch.randn(batch, heads, width, states, device="cuda"),
    }
    low = {"x", "B", "C"}

    def run(backend, dtype):
        leaves = {}
        for name, t in tensors.items():
            t = t.bfloat16() if name in low else t  # the same rounded inputs for both
            leaves[name] = (t if dtype is None else t.to(dtype)).detach().requires_grad_()
        y, h = ssd(
            *(leaves[name] for name in ("x", "dt", "A", "B", "C")),
            initial_state_BHPN=leaves["h"] if with_state else None,
            return_final_state=True,
            backend=backend,
        )
        generator = torch.Generator("cuda").manual_seed(1)
        loss = (y.double() * torch.randn(y.shape, device="cuda", generator=generator)).sum()
        loss = loss + (h.double() * torch.randn(h.shape, device="cuda", generator=generator)).sum()
        wanted = [t for name, t in leaves.items() if with_state or name != "h"]
        return [y, h, *torch.autograd.grad(loss, wanted)]

    for found, expected in zip(run("mamba_ssm", None), run("chunked", torch.float64), strict=True):
        assert error(found, expected) < 1.5e-2


@pytest.mark.parametrize("with_tail", [False, True], ids=["start", "tail"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_causal_conv1d(dtype, with_tail):
    if isinstance(reason := load(cuda.MODULE), str):
        pytest.skip(reason)
    torch.manual_seed(0)
    x = torch.randn(3, 70, 80, device="cuda")[:, :, 8:72]
    weight, bias = torch.randn(64, 4, device="cuda"), torch.randn(64, device="cuda")
    tail = torch.randn(3, 3, 64, device="cuda") if with_tail else None

    def run(dtype):
        leaves = [None if t is None else t.to(dtype).detach() for t in (x, weight, bias, tail)]
        wanted = [t.requires_grad_() for t in leaves if t is not None]
        y = causal_conv(*leaves[:3], tail_BWC=leaves[3], activation="silu")
        return [y, *torch.autograd.grad((y.double() * torch.arange(64, device="cuda")).sum(), wanted)]

    assert cuda.suits(x.to(dtype), None)
    for found, expected in zip(run(dtype), run(torch.float64), strict=True):
        assert error(found, expected) < (1e-5 if dtype == torch.float32 else 1e-2)

"""Rotary position embedding."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from implicit_blocks.ops.rotary import rotate, rotation_tables


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("tables", [torch.float32, torch.float64], ids=str)
def test_features_are_rotated_in_the_wider_type_and_keep_their_type(dtype, tables):
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 8, dtype=dtype)
    cos, sin = rotation_tables(torch.arange(5)[None], head_dim=8, theta=100.0, dtype=tables)
    found = rotate(x, cos, sin)
    turned = torch.complex(*x.double().chunk(2, -1)) * torch.complex(cos.double(), sin.double())
    expected = torch.cat((turned.real, turned.imag), -1).to(dtype)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected)


def test_concatenated_tensors_have_the_type_of_the_heads():
    """A compiler writes a concatenation to memory and casts it in a separate kernel."""
    kept = []

    class Kept(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
            if function is torch.ops.aten.cat.default:
                kept.extend(part.dtype for part in arguments[0])
            return function(*arguments, **(keywords or {}))

    x = torch.randn(2, 3, 16, 8, dtype=torch.bfloat16)
    cos, sin = rotation_tables(torch.arange(16)[None], head_dim=8, theta=100.0, dtype=torch.float32)
    with Kept():
        rotate(x, cos, sin)
    assert kept == [torch.bfloat16] * 2

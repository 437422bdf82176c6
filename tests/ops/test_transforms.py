"""What operators ask about where they run."""

from __future__ import annotations

import torch

from implicit_blocks.ops.backends import without_autocast


def product(x: torch.Tensor) -> torch.Tensor:
    with without_autocast(x.device.type):
        return x @ x


def test_autocast_is_left_out_where_there_is_some():
    x = torch.randn(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        assert product(x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16
    assert product(torch.empty(4, 4, device="meta")).shape == (4, 4)


def test_a_compiler_traces_it_whole():
    """Warnings are errors, such as torch's warning of a function that cannot be traced."""
    x = torch.randn(4, 4)
    compiled = torch.compile(product, backend="eager", fullgraph=True)
    assert torch.equal(compiled(x), product(x))
    with torch.autocast("cpu", torch.bfloat16):
        assert compiled(x).dtype == torch.float32

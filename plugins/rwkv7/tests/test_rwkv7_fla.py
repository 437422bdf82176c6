"""The mixer with flash-linear-attention's kernels against the plain operators, on a GPU."""

from __future__ import annotations

import pytest
import torch
from implicit_blocks_rwkv7 import RWKV7Spec
from implicit_blocks_rwkv7.fla_scan import MODULE
from implicit_blocks_rwkv7.scan import DELTA_RULE

from implicit_blocks.ops.accelerated import MissingPackageError
from implicit_blocks.ops.backends import Backend
from implicit_blocks.testing import check_backend

SHAPES = {
    "H4-K32": {"n_heads": 4, "head_dim": 32},
    "H2-K64": {"n_heads": 2, "head_dim": 64},
}


@pytest.mark.gpu
@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative-eigenvalues"])
@pytest.mark.parametrize("length", [70, 200])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_equal_the_plain_operators(require_kernels, shape, length, negative):
    require_kernels(MODULE)
    spec = RWKV7Spec(**shape, decay_rank=16, rate_rank=16, gate_rank=32, negative_eigenvalues=negative)
    check_backend(spec.model_copy(update={"backend": "fla"}), spec, length=length)


def test_requesting_missing_kernels_is_an_error(monkeypatch):
    monkeypatch.setattr(Backend, "installed", False)
    x = torch.zeros(1, 1, 1, 4)
    with pytest.raises(MissingPackageError, match=r"backend 'fla'.*pip install fla-core"):
        DELTA_RULE.choose("fla", x, x, x, x, x, x, None, None)


def test_more_heads_than_a_grid_counts_are_refused(monkeypatch):
    """Runs on a CPU, as if kernels were installed and the tensors on a GPU."""
    monkeypatch.setattr(Backend, "installed", True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def choose(rows):
        x = torch.zeros(rows, 1, 257, 1).bfloat16()
        return DELTA_RULE.choose("fla", x, x, x, x, x, x, None, None).name

    assert choose(255) == "fla"  # 65,535 heads of all rows
    with pytest.raises(ValueError, match=r"at most 65535 heads.*256 rows of 257 heads"):
        choose(256)

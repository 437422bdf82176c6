"""The mixer with flash-linear-attention's kernels against the plain operators, on a GPU."""

from __future__ import annotations

import types

import pytest
import torch
from implicit_blocks_rwkv7 import RWKV7Spec
from implicit_blocks_rwkv7 import kernels as module
from implicit_blocks_rwkv7.kernels import MODULE, generalized_delta_rule_fla

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


def test_requesting_missing_kernels_is_an_error(check_missing_kernels):
    check_missing_kernels(RWKV7Spec(n_heads=2, head_dim=4, backend="fla"))


def test_more_heads_than_a_grid_counts_are_refused(monkeypatch):
    """Runs on a CPU: a function stands for the kernels."""
    kernels = types.SimpleNamespace(chunk_dplr_delta_rule=lambda *, v, initial_state, **_: (v, initial_state))
    monkeypatch.setattr(module, "load", lambda name: kernels)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def scan(rows):
        x = torch.zeros(rows, 1, 257, 1).bfloat16()
        options = {"initial_state_BHKV": None, "documents_BL": None, "least_log_w": -1.0}
        return generalized_delta_rule_fla(x, x, x, x, x, x, **options)[0]

    assert len(scan(255)) == 255  # 65 535 heads of all rows
    with pytest.raises(ValueError, match=r"at most 65535 heads.*256 rows of 257 heads.*'plain'"):
        scan(256)

"""The mixer with flash-linear-attention's kernels against the plain one; on a GPU."""

from __future__ import annotations

import pytest
import torch
from implicit_blocks_rwkv7 import RWKV7Spec
from implicit_blocks_rwkv7.kernels import MODULE

import implicit_blocks as ib
from implicit_blocks.ops.accelerated import load
from implicit_blocks.testing import check_backend
from implicit_blocks.testing.mixer_runs import begin, run

SHAPES = {
    "H4-K32": {"n_heads": 4, "head_dim": 32},
    "H2-K64": {"n_heads": 2, "head_dim": 64},
}


@pytest.fixture
def _kernels():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    if isinstance(reason := load(MODULE), str):
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative-eigenvalues"])
@pytest.mark.parametrize("length", [70, 200])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_mixer_with_the_kernels_is_the_one_without(shape, length, negative):
    spec = RWKV7Spec(**shape, decay_rank=16, rate_rank=16, gate_rank=32, negative_eigenvalues=negative)
    check_backend(spec.model_copy(update={"backend": "fla"}), spec, length=length)


def test_kernels_that_are_asked_for_and_not_there_are_an_error():
    mixer = ib.build(RWKV7Spec(n_heads=2, head_dim=4, backend="fla"), d_model=12)
    z, u = torch.randn(1, 3, 12), torch.randn(1, 3, mixer.injection_width)
    with pytest.raises((ImportError, ValueError), match="backend 'plain'"):
        run(mixer, z, u, [3], start=begin(mixer, 1, dtype=torch.float32))

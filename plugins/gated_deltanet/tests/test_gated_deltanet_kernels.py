"""The mixer with flash-linear-attention's kernels against the plain operators, on a GPU."""

from __future__ import annotations

import types

import pytest
import torch
from implicit_blocks_gated_deltanet import GatedDeltaNetSpec
from implicit_blocks_gated_deltanet import kernels as module
from implicit_blocks_gated_deltanet.delta_rule import gated_delta_rule
from implicit_blocks_gated_deltanet.kernels import MODULE, gated_delta_rule_fla

import implicit_blocks as ib
from implicit_blocks.testing import check_backend
from implicit_blocks.testing.mixer_runs import begin, run

SHAPES = {
    "H4-K32-V32": {"n_heads": 4, "head_dim": 32, "expand_v": 1},
    "H2-K64-V128": {"n_heads": 2, "head_dim": 64, "expand_v": 2},
}


@pytest.mark.gpu
@pytest.mark.parametrize("negative", [False, True], ids=["positive", "negative-eigenvalues"])
@pytest.mark.parametrize("length", [70, 200])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_kernels_equal_the_plain_operators(require_kernels, shape, length, negative):
    require_kernels(MODULE)
    spec = GatedDeltaNetSpec(**shape, negative_eigenvalues=negative, chunk_size=32)
    check_backend(spec.model_copy(update={"backend": "fla"}), spec, length=length)


def test_requesting_missing_kernels_is_an_error():
    mixer = ib.build(GatedDeltaNetSpec(n_heads=2, head_dim=4, backend="fla"), d_model=12)
    z, u = torch.randn(1, 3, 12), torch.randn(1, 3, mixer.injection_width)
    with pytest.raises((ImportError, ValueError), match="backend 'plain'"):
        run(mixer, z, u, [3], start=begin(mixer, 1, dtype=torch.float32))


def test_a_wrong_backward_of_the_kernels_is_replaced_by_the_plain_scans(monkeypatch, caplog):
    """Runs on a CPU: the plain scan, called without gradients, replaces the kernels."""

    def kernels(q, k, v, g, beta, *, scale, initial_state, output_final_state):
        assert scale == 1.0
        assert output_final_state
        assert not torch.is_grad_enabled()
        return gated_delta_rule(q, k, v, g, beta, initial_state_BHKV=initial_state)

    monkeypatch.setattr(module, "load", lambda name: types.SimpleNamespace(chunk_gated_delta_rule=kernels))
    monkeypatch.setattr(module, "fla_backward_is_wrong", lambda: True)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    module._warn_once.cache_clear()
    for with_state in (True, False):
        given = [torch.randn(2, 9, 2, 4).bfloat16() for _ in range(3)]
        given += [-torch.rand(2, 9, 2), torch.rand(2, 9, 2)]
        given += [torch.randn(2, 2, 4, 4)] if with_state else []
        found, expected = ([t.detach().requires_grad_() for t in given] for _ in range(2))
        state = (found[5], expected[5]) if with_state else (None, None)
        values = (
            gated_delta_rule_fla(*found[:5], initial_state_BHKV=state[0], documents_BL=None),
            gated_delta_rule(*expected[:5], initial_state_BHKV=state[1]),
        )
        weights = [torch.randn_like(part) for part in values[1]]
        gradients = [
            torch.autograd.grad(parts, leaves, weights)
            for parts, leaves in zip(values, (found, expected), strict=True)
        ]
        for one, other in zip((*values[0], *gradients[0]), (*values[1], *gradients[1]), strict=True):
            assert torch.equal(one, other)
    assert caplog.text.count("gradients are computed by the plain scan") == 1


def test_more_heads_than_a_grid_counts_are_refused(monkeypatch):
    """Runs on a CPU: a function stands for the kernels."""
    kernels = types.SimpleNamespace(
        chunk_gated_delta_rule=lambda *, v, initial_state, **_: (v, initial_state)
    )
    monkeypatch.setattr(module, "load", lambda name: kernels)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)

    def scan(rows):
        x, numbers = torch.zeros(rows, 1, 257, 1).bfloat16(), torch.zeros(rows, 1, 257)
        given = (x, x, x, numbers, numbers)
        return gated_delta_rule_fla(*given, initial_state_BHKV=None, documents_BL=None)[0]

    assert len(scan(255)) == 255  # 65,535 heads of all rows
    with pytest.raises(ValueError, match=r"at most 65535 heads.*256 rows of 257 heads.*'plain'"):
        scan(256)

"""What Mamba2 asks of the GPU's operator; the operator's values are compared on a GPU (tests/gpu)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.held_weights import HeldWeights
from implicit_blocks.mixers import Mamba2
from implicit_blocks.ops import mamba2_mix


class Wrapped(nn.Module):
    """As adapters wrap a layer."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return 2 * self.layer(x)


@pytest.fixture
def asked(monkeypatch):
    """Stand in for the operator and note what it is given of the output projection."""
    given = []

    def mix(projected, u, *, sizes, return_state, out_weight_DI=None, out_bias_D=None, **others):
        given.append((out_weight_DI, out_bias_D))
        mixed = projected[..., : sizes.inner].tanh()
        state = projected.new_zeros(1) if return_state else None
        if out_weight_DI is not None:
            mixed = nn.functional.linear(mixed, out_weight_DI, out_bias_D)
        return mixed, state

    monkeypatch.setattr(mamba2_mix, "eligible", lambda *_: True)
    monkeypatch.setattr(mamba2_mix, "suits", lambda *_: True)
    monkeypatch.setattr(mamba2_mix, "mamba2_mix", mix)
    torch.manual_seed(0)
    mixer = Mamba2(ib.Mamba2Spec(d_state=16, head_dim=16, bias=True), d_model=32)
    z = torch.randn(2, 8, 32)
    context = SimpleNamespace(plain=True, u_rows_BL=None)
    return SimpleNamespace(given=given, mixer=mixer, run=lambda: mixer(z, None, None, context))


def test_with_gradients_the_operator_takes_the_output_projection_along(asked):
    mixer = asked.mixer
    with torch.no_grad():
        expected = asked.run()
    found = asked.run()
    torch.testing.assert_close(found, expected)
    assert [weight is mixer.out_proj.weight for weight, _ in asked.given] == [False, True]
    assert asked.given[1][1] is mixer.out_proj.bias
    found.sum().backward()
    assert mixer.out_proj.weight.grad is not None


def test_held_weights_are_those_of_the_operator(asked):
    held = HeldWeights(asked.mixer)
    with held.in_use():
        asked.run()
        assert asked.given[0] == asked.mixer.out_proj.held


def test_what_wraps_the_output_projection_is_called(asked):
    plain = asked.run().detach()
    asked.mixer.out_proj = Wrapped(asked.mixer.out_proj)
    torch.testing.assert_close(asked.run(), 2 * plain)
    assert asked.given[1] == (None, None)

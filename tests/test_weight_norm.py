"""Weight norm: what is computed, and what becomes of values that are written to a computed weight."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.utils import parametrize

from implicit_blocks.layers import Linear
from implicit_blocks.weight_norm import add_weight_norm, plain_weight


@pytest.fixture
def layer() -> Linear:
    made = Linear(4, 3)
    add_weight_norm(made)
    with torch.no_grad():  # gains of their own
        made.parametrizations.weight.original0.mul_(torch.tensor([[0.5], [1.0], [3.0]]))
    return made


def test_a_weight_is_g_times_v_over_its_norm(layer: Linear) -> None:
    g, v = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    torch.testing.assert_close(plain_weight(layer), g * v / v.norm(dim=1, keepdim=True))
    x = torch.randn(5, 4)
    out = layer(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, x @ plain_weight(layer).T + layer.bias)
    out.sum().backward()
    assert (g.grad is not None, v.grad is not None) == (True, True)


def test_what_is_added_to_its_data_stays(layer: Linear) -> None:
    before, delta = plain_weight(layer).detach().clone(), torch.randn(3, 4)
    layer.weight.data += delta
    torch.testing.assert_close(plain_weight(layer).detach(), before + delta)
    layer.weight.data -= delta
    torch.testing.assert_close(plain_weight(layer).detach(), before)
    values = torch.randn(3, 4, dtype=torch.float64)
    layer.weight.data = values
    torch.testing.assert_close(plain_weight(layer).detach(), values.float())
    with pytest.raises(ValueError, match=r"shape \(3, 4\), what is assigned to its data \(4, 3\)"):
        layer.weight.data = values.T


def test_a_copy_is_written_to_by_itself(layer: Linear) -> None:
    other, before = copy.deepcopy(layer), plain_weight(layer).detach().clone()
    other.weight.data *= 2
    torch.testing.assert_close(plain_weight(other).detach(), 2 * before)
    torch.testing.assert_close(plain_weight(layer).detach(), before)


def test_values_that_are_read_are_ordinary_tensors(layer: Linear) -> None:
    for value in (layer.weight.data, layer.weight * 1, layer.weight.detach(), plain_weight(layer)):
        assert type(value) is torch.Tensor
    assert not layer.weight.data.requires_grad


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_torchs_removal_from_one_layer_changes_no_layer(layer: Linear, trained: bool) -> None:
    other, x = Linear(4, 3), torch.randn(5, 4)
    add_weight_norm(other)
    before = layer(x), other(x)
    assert type(layer) is type(other)  # so compiled code serves both
    layer.requires_grad_(trained)
    with pytest.raises((RuntimeError, AttributeError)):
        parametrize.remove_parametrizations(layer, "weight")
    assert all(torch.equal(one(x), value) for one, value in zip((layer, other), before, strict=True))

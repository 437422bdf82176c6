"""What recordings of the map lean on: leaves of autograd of their own, on the parameters' memory."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from implicit_blocks.graphs import leaves_of_its_own


@pytest.fixture
def module():
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Tanh(), nn.Linear(3, 3))
    made[2].weight = made[0].weight  # one parameter in two places
    made[2].bias.requires_grad_(False)
    return made


def test_other_leaves_on_the_same_memory_while_it_lasts(module):
    before = list(module.parameters())
    x = torch.randn(4, 3)
    expected = torch.autograd.grad(module(x).square().sum(), before[0])
    with leaves_of_its_own(module):
        inside = list(module.parameters())
        assert [a.data_ptr() for a in inside] == [b.data_ptr() for b in before]
        assert [a.requires_grad for a in inside] == [b.requires_grad for b in before]
        assert all(a is not b and a.is_leaf for a, b in zip(inside, before, strict=True))
        assert module[0].weight is module[2].weight
        found = torch.autograd.grad(module(x).square().sum(), inside[0])
    torch.testing.assert_close(found, expected)
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))


def test_the_parameters_are_back_after_an_error(module):
    before = list(module.parameters())
    with pytest.raises(RuntimeError), leaves_of_its_own(module):
        raise RuntimeError
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))

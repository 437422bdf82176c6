"""Muon with its learning rate on the device: the steps of torch's Muon, whose rate is read on the host."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import Tensor, nn

import implicit_blocks as ib
from trainer.optim.capturable import (
    make_capturable,
    muon_step,
    newton_schulz_flops,
    orthogonalized,
    undo_capturable,
)
from trainer.specs.optimizers import AdamWSpec, MuonSpec

SHAPES = [(32, 16), (16, 32), (16, 16), (16, 32), (48, 16)]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def torchs_muon(found: list[nn.Parameter], **options) -> torch.optim.Muon:
    return torch.optim.Muon(found, lr=1.0, weight_decay=0.3, momentum=0.9, **options)


def gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step + 1)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


@pytest.mark.parametrize("scaling", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
def test_steps_with_changing_rates_equal_those_of_torch(scaling, nesterov):
    ours, theirs = parameters(), parameters()
    options = {"adjust_lr_fn": scaling, "nesterov": nesterov}
    muon, expected = torchs_muon(ours, **options), torchs_muon(theirs, **options)
    for step, rate in enumerate((0.02, 0.05, 0.01)):
        for p, q, gradient in zip(ours, theirs, gradients(step), strict=True):
            p.grad, q.grad = gradient.clone(), gradient.clone()
        muon_step(muon, torch.tensor(rate), torch.tensor(0.0))
        for group in expected.param_groups:
            group["lr"] = rate
        expected.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-5)
        state, known = muon.state[p]["momentum_buffer"], expected.state[q]["momentum_buffer"]
        torch.testing.assert_close(state, known)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_skipped_step_changes_no_parameter_and_no_momentum(value):
    found = parameters()
    muon = torchs_muon(found)
    rate = torch.tensor(0.02)
    for p, gradient in zip(found, gradients(0), strict=True):
        p.grad = gradient
    muon_step(muon, rate, torch.tensor(0.0))
    before = copy.deepcopy([(p.detach(), muon.state[p]["momentum_buffer"]) for p in found])
    for p in found:
        p.grad = torch.full_like(p, value)
    muon_step(muon, rate, torch.tensor(1.0))
    for p, (weight, momentum) in zip(found, before, strict=True):
        assert torch.equal(p, weight)
        assert torch.equal(muon.state[p]["momentum_buffer"], momentum)


def test_a_parameter_without_gradient_is_left_as_it_is():
    found = parameters()
    muon = torchs_muon(found)
    kept = found[1].detach().clone()
    found[0].grad = torch.ones_like(found[0])
    muon_step(muon, torch.tensor(0.1), torch.tensor(0.0))
    assert torch.equal(found[1], kept)
    assert found[1] not in muon.state


def test_matrices_of_one_shape_are_orthogonalized_as_if_alone():
    matrices_KRC = torch.randn(3, 8, 24)
    options = {"coefficients": (3.4445, -4.775, 2.0315), "steps": 5, "eps": 1e-7}
    together = orthogonalized(matrices_KRC, **options)
    alone = torch.cat([orthogonalized(one[None], **options) for one in matrices_KRC])
    torch.testing.assert_close(together, alone, rtol=2e-2, atol=2e-2)
    values = torch.linalg.svdvals(together.float())
    assert float(values.min()) > 0.5
    assert float(values.max()) < 1.5


def test_the_rate_of_both_parts_is_the_tensor_and_other_optimizers_are_left_as_they_are():
    spec = ib.ExplicitLMSpec(vocab_size=11, d_model=16, n_layers=1, mixer=ib.AttentionSpec(n_heads=2))
    model = ib.build(spec)
    rate, skip = torch.tensor(1e-3), torch.tensor(0.0)
    for optimizer_spec in (AdamWSpec(learning_rate=1e-3), MuonSpec(learning_rate=1e-3)):
        optimizer = ib.build(optimizer_spec, model=model)
        assert make_capturable(optimizer, rate, skip)
        adamw = getattr(optimizer, "adamw", optimizer)
        assert all(group["lr"] is rate and group["capturable"] for group in adamw.param_groups)
        assert adamw.found_inf is skip
        undo_capturable(optimizer)
        assert all(group["lr"] == pytest.approx(1e-3) for group in adamw.param_groups)
        assert not any(isinstance(group["lr"], Tensor) or group["capturable"] for group in adamw.param_groups)
        assert not hasattr(adamw, "found_inf")
    other = torch.optim.NAdam(model.parameters(), lr=1e-3)
    assert not make_capturable(other, rate, skip)


def test_flops_are_those_of_three_products_per_iteration():
    assert newton_schulz_flops([(2, 3), (3, 2)], steps=5) == 2 * 5 * (2 * 2 * 2 * 3 * 2 + 2 * 2**3)

"""Weight norm: the computed weight, and values written to it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune

import implicit_blocks as ib
from implicit_blocks.layers import Linear, add_weight_norm, plain_weight
from implicit_blocks.weights.cache import WeightCache


@pytest.fixture
def layer() -> Linear:
    made = Linear(4, 3)
    add_weight_norm(made)
    with torch.no_grad():  # a different gain per row
        made.parametrizations.weight.original0.mul_(torch.tensor([[0.5], [1.0], [3.0]]))
    return made


def test_a_normed_weight_is_g_times_v_over_its_norm(layer: Linear) -> None:
    g, v = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    torch.testing.assert_close(plain_weight(layer), g * v / v.norm(dim=1, keepdim=True))
    x = torch.randn(5, 4)
    out = layer(x)
    assert type(out) is torch.Tensor
    torch.testing.assert_close(out, x @ plain_weight(layer).T + layer.bias)
    out.sum().backward()
    assert (g.grad is not None, v.grad is not None) == (True, True)


def test_values_assigned_to_weight_data_are_kept(layer: Linear) -> None:
    before, delta = plain_weight(layer).detach().clone(), torch.randn(3, 4)
    layer.weight.data += delta
    torch.testing.assert_close(plain_weight(layer).detach(), before + delta)
    layer.weight.data -= delta
    torch.testing.assert_close(plain_weight(layer).detach(), before)
    values = torch.randn(3, 4, dtype=torch.float64)
    layer.weight.data = values
    torch.testing.assert_close(plain_weight(layer).detach(), values.float())
    with pytest.raises(ValueError, match=r"\(3, 4\).*\(4, 3\)"):
        layer.weight.data = values.T


def test_writing_to_a_copied_layer_does_not_change_the_original(layer: Linear) -> None:
    other, before = copy.deepcopy(layer), plain_weight(layer).detach().clone()
    other.weight.data *= 2
    torch.testing.assert_close(plain_weight(other).detach(), 2 * before)
    torch.testing.assert_close(plain_weight(layer).detach(), before)


def test_results_computed_from_a_normed_weight_are_plain_tensors(layer: Linear) -> None:
    for value in (layer.weight * 1, layer.weight.sum(), layer.weight.clone(), plain_weight(layer)):
        assert type(value) is torch.Tensor
    assert not layer.weight.data.requires_grad
    assert type(pickle.loads(pickle.dumps(layer.weight.data))) is torch.Tensor


def test_a_zero_row_stays_zero_and_is_trainable(layer: Linear) -> None:
    values = torch.randn(3, 4)
    values[1] = 0.0
    layer.weight = values
    torch.testing.assert_close(plain_weight(layer).detach(), values)
    layer.weight.data = torch.zeros(3, 4)
    assert not plain_weight(layer).any()
    layer(torch.ones(2, 4)).sum().backward()
    g, v = layer.parametrizations.weight.original0, layer.parametrizations.weight.original1
    assert g.grad is not None
    assert bool(g.grad.isfinite().all() and (g.grad != 0).all() and v.grad.isfinite().all())
    torch.testing.assert_close(v[0].detach(), values[0])  # the direction does not change


def test_a_zero_direction_gives_a_zero_row(layer: Linear) -> None:
    v = layer.parametrizations.weight.original1
    with torch.no_grad():
        v[0] = 0.0
    layer(torch.ones(2, 4)).sum().backward()
    assert not plain_weight(layer)[0].any()
    assert v.grad.isfinite().all()
    for weight in WeightCache(layer).tensors():
        assert weight.isfinite().all()


@pytest.mark.parametrize(
    "init",
    [nn.init.zeros_, nn.init.orthogonal_, nn.init.trunc_normal_, nn.init.xavier_normal_, nn.init.eye_],
)
def test_init_functions_write_to_a_normed_weight(layer: Linear, init: Callable[..., object]) -> None:
    plain = nn.Linear(4, 3)
    torch.manual_seed(1)
    init(plain.weight)
    torch.manual_seed(1)
    layer.apply(lambda part: init(part.weight) if isinstance(part, nn.Linear) else None)
    torch.testing.assert_close(plain_weight(layer).detach(), plain.weight.detach())


def test_a_normed_weight_and_its_views_are_writable(layer: Linear) -> None:
    expected = plain_weight(layer).detach().clone()
    with torch.no_grad():
        for weight in (expected, layer.weight):
            weight[0] = 2.0
        for weight in (expected, layer.weight):
            weight.mT[1].fill_(3.0)
        for weight in (expected, layer.weight.data):
            weight.mul_(0.5)
        for weight in (expected, layer.weight.detach()):
            weight.chunk(2, dim=1)[1].neg_()
        torch.testing.assert_close(plain_weight(layer), expected)
        layer.weight.data[1].zero_()
        assert not plain_weight(layer)[1].any()
    with torch.inference_mode():
        layer.weight.zero_()
    assert not plain_weight(layer).any()


def test_in_place_changes_under_autograd_are_refused(layer: Linear) -> None:
    before = plain_weight(layer).detach().clone()
    for change in (lambda: layer.weight.mul_(2), lambda: layer.weight[0].zero_()):
        with pytest.raises(RuntimeError, match=r"in place.*no_grad"):
            change()
    torch.testing.assert_close(plain_weight(layer).detach(), before)
    layer.requires_grad_(False)
    layer.weight.mul_(2)  # allowed for frozen parameters
    torch.testing.assert_close(plain_weight(layer), 2 * before)


def test_pruning_the_direction_prunes_the_computed_weight(layer: Linear) -> None:
    with pytest.raises(ValueError, match=r"pruned.*original1"):
        prune.l1_unstructured(layer, "weight", amount=2)
    assert not hasattr(layer, "weight_orig")
    convolution = nn.Conv1d(4, 3, 2)
    add_weight_norm(convolution)
    x = torch.randn(5, 4)
    for part, given in ((layer, x), (convolution, torch.randn(1, 4, 6))):
        chain = part.parametrizations.weight
        prune.l1_unstructured(chain, "original1", amount=0.5)
        for _ in range(2):
            part(given).square().sum().backward()
            with torch.no_grad():
                chain.original1_orig -= 0.1 * chain.original1_orig.grad  # the cached value is stale now
            expected = part(given)
            assert (plain_weight(part) == 0).sum() >= chain.original1_mask.numel() // 2
            with WeightCache(part).activate():
                torch.testing.assert_close(part(given), expected)


def forward_in_another_process(received: Any, results: Any) -> None:
    model, tokens = received.get()
    results.put(model(tokens).logits.detach().numpy())


def test_a_model_with_weight_norm_is_pickled_saved_and_sent_to_another_process(tmp_path: Path) -> None:
    spec = ib.ImplicitLMSpec(
        vocab_size=7, d_model=16, n_layers=1, mixer=ib.Mamba2Spec(d_state=8, head_dim=8), weight_norm=True
    )
    model, tokens = ib.build(spec).eval(), torch.randint(0, 7, (2, 5))
    expected = model(tokens).logits.detach()
    again = pickle.loads(pickle.dumps(model))
    assert [type(part) for part in again.modules()] == [type(part) for part in model.modules()]
    torch.save(model, tmp_path / "model.pt")
    for other in (again, copy.copy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(other(tokens).logits, expected)
        assert other.state_dict().keys() == model.state_dict().keys()
    context = torch.multiprocessing.get_context("fork")  # need not import torch again
    received, results = context.Queue(), context.Queue()
    process = context.Process(target=forward_in_another_process, args=(received, results))
    process.start()
    try:
        received.put((model, tokens))
        found = results.get(timeout=300)
    finally:
        process.join(timeout=60)
    torch.testing.assert_close(torch.from_numpy(found), expected)


@pytest.mark.parametrize("trained", [True, False], ids=["trained", "frozen"])
def test_a_refused_remove_parametrizations_changes_no_layer(layer: Linear, trained: bool) -> None:
    other, x = Linear(4, 3), torch.randn(5, 4)
    add_weight_norm(other)
    before = layer(x), other(x)
    assert type(layer) is type(other)  # so that both share compiled code
    layer.requires_grad_(trained)
    with pytest.raises((RuntimeError, AttributeError)):
        parametrize.remove_parametrizations(layer, "weight")
    assert all(torch.equal(one(x), value) for one, value in zip((layer, other), before, strict=True))


def test_a_cached_weight_is_not_pickled():
    layer = ib.build(ib.Mamba2Spec(d_state=8, head_dim=8), d_model=16).conv
    add_weight_norm(layer)
    norm = layer.parametrizations.weight[0]
    with WeightCache(layer).activate():
        assert norm.cached is not None
        assert pickle.loads(pickle.dumps(norm)).cached is None

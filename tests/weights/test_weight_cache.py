"""Weight cache of a pass: the order of gradients, fused weights, and use by several threads."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from threading import Event, Thread, get_ident
from typing import Any

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.layers import Linear
from implicit_blocks.weights.cache import WeightCache

SPECS = {
    "mamba2": {"mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8}},
    "llama": {"mixer": {"kind": "attention", "n_heads": 2}, "mlp": {"kind": "swiglu", "d_ff": 20}},
}


@pytest.fixture(params=SPECS)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    torch.manual_seed(0)
    spec = {
        "kind": "implicit_lm",
        "d_model": 16,
        "n_layers": 3,
        "vocab_size": 32,
        "gradient": {"kind": "phantom", "steps": 2},
        "stopping": {"max_iterations": 3},
        **SPECS[request.param],
    }
    return ib.build(ib.specs.ImplicitLMSpec.model_validate(spec))


def arrivals(model: torch.nn.Module, checkpoint: str, window_length: int | None = None) -> list[str]:
    """Run one backward pass; return the names of the parameters in the order of their gradients."""
    names: list[str] = []
    hooks = [
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: names.append(name))
        for name, parameter in model.named_parameters()
    ]
    model.checkpoint_activations(checkpoint)
    model.zero_grad()
    ids = torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(ids[:, :-1], labels=ids[:, 1:], window_length=window_length).loss.backward()
    for hook in hooks:
        hook.remove()
    return names


@pytest.mark.parametrize("checkpoint", ["none", "steps", "layers"])
@pytest.mark.parametrize("window_length", [None, 4])
def test_layerwise_gradients_are_equal_and_ready_earlier(
    model: torch.nn.Module, checkpoint: str, window_length: int | None
) -> None:
    early = copy.deepcopy(model)
    early.backbone.gradients_by_layer = True
    late_order = arrivals(model, checkpoint, window_length)
    early_order = arrivals(early, checkpoint, window_length)
    assert sorted(late_order) == sorted(early_order)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(early.get_parameter(name).grad, parameter.grad, rtol=0, atol=0)

    def layers(order: list[str]) -> list[str]:
        inside = [name.split(".")[2] for name in order if name.startswith("backbone.layers")]
        return [layer for layer, _ in groupby(inside)]

    assert layers(early_order) == ["2", "1", "0"]
    assert layers(late_order) != ["2", "1", "0"]


def test_a_captured_map_makes_all_gradients_ready_together(model: torch.nn.Module) -> None:
    late_order = arrivals(model, "none")
    model.backbone.gradients_by_layer = True
    model.capture_graphs()
    assert arrivals(model, "none") == late_order
    assert arrivals(model, "layers") != late_order  # recomputed layers are not captured


def test_weights_used_before_and_after_layer_sync_accumulate_both_gradients(model: torch.nn.Module) -> None:
    layer, z = model.backbone.layers[0], torch.randn(2, 16)
    projection = layer.mixer.in_proj
    expected = torch.autograd.grad(projection(z).sum(), list(projection.parameters()))
    cached = WeightCache(model.backbone)
    with cached.activate():
        total = projection(z).sum() / 2
        cached.sync_layer_gradients(layer)
        total = total + projection(z).sum() / 2
    total.backward()
    for parameter, gradient in zip(projection.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def test_sync_layer_gradients_keeps_leaf_weights(model: torch.nn.Module) -> None:
    """A captured graph works on such leaf weights."""
    layer = model.backbone.layers[0]
    cached = WeightCache(layer)
    leaves = cached.copied().as_leaves(cached)
    with leaves.activate():
        leaves.sync_layer_gradients(layer)
        used = [holder.cached for holder, _ in leaves._cached]
    assert all(a is b for a, (_, b) in zip(used, leaves._cached, strict=True))


@torch.no_grad()
def test_fused_weights_are_views_of_one_tensor() -> None:
    spec = {"kind": "implicit_lm", "d_model": 16, "n_layers": 1, "vocab_size": 32, **SPECS["llama"]}
    model = ib.build(ib.specs.ImplicitLMSpec.model_validate(spec))
    weights, z = model.cache_weights(), torch.randn(2, 16)
    mlp = model.backbone.blocks()[0].mlp
    with weights.activate():
        expected = mlp.gate_proj(z), mlp.up_proj(z)
    whole = weights.fuse(mlp.gate_proj, mlp.up_proj)
    assert torch.equal(torch.nn.functional.linear(z, whole), torch.cat(expected, -1))
    with weights.activate():
        assert torch.equal(mlp.gate_proj(z), expected[0])
        assert torch.equal(mlp.up_proj(z), expected[1])
        assert {part.cached[0].untyped_storage().data_ptr() for part in (mlp.gate_proj, mlp.up_proj)} == {
            whole.untyped_storage().data_ptr()
        }
    assert weights.fuse(mlp.gate_proj, Linear(2, 2)) is None


@torch.no_grad()
def test_a_model_in_use_by_another_thread_refuses_a_call(model: torch.nn.Module) -> None:
    """The call would silently compute in the precision of the other thread."""
    model.eval()
    tokens = torch.randint(32, (2, 7))
    expected, copied = model(tokens).logits, copy.deepcopy(model)
    active, release = Event(), Event()

    def other() -> None:
        with torch.autocast("cpu", torch.bfloat16), WeightCache(model.backbone, model.injection).activate():
            active.set()
            release.wait(60)

    thread = Thread(target=other)
    thread.start()
    try:
        assert active.wait(60)
        with pytest.raises(RuntimeError, match="another thread"):
            model(tokens)
        assert torch.equal(copied(tokens).logits, expected)
    finally:
        release.set()
        thread.join(60)
    assert torch.equal(model(tokens).logits, expected)


@pytest.mark.parametrize("checkpoint", ["steps", "layers"])
def test_checkpointed_backward_runs_in_a_separate_thread(model: torch.nn.Module, checkpoint: str) -> None:
    """Recomputation uses the weights in that thread while the calling thread waits, as on a GPU."""
    model.checkpoint_activations(checkpoint)
    tokens = torch.randint(32, (2, 7))
    expected = torch.autograd.grad(model(tokens, labels=tokens).loss, list(model.parameters()))
    for _ in range(2):
        loss = model(tokens, labels=tokens).loss
        thread = Thread(target=loss.backward)
        thread.start()
        thread.join(60)
        torch.testing.assert_close([p.grad for p in model.parameters()], list(expected))
        model.zero_grad()


def test_a_backward_thread_may_activate_weights_that_its_caller_uses(model: torch.nn.Module) -> None:
    """On a GPU, backward recomputes steps in its own thread while the caller's weights are active."""
    modules = model.backbone, model.injection
    uses: list[int] = []

    class Again(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
            with WeightCache(*modules).activate():
                uses.append(get_ident())
            return gradient

    x = torch.ones(2, requires_grad=True)
    with torch.no_grad(), WeightCache(*modules).activate(), ThreadPoolExecutor(1) as pool:
        with torch.enable_grad():
            total = Again.apply(x).sum()
        pool.submit(total.backward).result(60)
    assert uses
    assert uses[0] != get_ident()
    assert torch.equal(x.grad, torch.ones(2))

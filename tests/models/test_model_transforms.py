"""``torch.export``, ``vmap`` and forward mode: exact for explicit models, refused for a search."""

from __future__ import annotations

import pytest
import torch
from torch.func import functional_call, grad, jvp, vmap

import implicit_blocks as ib

# torch's forward mode calls torch.jit.script, which torch deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")

TOKENS = torch.tensor([[0, 3, 1, 4], [2, 2, 0, 1]])
MIXERS = {"attention": ib.AttentionSpec(n_heads=2), "mamba2": ib.Mamba2Spec(d_state=8, head_dim=8)}


def model_of(kind, mixer="attention", **options):
    spec = {"implicit": ib.ImplicitLMSpec, "explicit": ib.ExplicitLMSpec}[kind]
    built = ib.build(spec(vocab_size=5, d_model=8, n_layers=1, mixer=MIXERS[mixer], **options))
    return built.to(torch.float64).eval()


class Logits(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, tokens):
        return self.model(tokens).logits


def derivatives(model):
    """Return the slope of a loss along a direction, by forward mode and by reverse mode."""
    parameters = dict(model.named_parameters())
    direction = {name: torch.randn_like(value) for name, value in parameters.items()}

    def loss(values):
        return functional_call(model, values, (TOKENS,)).logits.square().sum()

    forward = jvp(loss, (parameters,), (direction,))[1]
    gradients = grad(loss)(parameters)
    return forward, sum((gradients[name] * direction[name]).sum() for name in parameters)


@pytest.mark.parametrize("mixer", MIXERS)
def test_explicit_models_support_export_vmap_and_forward_mode(mixer):
    model = model_of("explicit", mixer)
    expected = model(TOKENS).logits
    torch.testing.assert_close(vmap(lambda row: model(row[None]).logits[0])(TOKENS), expected)
    exported = torch.export.export(Logits(model), (TOKENS,))
    torch.testing.assert_close(exported.module()(TOKENS), expected)
    torch.testing.assert_close(*derivatives(model))


@pytest.mark.parametrize(
    "gradient",
    [ib.UnrolledSpec(steps=3), ib.LastLoopsSpec(), ib.LastLoopsSpec(loops=2)],
    ids=["unrolled", "all_loops", "last_loops"],
)
@pytest.mark.parametrize("mixer", MIXERS)
def test_forward_mode_is_that_of_the_differentiated_steps(mixer, gradient):
    model = model_of("implicit", mixer, gradient=gradient, stopping=ib.Stopping(max_iterations=2))
    torch.testing.assert_close(*derivatives(model))


@pytest.mark.parametrize(
    "gradient", [ib.PhantomSpec(), ib.ImplicitFunctionSpec()], ids=lambda spec: spec.kind
)
def test_implicit_models_refuse_forward_mode_vmap_and_export(gradient):
    model = model_of("implicit", gradient=gradient)
    with pytest.raises(NotImplementedError, match=r"forward-mode.*gradient estimator"):
        derivatives(model)
    forward_mode = torch.autograd.forward_ad.dual_level()
    with torch.no_grad(), forward_mode, pytest.raises(NotImplementedError, match="forward-mode"):
        model(TOKENS)
    with pytest.raises(NotImplementedError, match=r"vmap.*search"):
        vmap(lambda row: model(row[None]).logits[0])(TOKENS)
    with pytest.raises(NotImplementedError, match=r"torch.export.*search"):
        torch.export.export(Logits(model), (TOKENS,))
    assert model(TOKENS).logits.isfinite().all()


def test_fixed_point_layers_refuse_forward_mode_and_vmap():
    layer = ib.FixedPoint(lambda z, x: 0.5 * torch.tanh(z) + x)
    x = torch.randn(2, 3)
    with pytest.raises(NotImplementedError, match="forward-mode"):
        jvp(lambda x: layer(x).z, (x,), (x,))
    with pytest.raises(NotImplementedError, match="vmap"):
        vmap(lambda x: layer(x).z)(x[None])

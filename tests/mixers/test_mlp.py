"""The MLP of kind ``mlp``: its equations, its parameters and costs, its place in a model, errors."""

from __future__ import annotations

import math

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.models.counting import count_parameters

D_MODEL, D_FF = 8, 12
EQUATIONS = {
    "relu": lambda x: torch.where(x > 0, x, 0.0),
    "relu2": lambda x: torch.where(x > 0, x * x, 0.0),
    "half_relu2": lambda x: torch.where(x > 0, x * x / 2, 0.0),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("activation", EQUATIONS)
def test_the_output_and_its_gradients_are_those_of_the_equation(activation, gated, bias):
    spec = ib.FeedForwardSpec(d_ff=D_FF, activation=activation, gated=gated, bias=bias)
    mlp = ib.build(spec, d_model=D_MODEL).double()

    def linear(name, x):
        layer = getattr(mlp, name)
        return x @ layer.weight.T + (layer.bias if bias else 0)

    z = torch.randn(2, 3, D_MODEL, dtype=torch.float64, requires_grad=True)
    act = EQUATIONS[activation]
    hidden = act(linear("gate_proj", z)) * linear("up_proj", z) if gated else act(linear("in_proj", z))
    expected, found = linear("out_proj", hidden), mlp(z)
    torch.testing.assert_close(found, expected)
    leaves = [z, *mlp.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(found.square().sum(), leaves),
        torch.autograd.grad(expected.square().sum(), leaves),
    )


def test_a_mlp_gated_by_silu_is_swiglu():
    specs = ib.FeedForwardSpec(d_ff=D_FF, activation="silu", gated=True), ib.SwiGLUSpec(d_ff=D_FF)
    mlps = []
    for spec in specs:
        torch.manual_seed(1)
        mlps.append(ib.build(spec, d_model=D_MODEL))
    assert all(torch.equal(a, b) for a, b in zip(mlps[0].parameters(), mlps[1].parameters(), strict=True))
    assert mlps[0].state_dict().keys() == mlps[1].state_dict().keys()
    z = torch.randn(2, 3, D_MODEL)
    assert torch.equal(mlps[0](z), mlps[1](z))
    assert specs[0].flops_per_token(D_MODEL, 5) == specs[1].flops_per_token(D_MODEL, 5)


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_the_spec_counts_the_parameters_and_products_of_its_mlp(gated):
    spec = ib.FeedForwardSpec(d_ff=D_FF, gated=gated, bias=True)
    with torch.device("meta"):
        mlp = ib.build(spec, d_model=D_MODEL)
    built = {name: tuple(parameter.shape) for name, parameter in mlp.named_parameters()}
    assert spec.parameter_shapes(D_MODEL) == built
    matrices = sum(math.prod(shape) for shape in built.values() if len(shape) == 2)
    assert spec.flops_per_token(D_MODEL, 5) == 2 * matrices
    assert "gelu" in spec.headline(D_MODEL)
    assert ("gated" in spec.headline(D_MODEL)) == gated


@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
def test_a_model_with_the_mlp_trains_and_scales_its_output_projection(gated):
    mlp = {"kind": "mlp", "d_ff": D_FF, "activation": "half_relu2", "gated": gated}
    fields = {"vocab_size": 11, "d_model": 8, "n_layers": 2, "mixer": ib.AttentionSpec(n_heads=2), "mlp": mlp}
    spec = ib.ImplicitLMSpec(**fields)
    model = ib.build(spec)
    assert count_parameters(spec).total == sum(p.numel() for p in model.parameters())
    tokens = torch.randint(11, (2, 5))
    model(tokens).logits.square().mean().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    blocks = model.backbone.blocks()
    assert all(block.mlp.out_proj in block.output_projections() for block in blocks)


@pytest.mark.parametrize(
    ("fields", "place"),
    [
        ({}, "d_ff"),
        ({"d_ff": 0}, "d_ff"),
        ({"d_ff": 8, "activation": "swish"}, "activation"),
        ({"d_ff": 8, "gated": "half"}, "gated"),
        ({"d_ff": 8, "dff": 9}, "dff"),
    ],
)
def test_an_invalid_field_is_refused_at_its_place(fields, place):
    with pytest.raises(ValueError, match=place):
        ib.FeedForwardSpec(**fields)

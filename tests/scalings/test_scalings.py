"""Residual scalings: contracts, values of the equations, and parameters."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.decoding.slots.fused_layers import Matrix
from implicit_blocks.ops.quantization import eight_bits
from implicit_blocks.scalings.scaling import BoundedGate, DeepNorm, LayerScale
from implicit_blocks.specs import Spec, SpecError
from implicit_blocks.testing import SCALING_CONTRACTS

SCALINGS = {
    "none": ib.PlainSumSpec(),
    "layer-scale": ib.LayerScaleSpec(init=0.25),
    "bounded-gate": ib.BoundedGateSpec(maximum=0.75, init=0.5),
    "deepnorm": ib.DeepNormSpec(),
    "deepnorm-alpha": ib.DeepNormSpec(alpha=1.5),
}
STREAM, BRANCH = torch.linspace(-1, 1, 24).view(2, 3, 4), torch.linspace(3, -2, 24).view(2, 3, 4)


class Holder(Spec):
    """A spec with a residual scaling."""

    residual_scaling: ib.ScalingSpec = ib.PlainSumSpec()


def built(spec: ib.ScalingSpec, n_layers: int = 8) -> ib.Scaling:
    return ib.build(spec, d_model=4, n_layers=n_layers)


@pytest.mark.parametrize("contract", SCALING_CONTRACTS)
@pytest.mark.parametrize("name", SCALINGS)
def test_a_scaling_satisfies_the_contract(name, contract):
    SCALING_CONTRACTS[contract](SCALINGS[name])


def test_every_kind_is_tested():
    assert {spec.kind for spec in SCALINGS.values()} == set(registry.kinds("scaling"))


@pytest.mark.parametrize(
    ("name", "stream", "branch"),
    [
        ("none", 1.0, 1.0),
        ("layer-scale", 1.0, 0.25),
        ("bounded-gate", 1.0, 0.5),
        ("deepnorm", 2.0, 1.0),
        ("deepnorm-alpha", 1.5, 1.0),
    ],
)
def test_the_initial_values_are_those_of_the_equations(name, stream, branch):
    after = built(SCALINGS[name])(STREAM, BRANCH)
    torch.testing.assert_close(after, stream * STREAM + branch * BRANCH)


def test_deepnorm_s_default_factor_grows_with_the_depth():
    assert built(ib.DeepNormSpec(), n_layers=1).alpha == pytest.approx(2**0.25)
    assert built(ib.DeepNormSpec(), n_layers=128).alpha == pytest.approx(4.0)


def test_a_bounded_gate_stays_below_its_bound():
    gate = built(ib.BoundedGateSpec(maximum=0.75, init=0.1))
    with torch.no_grad():
        gate.raw_gamma.copy_(torch.tensor([-50.0, 0.0, 2.0, 50.0]))
    gamma = gate(torch.zeros(1, 1, 4), torch.ones(1, 1, 4))[0, 0].detach()
    torch.testing.assert_close(gamma, 0.75 * torch.tensor([-50.0, 0.0, 2.0, 50.0]).sigmoid())
    assert float(gamma.max()) <= 0.75


@pytest.mark.parametrize(
    ("name", "parameters"),
    [("none", []), ("layer-scale", ["gamma"]), ("bounded-gate", ["raw_gamma"]), ("deepnorm", [])],
)
def test_the_parameters_are_vectors_with_the_documented_names(name, parameters):
    found = dict(built(SCALINGS[name]).named_parameters())
    assert list(found) == parameters
    assert all(parameter.shape == (4,) for parameter in found.values())
    assert SCALINGS[name].parameter_count(4) == 4 * len(parameters)


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("name", SCALINGS)
def test_factors_of_a_branch_may_be_part_of_the_weights_that_compute_it(name, dtype):
    """The kernels of decoding compute branches so; weights in 8 bits have the factors in their scales."""
    scaling = built(SCALINGS[name])
    weight, bias, x = torch.linspace(-1, 2, 12).view(4, 3), torch.linspace(0, 1, 4), BRANCH[..., :3]
    for parameter in scaling.parameters():
        parameter.data = torch.linspace(-1, 1, 4)
    codes, scales = (weight, None) if dtype is None else eight_bits(weight, dtype)
    plain = Matrix(codes, bias, scales)
    matrix = plain.scaled(scaling)
    if name not in ("layer-scale", "bounded-gate"):
        assert matrix is plain
        return
    wide = matrix.weight if matrix.scales is None else matrix.weight * matrix.scales[:, None]
    expected = scaling(STREAM, torch.nn.functional.linear(x, weight, bias))
    found = STREAM + torch.nn.functional.linear(x, wide, matrix.bias)
    torch.testing.assert_close(found, expected, atol=1e-6 if dtype is None else 0.1, rtol=1e-6)


class Clipped(LayerScale):
    """A kind derived from one with factors that adds its branches in another way."""

    def forward(self, stream_BLD, branch_BLD):
        return stream_BLD + (self.factor * branch_BLD).clamp(-1, 1)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(None, True), (LayerScale, True), (BoundedGate, True), (DeepNorm, False), (Clipped, False)],
)
def test_only_layers_whose_scalings_are_factors_scale_their_branches(kind, expected):
    """The weights of a branch cannot contain what a kind of its own does to the product."""
    spec = ib.ExplicitLMSpec(vocab_size=5, d_model=4, n_layers=1, mixer=ib.AttentionSpec(n_heads=1))
    block = ib.build(spec).backbone.blocks()[0]
    if kind is not None:
        specs = {BoundedGate: "bounded-gate", DeepNorm: "deepnorm"}
        block.mixer_scaling = kind(SCALINGS[specs.get(kind, "layer-scale")], d_model=4, n_layers=1)
    assert block.scales_branches == expected


def test_only_the_scaling_none_is_declared_plain():
    assert [name for name, spec in SCALINGS.items() if spec.plain] == ["none"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"kind": "layer_scale", "init": 0}, r"residual_scaling\.init: .*got 0"),
        ({"kind": "bounded_gate", "maximum": 0}, r"residual_scaling\.maximum: .*got 0"),
        (
            {"kind": "bounded_gate", "maximum": 0.75, "init": 0.75},
            r"residual_scaling\.init: .*0\.75.*got 0\.75; choose for example 0\.375",
        ),
        ({"kind": "bounded_gate", "maximum": 0.4}, r"residual_scaling\.init: .*0\.4.*got 0\.5"),
        ({"kind": "deepnorm", "alpha": -1}, r"residual_scaling\.alpha: .*got -1"),
        ({"kind": "layerscale"}, r"residual_scaling\.kind: .*'layer_scale'"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(map(str, value.values())),
)
def test_wrong_fields_are_refused_with_place_value_and_remedy(fields, message):
    with pytest.raises(SpecError, match=message):
        Holder(residual_scaling=fields)

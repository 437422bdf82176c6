"""Muon's parameters, its steps, and saving and loading its state."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.specs import SpecError
from trainer.cli.train import main
from trainer.optim.muon import MuonAndAdamW, matrices_of
from trainer.specs.run import MuonSpec

MIXERS = {
    "mamba2": ib.Mamba2Spec(d_state=8, head_dim=8),
    "attention": ib.AttentionSpec(n_heads=2),
}


def model_of(kind: str = "implicit", mixer: str = "mamba2", **options) -> ib.ImplicitLM | ib.ExplicitLM:
    spec = ib.ImplicitLMSpec if kind == "implicit" else ib.ExplicitLMSpec
    mlp = ib.SwiGLUSpec(d_ff=24)
    return ib.build(spec(vocab_size=11, d_model=16, n_layers=2, mixer=MIXERS[mixer], mlp=mlp, **options))


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        tokens = torch.randint(0, 11, (4, 12), generator=generator)
        optimizer.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        optimizer.step()


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("weight_norm", [True, False], ids=["weight-norm", "plain"])
@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("kind", ["implicit", "explicit"])
def test_matrices_are_the_linear_layers_and_nothing_else(kind, mixer, weight_norm, tied):
    model = model_of(kind, mixer, weight_norm=weight_norm, tie_embeddings=tied)
    found = matrices_of(model)
    layers = [f"backbone.layers.{n}.{part}" for n in range(2) for part in (
        "mixer.in_proj", "mixer.out_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.out_proj"
    )]  # fmt: skip
    expected = {*layers, *(["injection.proj"] if kind == "implicit" else [])}
    suffix = ".parametrizations.weight.original1" if weight_norm else ".weight"
    assert found.keys() == {name + suffix for name in expected}
    named = dict(model.named_parameters())
    assert all(parameter is named[name] and parameter.ndim == 2 for name, parameter in found.items())


def test_every_parameter_is_in_one_group_with_the_models_weight_decay():
    model = model_of(tie_embeddings=False)
    optimizer = ib.build(MuonSpec(learning_rate=1e-3, weight_decay=0.3), model=model)
    grouped = [(p, group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(id(p) for p, _ in grouped) == sorted(id(p) for p in model.parameters())
    decayed = {id(p) for p in model.decay_groups()[0]}
    assert all(decay == (0.3 if id(p) in decayed else 0.0) for p, decay in grouped)


def test_a_step_equals_torchs_muon_for_matrices_and_adamw_for_the_rest():
    model = model_of()
    twin = copy.deepcopy(model)
    spec = MuonSpec(learning_rate=3e-3, momentum=0.9, weight_decay=0.2)
    optimizer = ib.build(spec, model=model)
    matrices = matrices_of(twin)
    rest = [p for p in twin.parameters() if all(p is not matrix for matrix in matrices.values())]
    decayed = {id(p) for p in twin.decay_groups()[0]}
    apart = [
        torch.optim.Muon(
            matrices.values(), lr=3e-3, momentum=0.9, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"
        ),
        torch.optim.AdamW(
            [p for p in rest if id(p) in decayed], lr=3e-3, betas=(0.9, 0.95), weight_decay=0.2
        ),
        torch.optim.AdamW(
            [p for p in rest if id(p) not in decayed], lr=3e-3, betas=(0.9, 0.95), weight_decay=0
        ),
    ]
    for step in range(3):
        tokens = torch.randint(0, 11, (4, 12))
        for net, optimizers in ((model, [optimizer]), (twin, apart)):
            net.zero_grad()
            net(tokens, labels=tokens).loss.backward()
            for part in optimizers:
                part.step()
        for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert torch.equal(ours, theirs), (step, name)


@pytest.mark.parametrize("shape", [(8, 64), (64, 8), (32, 32)], ids=str)
def test_the_update_size_does_not_depend_on_the_shape(shape):
    """The root mean square of an update is about 0.2 of the learning rate, like AdamW's."""
    layer = nn.Sequential(nn.Linear(shape[1], shape[0], bias=False), nn.Linear(2, 2))
    layer.decay_groups = lambda: (list(layer.parameters()), [])
    optimizer = ib.build(MuonSpec(learning_rate=1e-2, weight_decay=0.0), model=layer)
    weight = layer[0].weight
    before = weight.detach().clone()
    weight.grad = torch.randn(shape)
    optimizer.step()
    moved = (weight.detach() - before).square().mean().sqrt()
    assert 0.1e-2 < float(moved) < 0.3e-2


def test_with_weight_norm_a_step_rotates_rows_inversely_to_their_norm():
    """The update of ``v`` does not depend on its norm, so the rotation is inversely proportional to it."""
    turned = []
    for length in (1.0, 4.0):
        torch.manual_seed(0)
        model = model_of()
        layer = model.backbone.blocks()[0].mixer.out_proj
        v = layer.parametrizations.weight.original1
        with torch.no_grad():
            v.mul_(length)
        optimizer = ib.build(MuonSpec(learning_rate=1e-3, weight_decay=0.0), model=model)
        before = nn.functional.normalize(v.detach(), dim=1)
        take_steps(model, optimizer, 1, seed=3)
        turned.append((nn.functional.normalize(v.detach(), dim=1) - before).norm(dim=1).mean())
    assert float(turned[0] / turned[1]) == pytest.approx(4.0, rel=0.1)


def test_loading_a_saved_state_continues_bit_for_bit():
    model = model_of()
    optimizer = ib.build(MuonSpec(learning_rate=3e-3), model=model)
    take_steps(model, optimizer, 3, seed=1)
    twin = model_of()
    twin.load_state_dict(model.state_dict())
    other = ib.build(MuonSpec(learning_rate=1e-5), model=twin)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert isinstance(other, MuonAndAdamW)
    take_steps(model, optimizer, 3, seed=2)
    take_steps(twin, other, 3, seed=2)
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_closure_is_called_once_and_with_gradients():
    model = model_of()
    optimizer = ib.build(MuonSpec(learning_rate=3e-3), model=model)
    calls = []

    def closure() -> float:
        optimizer.zero_grad()
        loss = model(torch.arange(8).view(2, 4), labels=torch.arange(8).view(2, 4)).loss
        loss.backward()
        calls.append(loss.item())
        return calls[-1]

    assert [optimizer.step(closure)] == calls


def test_frozen_layers_are_excluded_and_a_model_without_matrices_is_refused():
    model = model_of(weight_norm=False)
    frozen = model.backbone.blocks()[0].mixer.in_proj.weight.requires_grad_(False)
    assert all(parameter is not frozen for parameter in matrices_of(model).values())
    bare = nn.Embedding(4, 4)
    with pytest.raises(ValueError, match=r"Embedding has no linear layers for Muon; choose optimizer adamw"):
        ib.build(MuonSpec(learning_rate=1e-3), model=bare)


def test_sharded_matrices_are_refused():
    model = model_of(weight_norm=False)
    model.backbone.blocks()[0].mixer.in_proj.weight.placements = ("Shard(0)",)  # as a DTensor has
    with pytest.raises(ValueError, match=r"in_proj\.weight is sharded over devices.*choose optimizer adamw"):
        ib.build(MuonSpec(learning_rate=1e-3), model=model)


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        ({"momentum": 1.0}, "momentum", "less than 1"),
        ({"newton_schulz_steps": 0}, "newton_schulz_steps", "greater than or equal to 1"),
        ({"momentun": 0.9}, "momentun", "'momentum'"),
        ({"shape_scaling": "spectral"}, "shape_scaling", "'match_rms_adamw' or 'original'"),
    ],
)
def test_an_invalid_field_is_refused_with_its_name(fields, place, message):
    with pytest.raises(SpecError) as caught:
        MuonSpec.model_validate({"learning_rate": 1e-3, **fields})
    (error,) = caught.value.errors()
    assert error["loc"] == (place,)
    assert message in error["msg"]


@pytest.mark.slow
def test_training_the_zoo_spec_learns_s3(tmp_path):
    assert main(["--spec", "word_problem_s3_muon", "--output", str(tmp_path / "run")]) == 0
    sets = json.loads((tmp_path / "run" / "summary.json").read_text())["evaluation"]
    accuracies = {part["set"]: part["accuracy_last"] for part in sets}
    assert accuracies["p0.5_L32"] >= 0.99

"""Initial states: contracts, values, widths, and what their fields accept."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.specs import Spec, SpecError
from implicit_blocks.testing import START_CONTRACTS

STARTS = {
    "zeros": ib.ZeroStartSpec(),
    "zeros-noise": ib.ZeroStartSpec(noise_std=0.01, seed=4),
    "embedding": ib.EmbeddingStartSpec(),
    "embedding-noise": ib.EmbeddingStartSpec(noise_std=0.1),
    "prelude": ib.PreludeStartSpec(),
    "normal": ib.NormalStartSpec(std=0.3),
    "normal-truncated": ib.NormalStartSpec(std=0.3, truncation=3, noise_std=0.1),
    "learned": ib.LearnedStartSpec(),
    "learned-normal": ib.LearnedStartSpec(init_std=0.02),
}
X = torch.arange(24.0).view(2, 3, 4)
POSITIONS = torch.arange(3)[None]


class Holder(Spec):
    """A spec with an initial state."""

    z_init: ib.StartSpec | None = None


def run(spec: ib.StartSpec, *, training: bool = False, x=X, e=-X, width: int = 4, dtype=torch.float32):
    start = ib.build(spec, width=width).train(training)
    return start(x_BLD=x, e_BLD=e, positions_BL=POSITIONS, width=width, dtype=dtype)


@pytest.mark.parametrize("contract", START_CONTRACTS)
@pytest.mark.parametrize("name", STARTS)
def test_a_start_satisfies_the_contract(name, contract):
    START_CONTRACTS[contract](STARTS[name])


def test_every_kind_is_tested():
    assert {spec.kind for spec in STARTS.values()} == set(registry.kinds("start"))


def test_the_values_are_those_of_the_kinds():
    assert torch.equal(run(ib.ZeroStartSpec()), torch.zeros(2, 3, 4))
    assert torch.equal(run(ib.EmbeddingStartSpec()), X)
    assert torch.equal(run(ib.PreludeStartSpec()), -X)
    assert torch.equal(run(ib.LearnedStartSpec()), torch.zeros(2, 3, 4))


def test_gradients_reach_the_tokens_the_prelude_and_the_learned_vector():
    x, e = X.clone().requires_grad_(), (-X).requires_grad_()
    run(ib.EmbeddingStartSpec(noise_std=0.1), training=True, x=x, e=e).sum().backward()
    run(ib.PreludeStartSpec(), x=x, e=e).mul(2).sum().backward()
    assert torch.equal(x.grad, torch.ones_like(x))
    assert torch.equal(e.grad, 2 * torch.ones_like(e))
    start = ib.build(ib.LearnedStartSpec(), width=4)
    start(x_BLD=X, e_BLD=X, positions_BL=POSITIONS, width=4, dtype=torch.float32).sum().backward()
    assert torch.equal(start.value.grad, torch.full((4,), 6.0))


@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_normal_noise_has_the_standard_deviation_and_the_truncation(training):
    start = ib.build(ib.NormalStartSpec(std=0.5, truncation=1.5), width=256).train(training)
    x = torch.zeros(4, 64, 8)
    z = start(x_BLD=x, e_BLD=x, positions_BL=torch.arange(64)[None], width=256, dtype=torch.float32)
    assert float(z.abs().max()) <= 0.75
    assert float(z.std()) == pytest.approx(0.5 * 0.743, abs=0.01)  # 0.743: truncated at 1.5


def test_the_noise_of_two_seeds_and_the_added_noise_differ():
    one, other = run(ib.NormalStartSpec()), run(ib.NormalStartSpec(seed=1))
    added = run(ib.ZeroStartSpec(noise_std=1.0))
    assert not torch.equal(one, other)
    assert not torch.equal(one, added)


def test_equal_positions_have_equal_noise_in_evaluation():
    z = run(ib.NormalStartSpec())
    assert torch.equal(z[0], z[1])
    assert not torch.equal(z[0, 0], z[0, 1])


@pytest.mark.parametrize(
    ("spec", "depends"),
    [
        (ib.ZeroStartSpec(), False),
        (ib.EmbeddingStartSpec(), True),
        (ib.PreludeStartSpec(), True),
        (ib.NormalStartSpec(), False),
        (ib.LearnedStartSpec(), False),
    ],
    ids=lambda value: getattr(value, "kind", str(value)),
)
def test_a_spec_states_whether_the_start_depends_on_the_tokens(spec, depends):
    assert spec.depends_on_tokens is depends


def test_a_field_accepts_the_name_of_a_kind():
    assert Holder(z_init="embedding") == Holder(z_init={"kind": "embedding"})
    assert Holder.model_validate(Holder(z_init="normal").model_dump()).z_init == ib.NormalStartSpec()
    assert {"enum": registry.kinds("start")} in Holder.model_json_schema()["properties"]["z_init"]["anyOf"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"z_init": "embeding"}, r"z_init.*embeding.*did you mean 'embedding'"),
        ({"z_init": {"kind": "normal", "std": 0}}, r"z_init\.std.*greater than 0; got 0"),
        ({"z_init": {"kind": "normal", "truncation": -1}}, r"z_init\.truncation.*got -1"),
        ({"z_init": {"kind": "zeros", "noise_std": -0.1}}, r"z_init\.noise_std.*got -0.1"),
        ({"z_init": {"kind": "zeros", "seed": -1}}, r"z_init\.seed.*got -1"),
        ({"z_init": {"kind": "learned", "std": 1}}, r"z_init\.std: unknown key.*init_std"),
    ],
)
def test_wrong_fields_are_refused_with_place_and_value(fields, message):
    with pytest.raises(SpecError, match=message):
        Holder(**fields)


@pytest.mark.parametrize(
    "spec", [ib.EmbeddingStartSpec(), ib.PreludeStartSpec()], ids=["embedding", "prelude"]
)
def test_unequal_widths_are_refused_with_both_numbers(spec):
    with pytest.raises(ValueError, match=r"width d_model, 4, .* width 6"):
        spec.check(4, 6)
    with pytest.raises(ValueError, match=r"has width 4, .* width 6"):
        run(spec, width=6)
    spec.check(4, 4)
    ib.NormalStartSpec().check(4, 6)


def test_a_width_other_than_the_built_one_is_refused_with_both_numbers():
    start = ib.build(ib.LearnedStartSpec(), width=8)
    with pytest.raises(ValueError, match=r"width 8, .* width 4"):
        start(x_BLD=X, e_BLD=X, positions_BL=POSITIONS, width=4, dtype=torch.float32)


def test_a_missing_prelude_output_is_refused():
    with pytest.raises(ValueError, match=r"e_BLD is None"):
        run(ib.PreludeStartSpec(), e=None)


@pytest.mark.gpu
@pytest.mark.parametrize("training", [False, True], ids=["evaluation", "training"])
def test_a_captured_graph_computes_the_noise_anew(training):
    start = ib.build(ib.NormalStartSpec(truncation=3, noise_std=0.1), width=4).cuda().train(training)
    x, positions = X.cuda(), POSITIONS.cuda()

    def run_on_gpu():
        return start(x_BLD=x, e_BLD=x, positions_BL=positions, width=4, dtype=torch.float32)

    first = run_on_gpu()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        z = run_on_gpu()
    graph.replay()
    one = z.clone()
    graph.replay()
    assert torch.equal(one, z) is not training
    assert training or torch.equal(one, first)

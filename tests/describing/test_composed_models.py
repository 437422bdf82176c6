"""Composed models are described and counted as they are built."""

from __future__ import annotations

import io
import math
import random
from collections.abc import Iterator
from typing import Any, Literal

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.describing import changes, draw_run, model_tree
from implicit_blocks.describing.drawing import show
from implicit_blocks.injections import Concat, ConcatSpec
from implicit_blocks.models.counting import count_parameters
from implicit_blocks.scalings import LayerScale, LayerScaleSpec
from implicit_blocks.specs import load_spec
from implicit_blocks.specs.tree import SpecError
from implicit_blocks.starts import LearnedStart, LearnedStartSpec

MIXERS: tuple[dict[str, Any], ...] = (
    {"kind": "attention", "n_heads": 2},
    {"kind": "attention", "n_heads": 4, "n_kv_heads": 2, "bias": "qk", "qk_norm": "weighted"},
    {"kind": "attention", "n_heads": 2, "bias": True, "value_embeddings": 11},
    {"kind": "mamba2", "d_state": 4, "head_dim": 8, "bias": True},
    {"kind": "hybrid", "mixers": [{"kind": "attention", "n_heads": 2}, {"kind": "mamba2", "head_dim": 8}]},
)
MLPS: tuple[dict[str, Any] | None, ...] = (
    None,
    {"kind": "swiglu", "d_ff": 12},
    {"kind": "mlp", "d_ff": 12, "activation": "relu2", "bias": True},
    {"kind": "mlp", "d_ff": 12, "gated": True},
)
INJECTIONS: tuple[dict[str, Any], ...] = (
    {"kind": "projection"},
    {"kind": "none"},
    {"kind": "add"},
    {"kind": "concat"},
    {"kind": "concat", "bias": True},
    {"kind": "diagonal"},
    {"kind": "attractor"},
    {"kind": "residual"},
    {"kind": "residual", "gate_init": 0.5},
)
STARTS: tuple[Any, ...] = (None, "zeros", "learned", "embedding", "prelude", {"kind": "normal", "std": 0.5})
SCALINGS: tuple[dict[str, Any], ...] = (
    {"kind": "none"},
    {"kind": "layer_scale"},
    {"kind": "bounded_gate"},
    {"kind": "deepnorm"},
)
PLACEMENTS = ("pre", "post", "sandwich", "pre_post")
WIDTH, OTHER_WIDTH = 32, 48


def random_specs(count: int, *, seed: int = 0) -> Iterator[Any]:
    """Yield model specs: random choices of all parts, those that fit together."""
    draw = random.Random(seed)
    found = 0
    while found < count:
        fields, explicit = _fields(draw), draw.random() < 0.15
        if explicit:
            fields = {
                name: v for name, v in fields.items() if name not in ("injection", "z_init", "exit_gate")
            }
        try:
            spec = (ib.ExplicitLMSpec if explicit else ib.ImplicitLMSpec)(**fields)
        except SpecError:
            continue  # parts that do not fit together
        found += 1
        yield spec


def _fields(draw: random.Random) -> dict[str, Any]:
    def flag(probability: float = 0.5) -> bool:
        return draw.random() < probability

    def pattern() -> tuple[list[dict[str, Any]], int]:
        entries: list[dict[str, Any]] = []
        for _ in range(draw.choice((1, 2))):
            entry: dict[str, Any] = {"repeat": draw.choice((1, 2))}
            entry |= {"mixer": draw.choice(MIXERS)} if flag() else {}
            entry |= {"mlp": draw.choice(MLPS)} if flag() else {}
            entries.append(entry)
        return entries, sum(entry["repeat"] for entry in entries)

    def stack() -> dict[str, Any] | None:
        if flag(0.3):
            return None
        layers, period = pattern()
        fields: dict[str, Any] = {"n_layers": draw.choice((1, 2))}
        if flag():
            fields = {"n_layers": period * draw.choice((1, 2)), "layers": layers}
        elif flag(0.7):
            fields |= {"mixer": draw.choice(MIXERS), "mlp": draw.choice(MLPS)}
        fields |= {"norm_placement": draw.choice(PLACEMENTS)} if flag() else {}
        return fields | ({"residual_scaling": draw.choice(SCALINGS)} if flag() else {})

    layers, period = pattern()
    other = flag(0.3)
    fields = {
        "vocab_size": 11,
        "pad_vocab_to": draw.choice((1, 8)),
        "d_model": WIDTH,
        "mixer": draw.choice(MIXERS),
        "mlp": draw.choice(MLPS),
        "prelude": stack(),
        "coda": stack(),
        "prelude_norm": flag(0.3),
        "core_d_model": OTHER_WIDTH if other else None,
        "core_projection": other or flag(0.3),
        "core_projection_bias": flag(0.3),
        "core_norm": draw.choice((None, True, False)),
        "core_residual": flag(0.3),
        "norm_before_coda": flag(0.2),
        "norm_placement": draw.choice(PLACEMENTS),
        "residual_scaling": draw.choice(SCALINGS),
        "tie_embeddings": flag(),
        "weight_norm": flag(),
        "injection": draw.choice(INJECTIONS),
        "z_init": draw.choice(STARTS),
        "exit_gate": flag(0.3),
    }
    if flag():
        return fields | {"n_layers": draw.choice((1, 3))}
    return fields | {"layers": layers, "n_layers": period * draw.choice((1, 2))}


def built_on_meta(spec: Any) -> torch.nn.Module:
    with torch.device("meta"):
        model: torch.nn.Module = ib.build(spec)
    return model


def assert_described_as_built(spec: Any) -> None:
    shapes = {name: tuple(p.shape) for name, p in built_on_meta(spec).named_parameters()}
    tree, counts = model_tree(spec), count_parameters(spec)
    assert tree.shapes() == shapes, spec
    assert counts is not None
    assert tree.parameters == counts.total == sum(map(math.prod, shapes.values()))


def test_names_shapes_and_counts_equal_the_built_models() -> None:
    for spec in random_specs(25):
        assert_described_as_built(spec)


@pytest.mark.slow
def test_names_shapes_and_counts_of_many_models_equal_the_built_ones() -> None:
    for spec in random_specs(300, seed=1):
        assert_described_as_built(spec)


@pytest.mark.parametrize("field", ["injection", "z_init", "residual_scaling", "norm_placement"])
def test_the_random_specs_cover_every_kind(field: str) -> None:
    kinds = set()
    for spec in random_specs(240):
        value = getattr(spec, "start" if field == "z_init" else field, None)
        kinds.add(getattr(value, "kind", value))
    expected = {
        "injection": {one["kind"] for one in INJECTIONS},
        "z_init": {"zeros", "learned", "embedding", "prelude", "normal"},
        "residual_scaling": {one["kind"] for one in SCALINGS},
        "norm_placement": set(PLACEMENTS),
    }
    assert kinds >= expected[field]


# ------------------------------------------------------------------------------------ trees

SANDWICH = [
    "model.n_layers=4",
    "model.layers=[{mixer: {kind: mamba2}, repeat: 3}, {mixer: {kind: attention, n_heads: 2}}]",
    "model.prelude={n_layers: 2, mixer: {kind: attention, n_heads: 2}}",
    "model.coda={n_layers: 4, norm_placement: sandwich, residual_scaling: {kind: layer_scale}}",
    "model.injection.kind=diagonal",
    "phases=[]",
]
LOOPED = ["model.depth={kind: poisson, mean: 6}", "model.gradient={kind: last_loops, loops: 3}"]


def text_of(run: Any) -> str:
    stream = io.StringIO()
    show(draw_run(run, name="mine"), stream=stream)
    return stream.getvalue()


def drawn(*overrides: str) -> str:
    return text_of(load_spec("word_problem_s3", list(overrides)))


def test_parts_appear_in_the_order_in_which_they_run() -> None:
    names = [node.name for node in model_tree(load_spec("word_problem_s3", SANDWICH).model).children]
    expected = ["embedding.weight", "prelude", "injection", "backbone", "coda", "norm.weight", "head"]
    assert names == expected


def test_layers_of_one_kind_are_drawn_together_with_their_numbers() -> None:
    tree = model_tree(load_spec("word_problem_s3", [*SANDWICH, "model.n_layers=8"]).model)
    (core,) = (node for node in tree.children if node.iterated)
    assert [node.numbers for node in core.children] == [(0, 1, 2, 4, 5, 6), (3, 7)]
    text = drawn(*SANDWICH, "model.n_layers=16")
    assert "0–2, 4–6, 8–10, …" in text  # noqa: RUF001  # as it is drawn


@pytest.mark.parametrize(
    ("injection", "equation"),
    [
        ("{kind: projection}", "z ← f(z, u) from z = 0"),
        ("{kind: none}", "z ← f(z) from z = e"),
        ("{kind: add}", "z ← f(z + e) from z = e"),
        ("{kind: concat}", "z ← f(W [z; e]) from z = N(0, 1²)"),
        ("{kind: diagonal}", "z ← f(exp(-Δ·A) z + Δ·B e) from z = 0"),
        ("{kind: attractor}", "z ← f(z + e) - z from z = e"),
        ("{kind: residual}", "z ← e + f(z) - z from z = e"),
        ("{kind: residual, gate_init: 0}", "v = e + g·(z - e)"),
    ],
)
def test_the_core_is_drawn_with_its_equation_and_start(injection: str, equation: str) -> None:
    changes = ["model.prelude={n_layers: 1}", f"model.injection={injection}", "phases=[]"]
    assert equation in drawn(*changes)


@pytest.mark.parametrize(
    ("start", "point"),
    [
        ("learned", "z = a learned vector"),
        ("{kind: zeros, noise_std: 0.1}", "z = 0 + N(0, 0.1²)"),
        ("{kind: normal, std: 2, truncation: 3}", "z = N(0, 2²) cut at 3"),
        ("embedding", "z = x"),
    ],
)
def test_the_start_is_drawn(start: str, point: str) -> None:
    assert point in drawn(f"model.z_init={start}")


@pytest.mark.parametrize(
    ("change", "equation"),
    [
        ("model.norm_placement=post", "rms(z + mixer(z, u))"),
        ("model.norm_placement=sandwich", "z + rms(mixer(rms(z), u))"),
        ("model.norm_placement=pre_post", "rms(z + mixer(rms(z), u))"),
        ("model.residual_scaling.kind=bounded_gate", "z + γ·mixer(rms(z), u)"),  # noqa: RUF001  # as drawn
        ("model.residual_scaling.kind=deepnorm", "α·z + mixer(rms(z), u)"),  # noqa: RUF001  # as drawn
        ("model.core_residual=true", "h = rms(z + x)"),
        ("model.logit_softcap=30", "soft cap 30"),
        ("model.embedding_scale=8", "times 8"),
    ],
)
def test_equations_of_layers_and_ends_are_drawn(change: str, equation: str) -> None:
    assert equation in drawn(change)


def test_loops_of_training_and_evaluation_are_drawn() -> None:
    evaluated = "model.at_evaluation.exit={kind: fixed, loops: 8}"
    text = drawn(*SANDWICH, *LOOPED, evaluated, "model.state_policy=per_loop")
    assert "poisson: per batch, mean 6" in text
    assert "6 loops on average" in text
    assert "last_loops: loops 3" in text
    assert "8 loops" in text
    assert "one per loop" in text
    fixed = drawn(*SANDWICH, "model.depth={kind: fixed, loops: 4}", LOOPED[1])
    assert "from z = 0, 4 loops" in fixed
    supervised = [
        "model.depth={kind: fixed, loops: 4}",
        LOOPED[1],
        "model.objective={kind: iterates, at: [2]}",
    ]
    assert "objective" in drawn(*SANDWICH, *supervised)
    left = drawn(*SANDWICH, "model.at_evaluation.exit={kind: kl, tolerance: 0.01}")
    assert "kl: tolerance 0.01" in left


class SilentStartSpec(LearnedStartSpec):
    kind: Literal["silent"] = "silent"  # type: ignore[assignment]  # another kind of the same fields


class SilentInjectionSpec(ConcatSpec):
    kind: Literal["silent"] = "silent"  # type: ignore[assignment]  # the same

    def parameter_shapes(self, d_model: int, core_width: int, projected: int | None) -> None:  # type: ignore[override]  # not declared
        return None


class SilentScalingSpec(LayerScaleSpec):
    kind: Literal["silent"] = "silent"  # type: ignore[assignment]  # the same


@pytest.mark.parametrize(
    ("field", "spec", "module"),
    [
        ("z_init", SilentStartSpec, LearnedStart),
        ("injection", SilentInjectionSpec, Concat),
        ("residual_scaling", SilentScalingSpec, LayerScale),
    ],
    ids=["start", "injection", "scaling"],
)
def test_parts_of_plugins_without_declared_parameters_are_built(field: str, spec: Any, module: Any) -> None:
    with registry.isolated():
        registry.add(spec.family, spec, module, owner="tests", version="0")
        run = load_spec("word_problem_s3", [f"model.{field}={{kind: silent}}"])
        shapes = {name: tuple(p.shape) for name, p in built_on_meta(run.model).named_parameters()}
        assert model_tree(run.model).shapes() == shapes
        assert "silent" in text_of(run)
        counts = count_parameters(run.model)
        assert counts is not None
        undeclared = field == "injection"
        assert counts.total == (None if undeclared else sum(map(math.prod, shapes.values())))


# ------------------------------------------------------------------------------------ differences


def test_models_that_differ_in_their_ends_differ_in_a_handful_of_lines() -> None:
    old = load_spec("word_problem_s3", SANDWICH)
    new = load_spec("word_problem_s3", [*SANDWICH[:-2], "model.injection.kind=attractor", "phases=[]"])
    found = {change.path[1:]: (change.old, change.new) for change in changes(old, new)}
    assert found[("injection", "kind")] == ("diagonal", "attractor")
    assert len(found) == 2  # the kind, and the field that only one kind has


def test_unset_fields_of_a_new_section_are_no_differences() -> None:
    old = load_spec("word_problem_s3", ["phases=[]"])
    new = load_spec("word_problem_s3", ["phases=[]", "model.prelude={n_layers: 2}"])
    assert [(change.path, change.new) for change in changes(old, new)] == [
        (("model", "prelude", "n_layers"), "2")
    ]

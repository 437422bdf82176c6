"""Components' specs: bounds, round trips, and combinations that are rejected."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import Field

from implicit_blocks import registry
from implicit_blocks.specs import (
    AndersonSpec,
    AtEvaluation,
    AttentionSpec,
    BroydenSpec,
    ComponentSpec,
    ExplicitLMSpec,
    GradientSpec,
    ImplicitFunctionSpec,
    ImplicitLMSpec,
    JacobianPenaltySpec,
    Mamba2Spec,
    ModelSpec,
    PhantomSpec,
    PicardSpec,
    SolverSpec,
    SpecError,
    Stopping,
    StoppingOverrides,
    SwiGLUSpec,
    UnrolledSpec,
)
from implicit_blocks.specs.base import Spec

counts = st.integers(1, 10_000)
damping = st.floats(0, 1, exclude_min=True)
tolerance = st.floats(0, 1e6)
norm = st.sampled_from(["relative", "absolute"])
scope = st.sampled_from(["sequence", "prefix"])
solvers = st.one_of(
    st.builds(PicardSpec, damping=damping, undamped_first=st.booleans()),
    st.builds(AndersonSpec, memory=counts, damping=damping, regularization=tolerance),
    st.builds(BroydenSpec, memory=counts),
)
stoppings = st.builds(Stopping, tolerance=tolerance, max_iterations=counts, norm=norm, scope=scope)
gradients = st.one_of(
    st.builds(PhantomSpec, steps=counts, damping=damping),
    st.builds(UnrolledSpec, steps=counts, checkpointing=st.booleans()),
    st.builds(
        ImplicitFunctionSpec,
        solver=solvers,
        stopping=st.builds(Stopping, tolerance=tolerance, max_iterations=counts),
    ),
)
evaluations = st.builds(
    AtEvaluation,
    solver=solvers,
    stopping=st.builds(
        StoppingOverrides,
        tolerance=st.none() | tolerance,
        max_iterations=st.none() | counts,
        norm=st.none() | norm,
        scope=st.none() | scope,
    ),
)
shared: dict[str, Any] = {
    "vocab_size": counts,
    "pad_vocab_to": st.integers(1, 128),
    "d_model": st.sampled_from([64, 128, 256]),
    "n_layers": counts,
    "mixer": st.one_of(
        st.builds(Mamba2Spec, d_state=counts, head_dim=st.sampled_from([32, 64])),
        st.builds(AttentionSpec, n_heads=st.just(8), n_kv_heads=st.sampled_from([None, 1, 2, 8])),
    ),
    "mlp": st.none() | st.builds(SwiGLUSpec, d_ff=counts),
    "dropout": st.floats(0, 1, exclude_max=True),
}
models = st.one_of(
    st.builds(ExplicitLMSpec, **shared),
    st.builds(
        ImplicitLMSpec,
        **shared,
        z_init=st.sampled_from(["zeros", "embedding"]),
        solver=solvers,
        gradient=gradients,
        stopping=stoppings,
        at_evaluation=evaluations,
    ),
)


@settings(max_examples=60)
@given(models)
def test_a_model_spec_round_trips_through_python_and_json(spec: ModelSpec) -> None:
    assert ModelSpec.model_validate(spec.model_dump()) == spec
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec
    assert hash(ModelSpec.model_validate(spec.model_dump())) == hash(spec)


@settings(max_examples=60)
@given(stoppings, evaluations)
def test_evaluation_inherits_stopping_fields_that_it_does_not_override(
    training: Stopping, evaluation: AtEvaluation
) -> None:
    overrides, rule = evaluation.stopping, evaluation.stopping.over(training)
    for name in ("tolerance", "norm"):
        assert getattr(rule, name) == (
            getattr(training, name) if getattr(overrides, name) is None else getattr(overrides, name)
        )
    assert rule.max_iterations == (overrides.max_iterations or 4 * training.max_iterations)
    assert rule.scope == (overrides.scope or "prefix")


@pytest.mark.parametrize(
    ("spec", "fields", "message"),
    [
        (PicardSpec, {"damping": 0}, "greater than 0"),
        (PicardSpec, {"damping": 1.5}, "less than or equal to 1"),
        (AndersonSpec, {"memory": 0}, "greater than 0"),
        (AndersonSpec, {"regularization": -1e-6}, "greater than or equal to 0"),
        (BroydenSpec, {"memory": 0}, "greater than 0"),
        (JacobianPenaltySpec, {"weight": 0.0}, "greater than 0"),
        (JacobianPenaltySpec, {"gradient": {"kind": "unrolled"}}, "at a fixed point"),
        (Stopping, {"tolerance": -0.1}, "greater than or equal to 0"),
        (Stopping, {"tolerance": float("nan")}, "finite"),
        (Stopping, {"max_iterations": 0}, "greater than 0"),
        (Stopping, {"scope": "batch"}, "'sequence' or 'prefix'"),
        (PhantomSpec, {"steps": 0}, "greater than 0"),
        (UnrolledSpec, {"steps": 2.5}, "integer"),
        (ImplicitFunctionSpec, {"stopping": {"scope": "prefix"}}, "couples tokens backwards"),
        (Mamba2Spec, {"dt_min": 0.5}, "dt_min 0.5 is above dt_max 0.1"),
        (Mamba2Spec, {"chunk_size": 0}, "greater than 0"),
        (Mamba2Spec, {"a_max": 1e300}, "less than or equal to"),
        (AttentionSpec, {"n_heads": 8, "n_kv_heads": 3}, "n_heads 8 is not divisible by n_kv_heads 3"),
        (PicardSpec, {"dampng": 0.5}, "unknown key 'dampng'; did you mean 'damping'"),
        (PicardSpec, {"kind": "anderson"}, "'picard'"),
    ],
)
def test_invalid_fields_are_rejected(spec: type[ComponentSpec], fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        spec(**fields)


def model(**fields: Any) -> ImplicitLMSpec:
    return ImplicitLMSpec(
        **{"vocab_size": 6, "d_model": 64, "n_layers": 1, "mixer": {"kind": "mamba2"}, **fields}
    )


@pytest.mark.parametrize(
    ("fields", "place", "message"),
    [
        (
            {"mixer": {"kind": "mamba2", "head_dim": 48}},
            ("mixer",),
            "= 2 * 64 = 128 is not divisible by head_dim 48",
        ),
        (
            {"d_model": 100, "mixer": {"kind": "attention", "n_heads": 12}},
            ("mixer",),
            "choose a multiple of 12",
        ),
        ({"d_model": 60, "mixer": {"kind": "attention", "n_heads": 12}}, ("mixer",), "60 / 12 = 5 is odd"),
        ({"vocab_size": 0}, ("vocab_size",), "greater than 0"),
        ({"n_layers": 0}, ("n_layers",), "has no layers"),
        ({"dropout": 1}, ("dropout",), "less than 1"),
        ({"mixer": "mamba2"}, ("mixer",), "should be a mapping such as {kind: mamba2}"),
        ({"mixer": 3}, ("mixer",), "should be a mapping such as {kind: …}"),
        ({"mixer": {"d_state": 3}}, ("mixer",), "has no kind"),
        ({"solver": {"kind": 3}}, ("solver",), "has no kind"),
        ({"solver": {"kind": "picad"}}, ("solver", "kind"), "did you mean 'picard'"),
        (
            {"gradient": {"kind": "implicit_function", "solver": {"dampin": 1}}},
            ("gradient", "solver", "dampin"),
            "damping",
        ),
        (
            {"at_evaluation": {"stopping": {"max_iteration": 3}}},
            ("at_evaluation", "stopping", "max_iteration"),
            "max_iterations",
        ),
    ],
)
def test_errors_have_the_location_of_the_entry(
    fields: dict[str, Any], place: tuple[str, ...], message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        model(**fields)
    [error] = caught.value.errors()
    assert error["loc"] == place
    assert message in error["msg"]


def test_all_unknown_keys_are_reported() -> None:
    with pytest.raises(SpecError) as caught:
        model(solvr={}, gradeint={})
    assert [error["loc"] for error in caught.value.errors()] == [("solvr",), ("gradeint",)]


def test_an_invalid_entry_does_not_make_a_list_too_short() -> None:
    mixers: list[Any] = [{"kind": "mamba2"}, {"kind": "attention"}]
    with pytest.raises(SpecError) as caught:
        model(mixer={"kind": "hybrid", "mixers": mixers})
    assert [error["loc"][-2:] for error in caught.value.errors()] == [(1, "n_heads")]
    with pytest.raises(SpecError, match="at least 2 items"):
        model(mixer={"kind": "hybrid", "mixers": mixers[:1]})


def test_a_mapping_without_kind_overrides_fields_of_the_default() -> None:
    spec = model(
        solver={"undamped_first": True},
        gradient={"kind": "implicit_function", "stopping": {"tolerance": 1e-6}},
        at_evaluation={"solver": {"undamped_first": True}},
    )
    assert spec.solver == PicardSpec(undamped_first=True)
    assert spec.gradient == ImplicitFunctionSpec(stopping=Stopping(tolerance=1e-6, max_iterations=64))
    assert spec.at_evaluation.solver == PicardSpec(damping=0.8, undamped_first=True)
    assert model(at_evaluation={"solver": {"kind": "picard"}}).at_evaluation.solver == PicardSpec(damping=1)


def test_specs_are_frozen() -> None:
    with pytest.raises(SpecError, match="frozen"):
        model().d_model = 3


def test_model_copy_validates_its_changes() -> None:
    spec = ImplicitLMSpec(vocab_size=10, d_model=32, n_layers=1, mixer=AttentionSpec(n_heads=4))
    copied = spec.model_copy(update={"d_model": 64})
    assert copied == ImplicitLMSpec(vocab_size=10, d_model=64, n_layers=1, mixer=AttentionSpec(n_heads=4))
    assert copied.model_fields_set == spec.model_fields_set
    assert spec.model_copy() == spec
    with pytest.raises(SpecError, match="unknown key 'solvr'; did you mean 'solver'"):
        spec.model_copy(update={"solvr": PicardSpec()})
    with pytest.raises(SpecError, match="d_model 30 is not divisible by n_heads 4"):
        spec.model_copy(update={"d_model": 30})


def test_the_vocabulary_is_padded_to_a_multiple() -> None:
    assert model(vocab_size=50277, pad_vocab_to=16).padded_vocab_size == 50288
    assert model(vocab_size=50277).padded_vocab_size == 50277


class RowwiseSpec(SolverSpec):
    couples_tokens: ClassVar[bool] = True
    kind: Literal["test.rowwise"] = "test.rowwise"


class ThirdPartyGradientSpec(GradientSpec):
    differentiates_solver: ClassVar[bool] = True
    kind: Literal["test.through"] = "test.through"


@pytest.mark.usefixtures("fresh_registry")
class TestRejectedCombinations:
    def test_unrolling_a_solver_that_is_not_differentiable(self) -> None:
        registry.add("solver", RowwiseSpec, "m:f", owner="test")
        registry.add("gradient", ThirdPartyGradientSpec, "m:f", owner="test")
        for gradient in ("unrolled", "test.through"):
            with pytest.raises(SpecError, match=r"solver 'test.rowwise' is not differentiable; choose"):
                model(solver={"kind": "test.rowwise"}, gradient={"kind": gradient})
            model(solver={"kind": "anderson"}, gradient={"kind": gradient})

    def test_a_solver_that_couples_tokens_with_scope_prefix(self) -> None:
        registry.add("solver", RowwiseSpec, "m:f", owner="test")
        rowwise = {"kind": "test.rowwise"}
        model(solver=rowwise)
        with pytest.raises(SpecError, match=r"set stopping.scope to 'sequence'"):
            model(solver=rowwise, stopping={"scope": "prefix"})
        with pytest.raises(SpecError, match=r"set at_evaluation.stopping.scope to 'sequence'"):
            model(at_evaluation={"solver": rowwise})
        model(at_evaluation={"solver": rowwise, "stopping": {"scope": "sequence"}})


@pytest.mark.parametrize(
    ("gradient", "iterations", "passes"),
    [
        (PhantomSpec(steps=1), 4, 7),
        (UnrolledSpec(steps=8), 32, 24),
        (UnrolledSpec(steps=8, checkpointing=True), 32, 32),
        (ImplicitFunctionSpec(stopping=Stopping(max_iterations=10)), 5, 18),
    ],
)
def test_gradients_count_forward_equivalents(gradient: GradientSpec, iterations: int, passes: int) -> None:
    assert gradient.forward_equivalents(iterations) == passes


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PicardSpec(damping=2), "PicardSpec: damping: should be less than or equal to 1; got 2"),
        (
            lambda: PicardSpec.model_validate({"damping": "x"}),
            "PicardSpec: damping: should be a valid number, ",
        ),
        (lambda: PicardSpec().model_copy(update={"damping": 2}), "PicardSpec: damping: should be less than"),
        (
            lambda: Mamba2Spec(chunk_size=10**5000),
            "Mamba2Spec: chunk_size: outside the range of 64-bit integers; choose a smaller",
        ),
        (
            lambda: ImplicitFunctionSpec(stopping={"max_iterations": 2**64}),
            "ImplicitFunctionSpec: stopping.max_iterations: outside the range of 64-bit integers",
        ),
    ],
)
def test_errors_in_python_have_the_format_of_errors_in_files(make: Any, message: str) -> None:
    with pytest.raises(SpecError) as caught:
        make()
    assert str(caught.value).startswith(message)
    assert "pydantic" not in str(caught.value)
    assert "\n" not in str(caught.value)


class _Numbers(Spec):
    count: int | None = None
    share: float | Literal["auto"] = "auto"
    shares: tuple[Annotated[float, Field(gt=0)], ...] = ()
    switch: bool | int = False
    anything: Any = None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": True}, "count: should be a valid integer; got True"),
        ({"count": False}, "count: should be a valid integer; got False"),
        ({"share": True}, "share: should be a valid number; got True"),
        ({"shares": [0.5, True]}, "shares: should be a valid number; got True"),
    ],
)
def test_fields_of_numbers_refuse_booleans(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        _Numbers(**fields)


def test_fields_that_accept_booleans_keep_them() -> None:
    spec = _Numbers(count=1, share=1, shares=(1, 0.5), switch=True, anything=[True])
    assert (spec.switch, spec.anything, spec.shares) == (True, [True], (1.0, 0.5))
    assert spec.switch is True


def test_models_refuse_booleans_as_numbers() -> None:
    with pytest.raises(SpecError, match="ImplicitLMSpec: n_layers: should be a valid integer; got True"):
        ImplicitLMSpec(vocab_size=8, d_model=16, n_layers=True, mixer=Mamba2Spec())
    with pytest.raises(SpecError, match="Stopping: tolerance: should be a valid number; got True"):
        Stopping(tolerance=True)

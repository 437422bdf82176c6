"""The run spec: phases, spans, and consistency of its sections."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from implicit_blocks.specs import (
    ImplicitFunctionSpec,
    PhantomSpec,
    PicardSpec,
    SpecError,
    UnrolledSpec,
    merge,
)
from trainer.specs.run import RunSpec, TokensSpec, WordProblemSpec
from trainer.specs.training import steps_of

BASE: dict[str, Any] = {
    "model": {"kind": "implicit_lm", "d_model": 64, "n_layers": 1, "mixer": {"kind": "mamba2"}},
    "data": {"kind": "word_problem", "group": "S3", "seq_len": 32},
    "training": {"max_steps": 100, "batch_size": 8, "optimizer": {"kind": "adamw", "learning_rate": 1e-3}},
}


def run(**changes: Any) -> RunSpec:
    return RunSpec.model_validate(merge(BASE, changes))


def refused(message: str, **changes: Any) -> None:
    with pytest.raises(SpecError, match=message):
        run(**changes)


def test_a_run_without_phases_has_one_phase() -> None:
    spec = run()
    assert spec.phase_specs() == [("train", 0, 100, spec.model, spec.training, spec.data)]


def test_phases_merge_into_the_sections_of_the_run() -> None:
    spec = run(
        model={"solver": {"kind": "picard", "damping": 0.5}, "gradient": {"kind": "phantom", "damping": 0.7}},
        phases=[
            {"name": "unrolled", "until": 10, "model": {"gradient": {"kind": "unrolled", "steps": 8}}},
            {
                "name": "bounded",
                "until": 0.8,
                "model": {"gradient": {"steps": 1}, "stopping": {"max_iterations": 4}},
            },
            {"name": "free", "training": {"max_grad_norm": None, "optimizer": {"learning_rate": 1e-4}}},
        ],
    )
    first, second, third = spec.phase_specs()
    assert [phase[:3] for phase in (first, second, third)] == [
        ("unrolled", 0, 10),
        ("bounded", 10, 80),
        ("free", 80, 100),
    ]
    assert first.model.gradient == UnrolledSpec(steps=8)
    assert first.model.solver == PicardSpec(damping=0.5)
    assert second.model.gradient == PhantomSpec(steps=1, damping=0.7)
    assert second.model.stopping.max_iterations == 4
    assert third.model == spec.model
    assert (third.training.max_grad_norm, third.training.optimizer.learning_rate) == (None, 1e-4)
    assert third.training.optimizer.betas == (0.9, 0.95)
    assert second.training == spec.training


def test_a_phase_of_loops_sets_the_windows_of_the_run_to_null() -> None:
    loops = {"gradient": {"kind": "last_loops"}, "window_length": None}
    phases = [{"name": "loops", "until": 10, "model": loops}, {"name": "search"}]
    first, second = run(model={"window_length": 16}, phases=phases).phase_specs()
    assert (first.model.window_length, second.model.window_length) == (None, 16)
    del loops["window_length"]
    refused("phases.0.model.window_length: .*no search", model={"window_length": 16}, phases=phases)


@given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=6, unique=True).map(sorted), st.integers(7, 1000))
def test_phases_given_as_shares_cover_the_run(shares: list[float], steps: int) -> None:
    phases = [{"name": str(share), "until": share} for share in shares]
    spec = run(training={"max_steps": steps}, phases=[*phases, {"name": "rest"}])
    planned = spec.phase_specs()
    assert planned[0].first_step == 0
    assert planned[-1].last_step == steps
    assert all(phase.first_step < phase.last_step for phase in planned)
    assert all(left.last_step == right.first_step for left, right in pairwise(planned))


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        ([{"name": "a"}, {"name": "b"}], "only the last phase may omit until"),
        ([{"name": "a", "until": 50}], "the last phase ends at step 50 of 100; omit until"),
        (
            [{"name": "a", "until": 100}, {"name": "b"}],
            "ends at step 100 of 100, so the next phase never starts",
        ),
        (
            [{"name": "a", "until": 50}, {"name": "b", "until": 50}, {"name": "c"}],
            "starts at step 50 but ends at 50",
        ),
        ([{"name": "a", "until": 0}, {"name": "b"}], "starts at step 0 but ends at 0"),
        (
            [{"name": "a", "until": 0.5}, {"name": "b", "until": 0.4}, {"name": "c"}],
            "phase 'b' ends at 0.4, but the previous phase ends at 0.5",
        ),
        (
            [{"name": "a", "until": 50}, {"name": "b", "until": 0.4}, {"name": "c"}],
            "phase 'b' ends at 0.4, but the previous phase ends at 50",
        ),
        ([{"name": "a", "until": 50}, {"name": "a"}], "phase names must be unique"),
        ([{"name": "a", "until": -1}, {"name": "b"}], "give a number of steps"),
        ([{"name": "a", "until": "half"}, {"name": "b"}], "give a number of steps"),
        (
            [{"name": "a", "model": {"d_model": 128}}],
            "a phase cannot change 'd_model' of a model of kind 'implicit_lm'",
        ),
        ([{"name": "a", "model": {"solvr": {}}}], "did you mean 'solver'"),
        ([{"name": "a", "model": {"kind": "explicit_lm"}}], "cannot change 'kind'"),
        ([{"name": "a", "model": {"solver": {"damping": 2}}}], "less than or equal to 1"),
        ([{"name": "a", "training": {"max_steps": 3}}], "cannot change 'max_steps' of training"),
        ([{"name": "a", "training": {"batch_size": 0}}], "greater than 0"),
        ([{"name": "a", "training": {"optimizer": {"eps": 3}}}], "cannot change 'eps' of the optimizer"),
        ([{"name": "a", "training": {"optimizer": {"learning_rate": 0}}}], "greater than 0"),
        ([{"name": "a", "training": {"optimizer": 3}}], "should be a mapping"),
        ([{"until": 3}], "is missing; add it"),
    ],
)
def test_invalid_phases_are_rejected(phases: list[Any], message: str) -> None:
    refused(message, phases=phases)


def test_more_phases_than_steps_are_rejected() -> None:
    refused(
        "2 phases don't fit into a run of 1 steps; use at least 2 steps",
        training={"max_steps": 1},
        phases=[{"name": "a", "until": 0.5}, {"name": "b"}],
    )


def test_phases_of_an_explicit_model() -> None:
    explicit = {**BASE["model"], "kind": "explicit_lm"}
    refused(
        "cannot change 'gradient' of a model of kind 'explicit_lm'; known: none",
        model=explicit,
        phases=[{"name": "a", "model": {"gradient": {"steps": 1}}}],
    )
    spec = run(model=explicit, phases=[{"name": "a", "training": {"max_grad_norm": 2}}])
    assert spec.phase_specs()[0].training.max_grad_norm == 2


def test_max_tokens_is_rounded_to_whole_steps() -> None:
    def steps(tokens: float) -> int:
        return run(training={"max_steps": None, "max_tokens": tokens}).total_steps

    assert (steps(1), steps(8 * 32), steps(8 * 32 + 1), steps(1e6)) == (1, 1, 2, 3907)


def test_the_shorter_of_two_lengths_applies() -> None:
    assert run(training={"max_steps": 2, "max_tokens": 1e6}).total_steps == 2
    assert run(training={"max_steps": 9, "max_tokens": 8 * 32}).total_steps == 1


def test_a_small_batch_is_one_micro_batch() -> None:
    training = run(training={"batch_size": 2, "micro_batch_size": 8}).training
    assert training.sequences_at_once == 2


def test_the_vocabulary_comes_from_the_data() -> None:
    assert run().model.vocab_size == 6
    assert run(data={"group": "A5", "monoid": "EABX"}).model.vocab_size == 240
    assert run(data={"monoid": [[0, 1], [1, 1]]}).model.vocab_size == 12
    assert run(model={"vocab_size": 8}).model.vocab_size == 8
    refused("the data have 6 token IDs; use 6 or more, or omit vocab_size", model={"vocab_size": 5})
    with pytest.raises(SpecError, match="vocab_size"):
        run(data={"kind": "tokens"})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": {"monoid": [[0, 1], [1]]}}, "not square"),
        ({"data": {"monoid": "XYZ"}}, "monoid 'XYZ' is not known"),
        ({"data": {"monoid": 3}}, "a monoid must be a name such as EABX"),
        ({"data": {"identity_probability": 1.1}}, "less than or equal to 1"),
        ({"data": {"draw_order": "quick"}}, "'fast' or 'published'"),
        ({"training": {"micro_batch_size": 3}}, "batch_size 8 is not divisible by micro_batch_size 3"),
        ({"training": {"optimizer": {"learning_rate": 0}}}, "greater than 0"),
        ({"training": {"optimizer": {"betas": [0.9]}}}, "is missing|at least 2"),
        ({"training": {"seed": 2**64}}, "outside the range of 64-bit integers"),
        (
            {"training": {"schedule": {"warmup": 60, "decay": 50}}},
            "a warmup of 60 steps and a decay of 50 don't fit",
        ),
        (
            {"training": {"schedule": {"kind": "warmup_linear", "warmup": 101}}},
            "a warmup of 101 steps doesn't fit",
        ),
        ({"training": {"schedule": {"warmup": True}}}, "give a number of steps"),
        ({"training": {"precision": "float16"}}, "'float32' or 'bfloat16'"),
        ({"evaluation": {"lengths": [5]}}, "the shortest evaluation length is 5 tokens; use 5 or less"),
        ({"evaluation": {"window_length": 0}}, "greater than 0"),
    ],
)
def test_inconsistent_settings_are_rejected(changes: dict[str, Any], message: str) -> None:
    refused(message, **changes)


def test_a_run_spec_round_trips_through_python_and_json() -> None:
    spec = run(
        model={"gradient": {"kind": "implicit_function"}},
        phases=[
            {"name": "a", "until": 0.5, "model": {"solver": {"kind": "anderson"}}},
            {"name": "b", "until": 1.0},
        ],
    )
    assert spec.model.gradient == ImplicitFunctionSpec()
    assert RunSpec.model_validate(spec.model_dump()) == spec
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_data_specs_provide_their_vocabulary_size() -> None:
    assert WordProblemSpec(group="A5xZ2", seq_len=8).vocab_size == 120
    assert TokensSpec().vocab_size is None


@pytest.mark.parametrize(("span", "steps"), [(0, 0), (1, 1), (1.0, 200), (0.25, 50), (7, 7), (0.0, 0)])
def test_integers_are_steps_and_floats_shares(span: float, steps: int) -> None:
    assert steps_of(span, 200) == steps

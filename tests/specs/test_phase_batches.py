"""Phases that end at a number of tokens, and phases with different batch sizes."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from implicit_blocks.specs import SpecError, merge
from trainer.specs.run import RunSpec

LENGTH = 32
BASE: dict[str, Any] = {
    "model": {"kind": "implicit_lm", "d_model": 64, "n_layers": 1, "mixer": {"kind": "mamba2"}},
    "data": {"kind": "word_problem", "group": "S3", "seq_len": LENGTH},
    "training": {"max_steps": 100, "batch_size": 8, "optimizer": {"kind": "adamw", "learning_rate": 1e-3}},
}


def run(*phases: dict[str, Any], **training: Any) -> RunSpec:
    named = [{"name": f"p{index}", **phase} for index, phase in enumerate(phases)]
    return RunSpec.model_validate(merge(BASE, {"training": training, "phases": named}))


def ends(spec: RunSpec) -> list[int]:
    return [phase.last_step for phase in spec.phase_specs()]


def batch(size: int, **more: Any) -> dict[str, Any]:
    return {"training": {"batch_size": size, **more}}


def tokens(spec: RunSpec) -> int:
    return spec.total_sequences * LENGTH


@pytest.mark.parametrize(
    ("until", "end"),
    [
        ("256 tokens", 1),
        ("257 tokens", 2),
        ("1 token", 1),
        ("5.12e3 tokens", 20),
        ("5_120 tokens", 20),
        ("5120tokens", 20),
        (20, 20),
        (0.2, 20),
    ],
)
def test_a_phase_ends_at_tokens_steps_or_a_share_of_the_run(until: Any, end: int) -> None:
    spec = run({"until": until}, {})
    assert ends(spec) == [end, 100]
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    "until", [2e9, "2e9", "0 tokens", "0.5 tokens", "1e-3 tokens", "1e99 tokens", "3 steps", "x tokens", True]
)
def test_a_number_of_tokens_needs_its_unit_and_must_be_whole(until: Any) -> None:
    with pytest.raises(SpecError, match=r"a whole number of tokens with its unit \(2e9 tokens\)"):
        run({"until": until}, {})


@pytest.mark.parametrize(
    ("phases", "message"),
    [
        (
            [{"until": "25600 tokens"}, {}],
            r"ends at step 100 \(25600 tokens\) of 100, so the next phase never starts",
        ),
        (
            [{"until": 50}, {"until": "12800 tokens"}, {}],
            r"starts at step 50 but ends at 50 \(12800 tokens\); end it later",
        ),
        ([{"until": "12800 tokens"}], r"the last phase ends at step 50 \(12800 tokens\) of 100; omit until"),
        (
            [{"until": 0.5}, batch(6, micro_batch_size=4)],
            "batch_size 6 is not divisible by micro_batch_size",
        ),
        ([{}, {}], "set a step, a share or a number of tokens"),
    ],
)
def test_phases_that_do_not_cover_the_run_are_rejected(phases: list[Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        run(*phases)


def test_tokens_are_counted_with_the_batch_size_of_each_phase() -> None:
    # 10 steps of 8, then 16 a step: 2560 + 5120 tokens by step 20.
    spec = run({"until": 10}, {"until": "7680 tokens", **batch(16)}, batch(4))
    assert ends(spec) == [10, 20, 100]
    assert spec.total_sequences == 10 * 8 + 10 * 16 + 80 * 4
    assert [phase.training.sequences_at_once for phase in spec.phase_specs()] == [8, 16, 4]


def test_a_run_with_max_tokens_ends_with_the_step_that_reaches_them() -> None:
    spec = run({"until": 10}, batch(16), max_steps=None, max_tokens=2560 + 512 * 5 + 1)
    assert ends(spec) == [10, 16]
    assert run({"until": "2560 tokens"}, batch(16), max_steps=None, max_tokens=7680).total_steps == 20
    # The shorter of two lengths applies, with and without phases.
    assert run({"until": 10}, batch(16), max_steps=12, max_tokens=1e6).total_steps == 12
    assert run(max_steps=None, max_tokens=257).total_steps == 2
    # The last phase may state the end of the run, also in tokens.
    assert ends(run({"until": 0.5}, {"until": "7680 tokens"}, max_steps=None, max_tokens=7680)) == [15, 30]


@given(
    st.lists(st.integers(1, 64), min_size=2, max_size=5),
    st.lists(st.floats(0.01, 0.99), min_size=4, max_size=4, unique=True).map(sorted),
    st.integers(200_000, 3_000_000),
)
def test_phases_with_any_batch_sizes_cover_the_tokens(
    sizes: list[int], shares: list[float], max_tokens: int
) -> None:
    phases = [{"until": share, **batch(size)} for share, size in zip(shares, sizes[:-1], strict=False)]
    spec = run(*phases, batch(sizes[-1]), max_steps=None, max_tokens=max_tokens)
    planned = spec.phase_specs()
    assert planned[0].first_step == 0
    assert all(left.last_step == right.first_step for left, right in pairwise(planned))
    assert all(phase.first_step < phase.last_step for phase in planned)
    assert max_tokens <= tokens(spec) < max_tokens + len(sizes) * max(sizes) * LENGTH


def test_the_batch_of_every_phase_must_be_divisible_by_the_ranks() -> None:
    spec = run({"until": 0.5}, {"name": "late", **batch(6)})
    spec.require_shares(2)
    with pytest.raises(ValueError, match=r"phase 'late': training.batch_size 6 is not divisible by 4"):
        spec.require_shares(4)


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({"warmup": "2560 tokens", "decay": "5120 tokens"}, (10, 20)),
        ({"warmup": "2561 tokens", "decay": "1 token"}, (11, 1)),
        ({"warmup": 0.1, "decay": 7}, (0.1, 7)),
    ],
)
def test_a_schedule_accepts_tokens(schedule: Any, steps: Any) -> None:
    spec = run(schedule={"kind": "warmup_constant_sqrt", **schedule})
    found: Any = spec.schedule_spec()
    assert (found.warmup, found.decay) == steps
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


def test_warm_up_and_decay_in_tokens_use_the_batches_of_their_phases() -> None:
    # 20 steps of 256 tokens, 60 of 1024, 20 of 4096
    phases = ({"until": 20}, {"until": 80, **batch(32)}, batch(128))
    schedule = {"kind": "warmup_constant_sqrt", "warmup": "7168 tokens", "decay": "86016 tokens"}
    found: Any = run(*phases, schedule=schedule).schedule_spec()
    assert (found.warmup, found.decay) == (20 + 2, 20 + 4)


def test_a_warm_up_longer_than_the_run_is_rejected() -> None:
    message = r"a warmup of 110 steps and a decay of 20 don't fit into 100 steps"
    with pytest.raises(SpecError, match=message):
        run(schedule={"kind": "warmup_constant_sqrt", "warmup": "28160 tokens"})
    with pytest.raises(SpecError, match="a warmup of 200 steps doesn't fit into 100 steps"):
        run(schedule={"kind": "warmup_linear", "warmup": "51200 tokens"})

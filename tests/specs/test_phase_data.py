"""Phases that change the data: longer or harder word problems."""

from __future__ import annotations

from typing import Any

import pytest

from implicit_blocks.specs import SpecError, merge
from trainer.estimate.dry_run import dry_run_report
from trainer.specs.run import RunSpec

BASE: dict[str, Any] = {
    "model": {"kind": "implicit_lm", "d_model": 64, "n_layers": 1, "mixer": {"kind": "mamba2"}},
    "data": {"kind": "word_problem", "group": "S3", "seq_len": 32},
    "training": {"max_steps": 100, "batch_size": 8, "optimizer": {"kind": "adamw", "learning_rate": 1e-3}},
    "phases": [
        {"name": "short", "until": 0.5, "data": {"seq_len": 4, "identity_probability": 0.2}},
        {"name": "long", "training": {"batch_size": 4}},
    ],
}


def test_a_phase_has_its_own_length_and_probability() -> None:
    short, long = RunSpec.model_validate(BASE).phase_specs()
    assert (short.data.seq_len, short.data.identity_probability) == (4, 0.2)  # type: ignore[attr-defined]  # the kind's own
    assert (long.data.seq_len, long.data.identity_probability) == (32, 0.5)  # type: ignore[attr-defined]  # the same
    spec = RunSpec.model_validate(BASE)
    assert spec.total_tokens == 50 * 8 * 4 + 50 * 4 * 32
    assert spec.total_sequences == 50 * 8 + 50 * 4


def test_tokens_are_counted_with_the_length_of_each_phase() -> None:
    spec = RunSpec.model_validate(
        merge(
            BASE,
            {
                "training": {"max_steps": None, "max_tokens": 1600 + 1280},
                "phases": [
                    {"name": "short", "until": "1600 tokens", "data": {"seq_len": 4}},
                    {"name": "long", "training": {"batch_size": 4}},
                ],
            },
        )
    )
    assert [phase.last_step for phase in spec.phase_specs()] == [50, 60]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group": "S4"}, "cannot change 'group' of data of kind 'word_problem'"),
        ({"seqlen": 4}, "did you mean 'seq_len'"),
        ({"seq_len": 0}, "greater than or equal to 1|greater than 0"),
        ({"identity_probability": 1.5}, "less than or equal to 1"),
    ],
)
def test_invalid_data_changes_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message) as caught:
        RunSpec.model_validate(merge(BASE, {"phases": [{"name": "a", "data": changes}]}))
    assert caught.value.errors()[0]["loc"][:3] == ("phases", 0, "data")


def test_a_phase_cannot_change_token_data() -> None:
    text = {"kind": "tokens", "seq_len": 16}
    with pytest.raises(SpecError, match="cannot change 'seq_len' of data of kind 'tokens'"):
        RunSpec.model_validate(
            merge(
                {**BASE, "data": text, "model": {**BASE["model"], "vocab_size": 8}},
                {"phases": [{"name": "a", "data": {"seq_len": 8}}]},
            )
        )


def test_the_dry_run_shows_the_data_of_each_phase() -> None:
    report = dry_run_report(RunSpec.model_validate(BASE), name="growing", rate="160")
    for line in (
        "8 x 4 = 32 tokens",
        "p = 0.2, length 4, generated on the fly",
        "4 x 32 = 128 tokens",
        "10s at 160 tokens/s",
        "40s at 160 tokens/s",
    ):
        assert line in report, report

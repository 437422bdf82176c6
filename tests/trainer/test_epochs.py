"""The length of a run in epochs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from implicit_blocks.specs import SpecError, load_spec
from trainer.estimate.dry_run import dry_run_report
from trainer.reporting.metrics import read_metrics
from trainer.run.build import build
from trainer.run.length import resolve_epochs
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]


@pytest.fixture
def tokens(tmp_path: Path) -> dict[str, Any]:
    """Return changes to a spec for text of 20 sequences of 12 tokens."""
    np.random.default_rng(0).integers(0, 7, 20 * 12 + 5).astype(np.uint16).tofile(tmp_path / "text.bin")
    data = {"kind": "tokens", "path": str(tmp_path / "text.bin"), "dtype": "uint16", "seq_len": 12}
    return {
        "data": data,
        "model.vocab_size": 7,
        "evaluation": {"last_tokens": 4},
        "training.max_steps": None,
        "training.epochs": 2,
    }


@pytest.mark.parametrize(("epochs", "steps"), [(2, 5), (0.5, 2), (1.2, 3), (1e-9, 1)])
def test_a_run_ends_with_the_step_that_completes_its_epochs(
    small: Small, tokens: dict[str, Any], epochs: float, steps: int
) -> None:
    resolved = resolve_epochs(small({**tokens, "training.epochs": epochs}))
    assert resolved.total_steps == steps
    assert resolved.training.epochs is None


def test_a_run_without_epochs_is_unchanged(small: Small) -> None:
    spec = small()
    assert resolve_epochs(spec) is spec


def test_phases_with_other_batches_share_the_epochs(small: Small, tokens: dict[str, Any]) -> None:
    phases = [
        {"name": "small", "until": 0.5, "training": {"batch_size": 4, "micro_batch_size": 4}},
        {"name": "large"},
    ]
    resolved = resolve_epochs(small({**tokens, "phases": phases}))
    assert 40 <= resolved.total_sequences < 48


def test_a_run_of_epochs_trains_and_resumes(small: Small, tokens: dict[str, Any], tmp_path: Path) -> None:
    spec = small(tokens)
    build(spec, output=tmp_path / "run", device="cpu").train(stop_at=2)
    summary = build(spec, output=tmp_path / "run", device="cpu", resume=True).train()
    assert summary is not None
    assert summary["steps"] == 5
    assert list(read_metrics(tmp_path / "run" / "metrics.jsonl"))[-1]["epoch"] == 2.0
    stored = load_spec(tmp_path / "run")
    assert isinstance(stored, RunSpec)
    assert (stored.training.max_tokens, stored.total_steps) == (480, 5)


def test_the_dry_run_converts_epochs(small: Small, tokens: dict[str, Any]) -> None:
    report = dry_run_report(small(tokens), name="text")
    assert "5 steps of 8 x 12 = 96 tokens, 480 tokens in total (2 epochs)" in report
    assert "the run takes 2.00 epochs" in report


def test_the_dry_run_counts_the_held_out_sequences(small: Small, tokens: dict[str, Any]) -> None:
    held_out = {"data.validation_path": tokens["data"]["path"], "evaluation.lengths": [6, 12, 24]}
    for most, words in ((32, "32, 20, 10 sequences each"), (10, "10 sequences each")):
        report = dry_run_report(small({**tokens, **held_out, "evaluation.sequences": most}), name="text")
        assert f"lengths 6, 12, 24; {words}" in report


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.max_steps": 5}, r"training\.epochs: .*also by max_steps=5; .*training\.max_steps=null"),
        ({"training.max_tokens": 9}, r"training\.epochs: .*also by max_tokens=9"),
        ({"training.epochs": None}, "give max_steps or max_tokens, or epochs"),
        ({"training.epochs": 0}, r"training\.epochs: .*greater than 0"),
        (
            {"data": {"kind": "word_problem", "group": "S3", "seq_len": 12}},
            r"training\.epochs: .*'word_problem' are endless .*got 2; set training\.max_steps",
        ),
    ],
    ids=["steps too", "tokens too", "none", "zero", "endless"],
)
def test_an_impossible_number_of_epochs_is_refused_with_its_place(
    small: Small, tokens: dict[str, Any], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        small({**tokens, **changes})


def test_epochs_of_changing_data_are_refused(small: Small, tmp_path: Path) -> None:
    phases = [{"name": "short", "until": 0.5, "data": {"seq_len": 6}}, {"name": "long"}]
    changes = {
        "data": {"kind": "catbabi", "path": str(tmp_path), "seq_len": 12},
        "model.vocab_size": 200,
        "training.max_steps": None,
        "training.epochs": 1,
        "phases": phases,
    }
    with pytest.raises(SpecError, match=r"phases\.0\.data: phase 'short' changes the data"):
        small(changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"training.schedule": {"kind": "wsd", "warmup": 6}}, "a warmup of 6 steps .* into 5 steps"),
        ({"training.ema": {"start": 5}}, "the run ends at step 5"),
    ],
    ids=["schedule", "average"],
)
def test_spans_longer_than_the_epochs_are_refused_before_the_run(
    small: Small, tokens: dict[str, Any], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SpecError, match=words):
        build(small({**tokens, **changes}), output=tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


def test_missing_data_are_named(small: Small, tokens: dict[str, Any]) -> None:
    spec = small({**tokens, "data": {**tokens["data"], "path": None}})
    with pytest.raises(ValueError, match=r"data\.path is not set"):
        resolve_epochs(spec)
    with pytest.raises(ValueError, match="epochs=2 depends on the data"):
        _ = spec.total_steps


def test_a_run_of_epochs_is_described_without_its_data(small: Small, tokens: dict[str, Any]) -> None:
    phases = [{"name": "bounded", "until": 0.8, "training": {"batch_size": 4}}, {"name": "free"}]
    titles = [title for title, _ in small({**tokens, "phases": phases}).phase_models()]
    assert titles == ["bounded: until 0.8 of the run", "free: to the end"]
    assert [title for title, _ in small(tokens).phase_models()] == ["training"]

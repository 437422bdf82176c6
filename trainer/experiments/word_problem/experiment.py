"""Word problems: the layers needed per length (Figure 1), and training with rare hard tokens (Figure 3).

M. Schöne et al., "Implicit Language Models are RNNs", ICML 2025. Accuracy is measured at convergence, over
the last tokens of each sequence, and reported with the residuals and the fraction that converged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer.experiments.common.checks import reject_option_conflicts
from trainer.experiments.word_problem import hard_tokens, layers
from trainer.experiments.word_problem.settings import SETTINGS, changed

# Options of a single study; options that apply to existing runs.
STUDY_OPTIONS = {
    "layers": ("models", "layers", "threshold"),
    "hard-tokens": ("iterations", "token_iterations"),
}
TEST_OPTIONS = ("test_p", "test_lengths", "sequences", "token_iterations")
# Spec fields that command-line options set: of the tests, of training.
SET_BY_TEST_OPTIONS = {
    "evaluation.identity_probabilities": "--test-p",
    "evaluation.lengths": "--test-lengths",
    "evaluation.sequences": "--sequences",
}
SET_BY_RUN_OPTIONS = {
    "data.group": "--groups",
    "data.seq_len": "--lengths",
    "model.n_layers": "--layers",
    "training.seed": "--seeds",
}


def run(
    folder: Path,
    *,
    study: str = "layers",
    setting: str = "laptop",
    device: str = "auto",
    overrides: Sequence[str] = (),
    checkpoints: Sequence[Path] = (),
    **changes: Any,
) -> str:
    """Train and test the runs of a study, write ``word_problem.json`` and ``.png``, return a summary.

    Args:
        folder: output directory, created if missing. Runs are stored in its ``runs``; finished ones are read
            instead of trained, so an interrupted study is resumed by the same command.
        study: ``layers`` or ``hard-tokens``.
        setting: ``laptop`` (minutes) or ``gpu``.
        device: name of the device.
        overrides: changes to every run's spec.
        checkpoints: of ``hard-tokens``: existing runs to test instead of training.
        changes: fields of `Settings`; None: that of the setting.

    Raises:
        ValueError: an unknown study or setting, an invalid value, or a change without an effect.

    """
    if (study, setting) not in SETTINGS:
        known = ", ".join(f"{one} {other}" for one, other in SETTINGS)
        raise ValueError(f"unknown study {study!r} with setting {setting!r}; known: {known}")
    if study == "layers" and checkpoints:
        raise ValueError("the study layers trains its models; --checkpoints requires --study hard-tokens")
    _reject_unused(study, [n for n, v in changes.items() if v is not None], bool(checkpoints))
    reject_option_conflicts(
        overrides, SET_BY_TEST_OPTIONS if checkpoints else {**SET_BY_TEST_OPTIONS, **SET_BY_RUN_OPTIONS}
    )
    settings = changed(SETTINGS[study, setting], changes)
    # The overrides of a setting apply only to runs that it trains.
    own = () if checkpoints else settings.overrides
    settings = replace(settings, overrides=(*own, *overrides))
    if study == "layers":
        return layers.run(folder, settings, device=device)
    return hard_tokens.run(folder, settings, device=device, checkpoints=checkpoints)


def _reject_unused(study: str, given: Sequence[str], trained: bool) -> None:
    for other, names in STUDY_OPTIONS.items():
        if other != study and (unused := [name for name in names if name in given]):
            raise ValueError(
                f"{_options(unused)} has no effect in the study {study}; omit it, or use --study {other}"
            )
    if trained and (unused := [name for name in given if name not in TEST_OPTIONS]):
        raise ValueError(
            f"{_options(unused)} has no effect on existing runs; omit it, or omit --checkpoints. Options "
            f"of the tests: {_options(TEST_OPTIONS)}"
        )


def _options(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)

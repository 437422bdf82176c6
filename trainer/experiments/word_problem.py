"""Word problems: Figure 1, the least layers that solve each length, and Figure 3, rare hard tokens.

M. Schöne et al., "Implicit Language Models are RNNs", ICML 2025. Accuracy is read where the search has
converged, over the last tokens of each sequence, with residuals and the share that converged beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from trainer.data import groups as algebra
from trainer.experiments.run_options import refuse_taken, require_once
from trainer.experiments.word_problem_specs import require_model


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What a study varies, and what it keeps.

    ``spec`` is the run that is varied; ``models``, ``layers`` (of explicit ones; an implicit model has one),
    ``threshold`` (the accuracy that counts as solved) belong to Figure 1. ``iterations`` (of training) belong
    to Figure 3, and ``token_iterations``, of one token's search at most in sequential mode (None: as many as
    of a whole sequence): a model that doesn't settle would take all of them at each token. ``lengths`` and
    ``train_p`` are of training (None: as the spec's phases say), ``test_lengths`` multiples of the training
    length, ``test_p`` identity probabilities. ``overrides`` are further changes to every run's spec.
    """

    spec: str
    groups: tuple[str, ...]
    models: tuple[str, ...] = ("implicit-mamba2",)
    layers: tuple[int, ...] = (1,)
    lengths: tuple[int, ...]
    threshold: float = 0.9
    iterations: tuple[int, ...] = (32,)
    token_iterations: int | None = None
    train_p: float | None = None
    test_p: tuple[float, ...] = (0.5, 0.0)
    test_lengths: tuple[int, ...] = (1, 4)
    sequences: int
    seeds: tuple[int, ...] = (0,)
    overrides: tuple[str, ...] = ()

    def tests(self, length: int) -> dict[str, Any]:
        """Return what they say of a run's `evaluation` section, for a training length."""
        return {
            "lengths": [times * length for times in self.test_lengths],
            "identity_probabilities": list(self.test_p),
            "sequences": self.sequences,
            "last_tokens": min(10, length),
        }

    def require(self) -> None:
        """Refuse what is out of range.

        Raises:
            ValueError: says what, and what to give.

        """
        for name in (
            "groups",
            "models",
            "layers",
            "lengths",
            "iterations",
            "test_p",
            "test_lengths",
            "seeds",
        ):
            given = getattr(self, name)
            if not given:
                raise ValueError(f"{name} are none; give one or more")
            require_once(name, given)
        for name in ("layers", "lengths", "iterations", "test_lengths"):
            for value in getattr(self, name):
                if value < 1:
                    raise ValueError(f"{name}: {value} is too small; give numbers from 1 up")
        for name, number in (("sequences", self.sequences), ("token_iterations", self.token_iterations)):
            if number is not None and number < 1:
                raise ValueError(f"{name} is {number}; give 1 or more")
        for p in (*self.test_p, *(() if self.train_p is None else (self.train_p,))):
            if not 0 <= p <= 1:
                raise ValueError(f"p = {p:g} is no probability; give numbers from 0 to 1")
        if not (math.isfinite(self.threshold) and 0 < self.threshold <= 1):
            raise ValueError(f"threshold is {self.threshold:g}; give an accuracy above 0, at most 1")
        for group in self.groups:
            algebra.group_order(group)
        for model in self.models:
            require_model(model)


SETTINGS: dict[tuple[str, str], Settings] = {
    ("layers", "laptop"): Settings(
        spec="word_problem_s3_curriculum",
        groups=("S3",),
        models=("implicit-mamba2", "mamba2", "llama"),
        layers=(1, 2),
        lengths=(4, 8, 16),
        train_p=0.0,
        test_p=(0.0, 0.5),
        sequences=128,
    ),
    ("layers", "gpu"): Settings(
        spec="word_problem_a5",
        groups=("A5", "S5"),
        models=("implicit-mamba2", "mamba2", "implicit-llama", "llama"),
        layers=(1, 2, 4, 8, 16),
        lengths=(2, 4, 8, 16, 32),
        test_p=(0.0, 0.5),
        sequences=1024,
        # The curriculum's rare hard tokens are kept, for all models; it ends with hard tokens alone.
        overrides=("data.identity_probability=0.0",),
    ),
    ("hard-tokens", "laptop"): Settings(
        spec="word_problem_s3_rare",
        groups=("S3",),
        lengths=(32,),
        iterations=(2, 16),
        train_p=0.9,
        test_p=(0.9, 0.5),
        test_lengths=(1,),
        sequences=32,
        overrides=("model.at_evaluation.stopping.max_iterations=300",),
    ),
    ("hard-tokens", "gpu"): Settings(
        spec="word_problem_a5_rare",
        groups=("A5",),
        lengths=(64,),
        iterations=(1, 2, 4, 8, 16, 32),
        train_p=0.9,
        test_p=(0.9, 0.5, 0.0),
        test_lengths=(1,),
        sequences=256,
        token_iterations=64,
    ),
}


# What only one study varies; and what can be said of runs that are trained already.
OF_STUDY = {"layers": ("models", "layers", "threshold"), "hard-tokens": ("iterations", "token_iterations")}
OF_TESTS = ("test_p", "test_lengths", "sequences", "token_iterations")
# What options of the command say of the specs: of their tests, of their training.
SAID_OF_TESTS = {
    "evaluation.identity_probabilities": "--test-p",
    "evaluation.lengths": "--test-lengths",
    "evaluation.sequences": "--sequences",
}
SAID_OF_RUNS = {
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
    """Train and test what a study compares, write ``word_problem.json`` and ``.png``, return a summary.

    Args:
        folder: made where it is missing. The runs are in its folder ``runs``; those that are finished there
            are read, not trained again, so that an interrupted study is gone on with by the same command.
        study: ``layers`` or ``hard-tokens``.
        setting: ``laptop`` (minutes) or ``gpu``.
        device: name of the device.
        overrides: changes to every run's spec.
        checkpoints: of ``hard-tokens``: trained runs to test; nothing is trained then.
        changes: fields of :class:`Settings`; None: the setting's.

    Raises:
        ValueError: no such study or setting, values out of range, or changes that would change nothing.

    """
    if (study, setting) not in SETTINGS:
        known = ", ".join(f"{one} {other}" for one, other in SETTINGS)
        raise ValueError(f"no study {study!r} in the setting {setting!r}; there are {known}")
    if study == "layers" and checkpoints:
        raise ValueError("the study layers trains its models; checkpoints are tested by hard-tokens")
    _refuse_what_changes_nothing(study, [n for n, v in changes.items() if v is not None], bool(checkpoints))
    refuse_taken(overrides, SAID_OF_TESTS if checkpoints else {**SAID_OF_TESTS, **SAID_OF_RUNS})
    settings = changed(SETTINGS[study, setting], changes)
    # A run that is trained already is what it is: a setting's changes are for the runs that it trains.
    own = () if checkpoints else settings.overrides
    settings = replace(settings, overrides=(*own, *overrides))
    if study == "layers":
        from trainer.experiments.word_problem_layers import carry_out

        return carry_out(folder, settings, device=device)
    from trainer.experiments.word_problem_hard_tokens import carry_out as train_and_test

    return train_and_test(folder, settings, device=device, checkpoints=checkpoints)


def _refuse_what_changes_nothing(study: str, given: Sequence[str], trained: bool) -> None:
    for other, names in OF_STUDY.items():
        if other != study and (unused := [name for name in names if name in given]):
            raise ValueError(
                f"{_options(unused)} would change nothing in the study {study}; "
                f"leave out, or give --study {other}"
            )
    if trained and (unused := [name for name in given if name not in OF_TESTS]):
        raise ValueError(
            f"{_options(unused)} would change nothing of runs that are trained; leave out, or leave out "
            f"--checkpoints. Of tests there are {_options(OF_TESTS)}"
        )


def _options(names: Sequence[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    """Return the settings with those changes that are not None, checked."""
    given = {name: value for name, value in changes.items() if value is not None}
    if unknown := sorted(set(given) - {field.name for field in fields(Settings)}):
        raise ValueError(f"settings {', '.join(unknown)} are not known")
    fitting: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in given.items()}
    made = replace(settings, **fitting)
    made.require()
    return made

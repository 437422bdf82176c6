"""Settings of the word-problem studies, and their defaults on a laptop and on a GPU. Imports no torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from trainer.experiments.common.checks import require_once
from trainer.experiments.word_problem.specs import require_model
from trainer.specs import groups as algebra


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Variables and constants of a study.

    ``spec`` is the base run. ``models``, ``layers`` (of explicit models; an implicit model has one) and
    ``threshold`` (accuracy at which a length is solved) belong to Figure 1. ``iterations`` (of training) and
    ``token_iterations`` belong to Figure 3; the latter is the maximum per token in sequential mode (None:
    that of a whole sequence), because a model that does not converge would take the maximum at every token.
    ``lengths`` and ``train_p`` are those of training (None: that of the spec's phases), ``test_lengths``
    multiples of the training length, ``test_p`` identity probabilities. ``overrides`` are further changes to
    every run's spec.
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
        """Return the changes to a run's `evaluation` section, for a training length."""
        return {
            "lengths": [times * length for times in self.test_lengths],
            "identity_probabilities": list(self.test_p),
            "sequences": self.sequences,
            "last_tokens": min(10, length),
        }

    def require(self) -> None:
        """Reject invalid values.

        Raises:
            ValueError: names the value and the valid range.

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
            values = getattr(self, name)
            if not values:
                raise ValueError(f"{name} must not be empty")
            require_once(name, values)
        for name in ("layers", "lengths", "iterations", "test_lengths"):
            for value in getattr(self, name):
                if value < 1:
                    raise ValueError(f"{name} must be at least 1, got {value}")
        for name, number in (("sequences", self.sequences), ("token_iterations", self.token_iterations)):
            if number is not None and number < 1:
                raise ValueError(f"{name} must be at least 1, got {number}")
        for p in (*self.test_p, *(() if self.train_p is None else (self.train_p,))):
            if not 0 <= p <= 1:
                raise ValueError(f"p must be from 0 to 1, got {p:g}")
        if not (math.isfinite(self.threshold) and 0 < self.threshold <= 1):
            raise ValueError(f"threshold must be above 0 and at most 1, got {self.threshold:g}")
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
        # The curriculum keeps its rare hard tokens for all models and ends with hard tokens only.
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


def changed(settings: Settings, changes: dict[str, Any]) -> Settings:
    """Return the settings with those changes that are not None, validated."""
    changed = {name: value for name, value in changes.items() if value is not None}
    if unknown := sorted(set(changed) - {field.name for field in fields(Settings)}):
        raise ValueError(f"unknown settings: {', '.join(unknown)}")
    fitting: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in changed.items()}
    adapted = replace(settings, **fitting)
    adapted.require()
    return adapted

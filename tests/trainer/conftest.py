"""A small run that every test of the trainer can vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import pytest

from trainer.spec import RunSpec

SMALL: dict[str, Any] = {
    "model": {
        "kind": "implicit_lm",
        "d_model": 16,
        "n_layers": 1,
        "mixer": {"kind": "mamba2", "d_state": 8, "head_dim": 8, "chunk_size": 8},
        "gradient": {"kind": "phantom", "steps": 1, "damping": 0.8},
        "stopping": {"tolerance": 0.05, "max_iterations": 4},
        "at_evaluation": {"stopping": {"max_iterations": 16}},
    },
    "data": {"kind": "word_problem", "group": "S3", "identity_probability": 0.5, "length": 12},
    "training": {
        "max_steps": 4,
        "batch_size": 8,
        "clip_norm": 0.25,
        "optimizer": {"kind": "adamw", "learning_rate": 2e-3},
        "schedule": {"kind": "warmup_linear"},
        "threads": 1,
    },
    "evaluation": {"lengths": [12, 16], "identity_probabilities": [0.5], "sequences": 6, "batch_size": 4},
}


def _set(tree: dict[str, Any], path: str, value: Any) -> None:
    *parents, last = path.split(".")
    for key in parents:
        tree = tree.setdefault(key, {})
    tree[last] = value


@pytest.fixture(scope="session")
def small() -> Callable[..., RunSpec]:
    """Return a maker of small run specs: ``small({"training.max_steps": 12})``."""

    def make(changes: Mapping[str, Any] | None = None) -> RunSpec:
        tree = deepcopy(SMALL)
        for path, value in (changes or {}).items():
            _set(tree, path, value)
        return RunSpec.model_validate(tree)

    return make

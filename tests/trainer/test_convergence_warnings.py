"""A run warns once of searches and adjoint solves that do not converge, and its progress lines show them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainer.run.build import build
from trainer.specs.run import RunSpec

Small = Callable[..., RunSpec]
ADJOINT = {"kind": "implicit_function", "stopping": {"tolerance": 1e-6, "max_iterations": 1}}


@pytest.mark.parametrize(
    ("changes", "warned", "shown"),
    [
        (
            {"model.gradient": ADJOINT},
            "WARNING: 100% of the adjoint solves of the last 20 training steps did not converge; the",
            "adjoint unconverged 100%",
        ),
        (
            {"model.stopping": {"tolerance": 1e-6, "max_iterations": 8}},
            "WARNING: 100% of the searches of the last 20 training steps did not converge",
            "unconverged 100%",
        ),
        ({"model.stopping": {"tolerance": 1e-6, "max_iterations": 4}}, None, "unconverged 100%"),
        ({"model.gradient": {"kind": "unrolled", "steps": 1}}, None, None),
    ],
    ids=["adjoint", "search", "bounded", "unrolled"],
)
def test_unconverged_solves_are_warned_of_once(
    changes: dict[str, Any],
    warned: str | None,
    shown: str | None,
    small: Small,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    steps = {"training.max_steps": 45, "training.log_every": 1, "training.batch_size": 2}
    build(small({**steps, **changes}), name="run", output=tmp_path / "run", device="cpu").train()
    message = capsys.readouterr().out
    assert message.count("WARNING") == (warned is not None)
    assert warned is None or warned in message
    assert shown is None or message.count(shown) >= 15  # of 16 progress lines

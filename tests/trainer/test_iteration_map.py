"""The heat map of iterations per position, drawn at the evaluations of a run."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from trainer.callbacks.loggers import _Pictures
from trainer.reporting.iteration_map import IterationMap


def result(name: str, length: int, iterations: list[float] | None) -> Any:
    return SimpleNamespace(name=name, length=length, iterations_by_position=iterations)


def test_a_map_has_a_row_per_evaluation_of_the_longest_sets() -> None:
    found = IterationMap()
    for step in (10, 20, 30):
        names = found.add(
            step,
            [
                result("p0_L4", 4, [1.0] * 4),
                result("p0_L8", 8, [float(step)] * 8),
                result("p0.5_L8", 8, [2.0] * 8),
                result("text_L8", 8, None),
            ],
        )
        assert names == ["p0_L8", "p0.5_L8"]
    axes = found.draw("p0_L8").axes[0]
    values = np.asarray(axes.images[0].get_array())
    assert values.shape == (3, 8)
    assert values[:, 0].tolist() == [10.0, 20.0, 30.0]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["10", "20", "30"]


def test_long_sequences_are_averaged() -> None:
    found = IterationMap()
    found.add(1, [result("L1000", 1000, list(map(float, range(1000))))])
    values = np.asarray(found.draw("L1000").axes[0].images[0].get_array())
    assert values.shape == (1, 256)
    assert values[0, 0] == pytest.approx(1.5)
    assert found.pixels("L1000").shape[2] == 3


def test_without_matplotlib_there_is_one_message_and_no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    pictures, logged = _Pictures(), list[str]()
    run: Any = SimpleNamespace(log=logged.append)
    for step in (1, 2):
        assert pictures.of(run, step=step, results=[result("L4", 4, [1.0] * 4)]) == {}
    assert len(logged) == 1
    assert "matplotlib" in logged[0]

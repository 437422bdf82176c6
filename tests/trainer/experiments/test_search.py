"""Measurements of searches with known results."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from implicit_blocks.specs import BroydenSpec, PicardSpec
from trainer.data.source import IGNORED, Batch
from trainer.experiments.common import search as searching
from trainer.experiments.common.search import REFERENCE, Reference, accuracy, reference, spectrum

IDS = torch.zeros(3, 4, dtype=torch.int64)


def test_accuracy_is_of_scored_tokens() -> None:
    logits = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2, 2], [1, 1, 0, 0]]), 3).float()
    labels = torch.tensor([[0, IGNORED, 1, IGNORED], [1, IGNORED, IGNORED, IGNORED]])
    assert accuracy(logits, labels) == pytest.approx(2 / 3)
    assert accuracy(logits, torch.full_like(labels, IGNORED)) == 0.0


def found_by(solver: Any, *, residuals: list[float], mark: float) -> SimpleNamespace:
    residual = torch.tensor(residuals)
    solution = SimpleNamespace(
        residual=residual, converged=residual <= REFERENCE, z=torch.full((3, 4, 2), mark)
    )
    return SimpleNamespace(logits=torch.full((3, 4, 5), mark), solution=solution)


def test_the_reference_falls_back_to_broyden_per_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []

    def search(model: Any, batch: Any, way: Any, scope: str, tolerance: float, most: int) -> Any:
        asked.append((type(way.solver), scope, tolerance, most))
        picard = isinstance(way.solver, PicardSpec)
        residuals = [1e-6, 0.3, 0.2] if picard else [2e-6, 1e-6, 0.4]
        return found_by(way.solver, residuals=residuals, mark=1.0 if picard else 2.0), 0.0

    monkeypatch.setattr(searching, "search", search)
    model: Any = None
    tight = reference(model, Batch(inputs=IDS, labels=IDS), 50)
    assert asked == [(PicardSpec, "prefix", REFERENCE, 50), (BroydenSpec, "prefix", REFERENCE, 50)]
    assert tight.logits[:, 0, 0].tolist() == [1.0, 2.0, 1.0]
    assert tight.z[:, 3, 1].tolist() == [1.0, 2.0, 1.0]
    assert tight.converged.tolist() == [True, True, False]


def test_a_nan_reference_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two searches of a row, the one whose residual is a number is used, converged or not."""
    found = {
        PicardSpec: found_by(None, residuals=[float("nan"), 0.3, float("nan")], mark=1.0),
        BroydenSpec: found_by(None, residuals=[1e-6, float("nan"), float("nan")], mark=2.0),
    }
    found[BroydenSpec].solution.converged[1] = False
    monkeypatch.setattr(searching, "search", lambda model, batch, way, *rest: (found[type(way.solver)], 0.0))
    model: Any = None
    tight = reference(model, Batch(inputs=IDS, labels=IDS), 50)
    assert tight.logits[:, 0, 0].tolist() == [2.0, 1.0, 1.0]
    assert tight.converged.tolist() == [True, False, False]


def test_a_spectrum_says_where_the_map_does_not_contract(monkeypatch: pytest.MonkeyPatch) -> None:
    radii = iter(([0.5, 1.5, 0.9], [2.0, 0.1, 0.2]))
    monkeypatch.setattr(
        searching,
        "spectral_radius",
        lambda f, z, generator: SimpleNamespace(
            radius=torch.tensor(next(radii)), residual=torch.tensor([0.01, 0.02, 0.0])
        ),
    )
    part = SimpleNamespace(first=lambda count: part, after=lambda z: part)
    model: Any = SimpleNamespace(
        embedding=lambda ids: ids,
        initial_state=lambda rows: None,
        cache_weights=lambda: None,
        bind=lambda *given, **more: (part, None),
    )
    z = torch.zeros(3, 4, 2)
    found = Reference(logits=z, z=z, converged=torch.tensor([True, False, True]))
    result = spectrum(model, Batch(inputs=IDS, labels=IDS), found, positions=2)
    assert result["positions"] == [0, 3]
    assert result["above_one"] == pytest.approx(2 / 6)
    assert (result["largest"], result["residual_largest"]) == (2.0, pytest.approx(0.02))
    assert result["converged"] == pytest.approx(2 / 3)

"""One training step: averages, clipping, statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.data.source import IGNORED, Batch
from trainer.distributed import Ranks, alone
from trainer.optim.capturable import step_where_finite
from trainer.run.step import StepResult, Tally, _objective, training_step


class Table(nn.Module):
    """A table of logits per token; the loss is ten times the mean over the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(5, 5)
        with torch.no_grad():
            self.logits.weight.copy_(torch.linspace(-2, 2, 25).view(5, 5).sin())

    def forward(self, ids: torch.Tensor, *, labels: torch.Tensor, return_logits: bool) -> Any:
        logits = self.logits(ids)
        loss = 10 * nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return SimpleNamespace(loss=loss, predictions=logits.argmax(-1), solution=None)


INPUTS = torch.tensor([[0, 1, 2], [3, 4, 0], [1, 2, 3], [4, 0, 1]])
LABELS = torch.tensor([[1, 2, 3], [IGNORED, IGNORED, 4], [IGNORED] * 3, [0, IGNORED, 2]])


def step(*, model: Table | None = None, **changes: Any) -> tuple[StepResult, torch.Tensor, torch.Tensor]:
    model = Table() if model is None else model
    before = model.logits.weight.detach().clone()
    options: dict[str, Any] = {
        "precision": "float32", "micro_batch_size": None, "max_grad_norm": None, "last_tokens": 1,
    }  # fmt: skip
    result = training_step(
        alone(model, torch.device("cpu")),
        torch.optim.SGD(model.parameters(), lr=1.0),
        Batch(inputs=INPUTS, labels=LABELS),
        **{**options, **changes},
    )
    return result, before, model.logits.weight.detach()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_loss_does_not_depend_on_micro_batches(size: int) -> None:
    whole, _, expected = step()
    cut, _, found = step(micro_batch_size=size)
    assert cut.loss == pytest.approx(whole.loss, rel=1e-6)
    assert cut.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-6)
    assert (cut.accuracy, cut.accuracy_last) == (whole.accuracy, whole.accuracy_last)
    torch.testing.assert_close(found, expected)


def test_the_gradient_norm_is_clipped_to_its_limit() -> None:
    free, before, after = step()
    length = float((after - before).norm())
    assert length == pytest.approx(free.gradient_norm, rel=1e-5)
    assert length > 2
    for limit in (length / 3, length * 3):
        clipped, before, after = step(max_grad_norm=limit)
        assert clipped.gradient_norm == pytest.approx(
            free.gradient_norm, rel=1e-6
        )  # reported before clipping
        assert float((after - before).norm()) == pytest.approx(min(limit, length), rel=1e-3)


def test_accuracy_last_covers_the_last_tokens() -> None:
    model = Table()
    labels = (model.logits(INPUTS).argmax(-1) + 1) % 5  # all wrong but the last ones
    labels[:, -1] = (labels[:, -1] - 1) % 5
    for last, accuracy in ((1, 1.0), (2, 1 / 2), (3, 1 / 3), (9, 1 / 3)):
        result = training_step(
            alone(model, torch.device("cpu")),
            torch.optim.SGD(model.parameters(), lr=0.0),
            Batch(inputs=INPUTS, labels=labels),
            precision="float32", micro_batch_size=3, max_grad_norm=None, last_tokens=last,
        )  # fmt: skip
        assert (result.accuracy_last, result.accuracy) == pytest.approx((accuracy, 1 / 3))


def test_adjoint_solves_of_all_micro_batches_are_counted() -> None:
    def solved(*iterations: int) -> Any:
        count = torch.tensor(iterations)
        yes = torch.ones(len(iterations), dtype=torch.bool)
        return SimpleNamespace(iterations=count, residual=count / 10, converged=yes, diverged=~yes)

    tally, labels = Tally(torch.device("cpu")), torch.zeros(2, 3, dtype=torch.int64)
    for own, adjoint in ((solved(1, 3), solved(5, 7)), (solved(2, 2), solved(9, 11))):
        own.adjoint = SimpleNamespace(solutions=[adjoint])
        tally.add(torch.tensor(1.0), SimpleNamespace(predictions=labels, solution=own), labels, 1)
    tally.send(torch.tensor(0.5))
    result = tally.over(Ranks(torch.device("cpu")), at_once=2)
    assert result.search is not None
    assert result.adjoint is not None
    assert (result.search.iterations, result.search.iterations_max) == (2.0, 3)
    assert (result.adjoint.iterations, result.adjoint.iterations_max) == (8.0, 11)
    assert result.adjoint.residual_percentiles != result.adjoint.iterations_percentiles


def test_the_mean_penalty_is_added_to_the_loss() -> None:
    loss, penalty = torch.tensor(2.0), torch.tensor([1.0, 2.0, 6.0])
    searched: Any = SimpleNamespace(penalty=penalty)
    assert _objective(loss, searched, share=1.0, rows=1.0) == 5.0
    assert _objective(loss, searched, share=0.5, rows=0.25) == 1.75
    without: Any = SimpleNamespace(penalty=None)
    for solution in (None, without):
        assert _objective(loss, solution, share=0.5, rows=0.25) == 1.0


class Penalized(Table):
    """Its penalty has a gradient in every row, also in rows without labels."""

    def forward(self, ids: torch.Tensor, *, labels: torch.Tensor, return_logits: bool) -> Any:
        output = super().forward(ids, labels=labels, return_logits=return_logits)
        penalty, yes = self.logits(ids).square().mean((1, 2)), torch.ones(len(ids), dtype=torch.bool)
        status = {"iterations": yes.long(), "residual": yes.float(), "converged": yes, "diverged": ~yes}
        output.solution = SimpleNamespace(penalty=penalty, adjoint=None, **status)
        return output


@pytest.mark.parametrize("size", [1, 2])
def test_a_penalty_does_not_depend_on_micro_batches(size: int) -> None:
    whole, _, expected = step(model=Penalized())
    cut, _, found = step(model=Penalized(), micro_batch_size=size)
    assert cut.gradient_norm == pytest.approx(whole.gradient_norm, rel=1e-6)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_a_step_that_the_device_decides_is_that_of_the_optimizer_or_none(value: float) -> None:
    torch.manual_seed(0)
    start, gradient = torch.randn(7), torch.randn(7)
    found, expected = (torch.nn.Parameter(start.clone()) for _ in range(2))
    guarded, plain = (torch.optim.AdamW([p], lr=0.1, fused=True) for p in (found, expected))
    for factor in (1.0, value, 1.0):
        finite = factor == 1.0
        for parameter in (found, expected):
            parameter.grad = gradient.clone() * factor
        assert step_where_finite(guarded, torch.tensor(factor), gradient.norm())
        if finite:
            plain.step()
    assert torch.equal(found, expected)
    for name, entry in plain.state[expected].items():
        assert torch.equal(guarded.state[found][name], entry)
    assert not hasattr(guarded, "found_inf")
    assert not step_where_finite(torch.optim.SGD([found], lr=0.1), torch.tensor(1.0))

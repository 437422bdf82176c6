"""One training step: gradients of a global batch in micro-batches, the checks, the update.

Shape legend: B sequences of a micro-batch, L tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from implicit_blocks.interfaces import Solution
from trainer.data.source import Batch

_Status = tuple[Tensor, Tensor, Tensor, Tensor]

IGNORED = -100
"""The label of a position that is not scored."""


@dataclass(frozen=True)
class SearchStatistics:
    """How the searches of a batch for their fixed points went; residuals are measured, never assumed."""

    iterations: float
    iterations_max: int
    residual: float
    residual_max: float
    non_converged: float
    diverged: float


@dataclass(frozen=True)
class StepResult:
    """What one training step measured; ``search`` is None for an explicit model.

    ``adjoint`` is the backward solves of a gradient that has them (``implicit_function``), else None.
    """

    loss: float
    accuracy: float
    accuracy_last: float
    gradient_norm: float
    search: SearchStatistics | None
    adjoint: SearchStatistics | None = None


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return the context a model's passes run in: bfloat16 autocast, or nothing for float32."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def correct_and_scored(predictions_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the most likely token is the label, and where there is a label, both bool (B, L)."""
    scored_BL = labels_BL != IGNORED
    return (predictions_BL == labels_BL) & scored_BL, scored_BL


def training_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    device: torch.device,
    precision: str,
    micro_batch_size: int | None,
    clip_norm: float | None,
    last_tokens: int,
    refuse: Callable[[str, float], Exception],
) -> StepResult:
    """Make one update from a global batch, cut into micro-batches.

    The loss is the mean over the batch's scored tokens, however it is cut into micro-batches. Before the
    update the loss and the gradient norm are read; where one isn't finite, ``refuse(quantity, value)`` is
    raised and weights and optimizer state stay as they were.
    """
    model.train()
    size = micro_batch_size or len(batch)
    scored_total = max(1, int((batch.labels != IGNORED).sum()))
    tally = _Tally(device)
    optimizer.zero_grad(set_to_none=True)
    for first in range(0, len(batch), size):
        part = batch.rows(first, first + size)
        share = int((part.labels != IGNORED).sum()) / scored_total
        if share == 0.0:
            continue  # a mean over no label at all would be NaN
        part = part.to(device)
        with autocast(device, precision):
            output = model(part.inputs, labels=part.labels, return_logits=False, **part.context())
        loss = output.loss * share
        loss.backward()
        tally.add(loss.detach(), output, part.labels, last_tokens)

    # One reading from the device for the check: the update must not be made with what isn't a number.
    parameters = [parameter for parameter in model.parameters() if parameter.grad is not None]
    limit = math.inf if clip_norm is None else clip_norm
    norm = torch.nn.utils.clip_grad_norm_(parameters, limit)
    loss_value, norm_value = torch.stack([tally.loss, norm.to(tally.loss)]).tolist()
    if not math.isfinite(loss_value):
        raise refuse("loss", loss_value)
    if not math.isfinite(norm_value):
        raise refuse("gradient norm", norm_value)
    optimizer.step()
    return tally.result(loss=loss_value, gradient_norm=norm_value)


class _Tally:
    """Sums over the micro-batches of a step, kept on the device until the end."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        self._correct = torch.zeros(
            4, device=device
        )  # correct, scored, correct among the last, scored among the last
        self._searches: list[_Status] = []
        self._adjoints: list[_Status] = []

    def add(self, loss: Tensor, output: object, labels_BL: Tensor, last_tokens: int) -> None:
        self.loss = self.loss + loss.to(self.loss)
        predictions = output.predictions  # type: ignore[attr-defined]  # the contract of language models
        correct_BL, scored_BL = correct_and_scored(predictions, labels_BL)
        last_correct, last_scored = correct_BL[:, -last_tokens:], scored_BL[:, -last_tokens:]
        self._correct += torch.stack(
            [part.sum() for part in (correct_BL, scored_BL, last_correct, last_scored)]
        )
        solution = output.solution  # type: ignore[attr-defined]  # the same
        if solution is None:
            return
        self._searches.append(_status(solution))
        if solution.adjoint is not None:
            self._adjoints += map(_status, solution.adjoint.solutions)

    def result(self, *, loss: float, gradient_norm: float) -> StepResult:
        correct, scored, last_correct, last_scored = self._correct.tolist()
        return StepResult(
            loss=loss,
            accuracy=correct / max(1.0, scored),
            accuracy_last=last_correct / max(1.0, last_scored),
            gradient_norm=gradient_norm,
            search=_summed_up(self._searches),
            adjoint=_summed_up(self._adjoints),
        )


def _status(solution: Solution) -> _Status:
    # Not the solution itself: it would keep its values alive until the end of the step.
    return solution.iterations, solution.residual, solution.converged, solution.diverged


def _summed_up(searches: list[_Status]) -> SearchStatistics | None:
    return search_statistics(*map(torch.cat, zip(*searches, strict=True))) if searches else None


def search_statistics(
    iterations: Tensor, residual: Tensor, converged: Tensor, diverged: Tensor
) -> SearchStatistics:
    """Summarize the searches of many sequences, all of shape (B,), with one reading from the device."""
    residual = residual.float()
    counts = iterations.float()
    mean, largest, mean_residual, largest_residual, met, lost = torch.stack(
        [
            counts.mean(),
            counts.max(),
            residual.mean(),
            residual.max(),
            converged.float().mean(),
            diverged.float().mean(),
        ]
    ).tolist()
    return SearchStatistics(
        iterations=mean,
        iterations_max=int(largest),
        residual=mean_residual,
        residual_max=largest_residual,
        non_converged=1.0 - met,
        diverged=lost,
    )

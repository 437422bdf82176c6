"""One training step: gradients of a global batch in micro-batches, the checks, the update.

Shape legend: B sequences of a micro-batch, L tokens, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from implicit_blocks.interfaces import Solution
from trainer.data.source import IGNORED, Batch
from trainer.distributed import Layout, Ranks

_Status = tuple[Tensor, Tensor, Tensor, Tensor]


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
    Everything is over all ranks.
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
    layout: Layout,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    precision: str,
    micro_batch_size: int | None,
    clip_norm: float | None,
    last_tokens: int,
    refuse: Callable[[str, float], Exception],
) -> StepResult:
    """Make one update from a global batch, of which ``batch`` is this rank's part, cut into micro-batches.

    The loss is the mean over the global batch's scored tokens, however cut. Before the update the loss
    and the gradient norm are read; where one isn't finite, ``refuse(quantity, value)`` is raised, on every
    rank, and weights and optimizer state stay as they were.
    """
    ranks = layout.ranks
    layout.forward.train()
    size = min(micro_batch_size or len(batch), len(batch))
    scored_total = max(1, int(ranks.sum([int((batch.labels != IGNORED).sum())])[0]))
    tally = _Tally(ranks.device)
    optimizer.zero_grad(set_to_none=True)
    for first in range(0, len(batch), size):
        part = batch.rows(first, first + size)
        share = int((part.labels != IGNORED).sum()) / scored_total
        if share == 0.0 and ranks.alone:
            continue  # a mean over no label at all would be NaN
        part = part.to(ranks.device)
        labels_BL = part.labels
        if share == 0.0:  # the others wait for this rank to take part: with a label that weighs nothing
            labels_BL = labels_BL.clone()
            labels_BL[0, 0] = 0
        with layout.accumulating(last=first + size >= len(batch)):
            with autocast(ranks.device, precision):
                output = layout.forward(part.inputs, labels=labels_BL, return_logits=False, **part.context())
            (output.loss * (share * layout.gradient_scale)).backward()
        tally.add(output.loss.detach() * share, output, part.labels, last_tokens)

    # One reading from the device for the check: the update must not be made with what isn't a number.
    totals = tally.over(ranks, norm=layout.clip(math.inf if clip_norm is None else clip_norm))
    for quantity, value in (("loss", totals.loss), ("gradient norm", totals.gradient_norm)):
        if not math.isfinite(value):
            raise refuse(quantity, value)
    optimizer.step()
    return totals


class _Tally:
    """Sums over a rank's micro-batches, kept on the device until the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        # correct, scored, correct among the last, scored among the last
        self._correct = torch.zeros(4, device=device)
        self._searches: list[_Status] = []
        self._adjoints: list[_Status] = []

    def add(self, loss: Tensor, output: object, labels_BL: Tensor, last_tokens: int) -> None:
        self._loss = self._loss + loss.to(self._loss)
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

    def over(self, ranks: Ranks, *, norm: Tensor) -> StepResult:
        """Read everything from the device at once, and put it together with what the other ranks read."""
        searches, adjoints = _columns(self._searches), _columns(self._adjoints)
        scalars = torch.cat([torch.stack([self._loss, norm.to(self._loss)]), self._correct])
        own = torch.cat([scalars.double(), *searches, *adjoints]).tolist()
        every = torch.tensor(ranks.gather(own), dtype=torch.float64)
        first_search, first_adjoint = 6, 6 + sum(column.numel() for column in searches)
        correct, scored, last_correct, last_scored = every[:, 2:first_search].sum(0).tolist()
        return StepResult(
            loss=float(every[:, 0].sum()),
            accuracy=correct / max(1.0, scored),
            accuracy_last=last_correct / max(1.0, last_scored),
            gradient_norm=float(every[0, 1]),  # of all ranks' gradients already
            search=_summed_up(every[:, first_search:first_adjoint]),
            adjoint=_summed_up(every[:, first_adjoint:]),
        )


def _status(solution: Solution) -> _Status:
    # Not the solution itself: it would keep its values alive until the end of the step.
    return solution.iterations, solution.residual, solution.converged, solution.diverged


def _columns(searches: list[_Status]) -> list[Tensor]:
    return [torch.cat(column).double() for column in zip(*searches, strict=True)]


def _summed_up(every: Tensor) -> SearchStatistics | None:
    """Sum up the four columns of all ranks' searches, (ranks, 4 · sequences of a rank)."""
    return search_statistics(*every.unflatten(1, (4, -1)).unbind(1)) if every.numel() else None


def search_statistics(
    iterations: Tensor, residual: Tensor, converged: Tensor, diverged: Tensor
) -> SearchStatistics:
    """Summarize the searches of many sequences, all of one shape, with one reading from the device."""
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

"""One training step: gradients of a global batch in micro-batches, the checks, the update.

Shape legend: B sequences of a micro-batch, L tokens, V vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from implicit_blocks.solution import Solution
from trainer.data.source import IGNORED, Batch
from trainer.distributed import Layout, Ranks

_Status = tuple[Tensor, Tensor, Tensor, Tensor]


PERCENTILES = (50, 90, 99)
"""Of the sequences of a batch, in the metrics."""


@dataclass(frozen=True)
class SearchStatistics:
    """How the searches of a batch for their fixed points went; residuals are measured, never assumed."""

    iterations: float
    iterations_max: int
    residual: float
    residual_max: float
    non_converged: float
    diverged: float
    iterations_percentiles: tuple[float, ...] = ()
    """At :data:`PERCENTILES`."""
    residual_percentiles: tuple[float, ...] = ()
    """The same."""


@dataclass(frozen=True)
class StepResult:
    """What one training step measured; ``search`` is None for an explicit model.

    ``adjoint`` is the backward solves of a gradient that has them (``implicit_function``), else None.
    ``iterations_executed`` is how many calls of the map a sequence was part of, in the mean, done or not.
    Everything is over all ranks.
    """

    loss: float
    accuracy: float
    accuracy_last: float
    gradient_norm: float
    search: SearchStatistics | None
    adjoint: SearchStatistics | None = None
    iterations_executed: float | None = None

    @property
    def not_finite(self) -> str | None:
        """The quantity that is not a number, or None where the update was made."""
        for quantity, value in (("loss", self.loss), ("gradient norm", self.gradient_norm)):
            if not math.isfinite(value):
                return quantity
        return None


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
    max_grad_norm: float | None,
    last_tokens: int,
) -> StepResult:
    """Make one update from a global batch, of which ``batch`` is this rank's part, cut into micro-batches.

    The loss is the mean over the global batch's scored tokens, however cut. Before the update the loss
    and the gradient norm are read; where one isn't finite, weights and optimizer state stay as they were, on
    every rank: the result says so (``not_finite``).
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
        if share == 0.0 and ranks.is_single:
            continue  # a mean over no label at all would be NaN
        part = part.to(ranks.device)
        labels_BL = part.labels
        if share == 0.0:  # the others wait for this rank to take part: with a label that weighs nothing
            labels_BL = labels_BL.clone()
            labels_BL[0, 0] = 0
        with layout.accumulating(last=first + size >= len(batch)):
            with autocast(ranks.device, precision):
                output = layout.forward(part.inputs, labels=labels_BL, return_logits=False, **part.context())
            (_objective(output) * (share * layout.gradient_scale)).backward()
        tally.add(output.loss.detach() * share, output, part.labels, last_tokens)

    # One reading from the device for the check: the update must not be made with what isn't a number.
    norm = layout.clip(math.inf if max_grad_norm is None else max_grad_norm)
    totals = tally.over(ranks, norm=norm, at_once=size)
    if totals.not_finite is None:
        optimizer.step()
    return totals


def _objective(output: Any) -> Tensor:
    """Return what is differentiated: the loss, and what the gradient estimator adds to it."""
    loss: Tensor = output.loss
    if output.solution is None or output.solution.penalty is None:
        return loss
    penalty: Tensor = output.solution.penalty
    return loss + penalty.mean()


class _Tally:
    """Sums over a rank's micro-batches, kept on the device until the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self._loss = torch.zeros((), device=device)
        # correct, scored, correct among the last, scored among the last
        self._correct = torch.zeros(4, device=device)
        self._searches: list[_Status] = []
        self._adjoints: list[_Status] = []

    def add(self, loss: Tensor, output: Any, labels_BL: Tensor, last_tokens: int) -> None:
        self._loss = self._loss + loss.to(self._loss)
        correct_BL, scored_BL = correct_and_scored(output.predictions, labels_BL)
        last_correct, last_scored = correct_BL[:, -last_tokens:], scored_BL[:, -last_tokens:]
        self._correct += torch.stack(
            [part.sum() for part in (correct_BL, scored_BL, last_correct, last_scored)]
        )
        solution = output.solution
        if solution is None:
            return
        self._searches.append(_status(solution))
        if solution.adjoint is not None:
            self._adjoints += map(_status, solution.adjoint.solutions)

    def over(self, ranks: Ranks, *, norm: Tensor, at_once: int) -> StepResult:
        """Read everything from the device at once, and put it together with what the other ranks read.

        ``at_once`` sequences of a rank were searched together.
        """
        searches, adjoints = _columns(self._searches), _columns(self._adjoints)
        scalars = torch.cat([torch.stack([self._loss, norm.to(self._loss)]), self._correct])
        own = torch.cat([scalars.double(), *searches, *adjoints]).tolist()
        every = torch.tensor(ranks.gather(own), dtype=torch.float64)
        first_search, first_adjoint = 6, 6 + sum(column.numel() for column in searches)
        correct, scored, last_correct, last_scored = every[:, 2:first_search].sum(0).tolist()
        found = every[:, first_search:first_adjoint]
        return StepResult(
            loss=float(every[:, 0].sum()),
            accuracy=correct / max(1.0, scored),
            accuracy_last=last_correct / max(1.0, last_scored),
            gradient_norm=float(every[0, 1]),  # of all ranks' gradients already
            search=_summed_up(found),
            adjoint=_summed_up(every[:, first_adjoint:]),
            iterations_executed=_executed(found.unflatten(1, (4, -1))[:, 0], at_once) if searches else None,
        )


def _status(solution: Solution) -> _Status:
    # Not the solution itself: it would keep its values alive until the end of the step.
    return solution.iterations, solution.residual, solution.converged, solution.diverged


def _columns(searches: list[_Status]) -> list[Tensor]:
    return [torch.cat(column).double() for column in zip(*searches, strict=True)]


def _summed_up(every: Tensor) -> SearchStatistics | None:
    """Sum up the four columns of all ranks' searches, (ranks, 4 · sequences of a rank)."""
    return search_statistics(*every.unflatten(1, (4, -1)).unbind(1)) if every.numel() else None


def _executed(iterations: Tensor, at_once: int) -> float:
    """Return the mean number of calls a sequence was part of, from the iterations (ranks, sequences) it took.

    Sequences that are done stay in the batch until half of those in it are (`Search.compact`).
    """
    total = 0
    # A rank's share need not be a multiple of the micro-batch: the last one is smaller then.
    for batch in [row.tolist() for part in iterations.split(at_once, dim=1) for row in part]:
        ordered = sorted(batch)
        inside, begun = len(batch), 0
        for done_after in ordered:
            left = len(batch) - bisect_right(ordered, done_after)
            if done_after > begun and 2 * left <= inside:
                total += inside * (int(done_after) - begun)
                inside, begun = left, int(done_after)
    return total / iterations.numel()


def search_statistics(
    iterations: Tensor, residual: Tensor, converged: Tensor, diverged: Tensor
) -> SearchStatistics:
    """Summarize the searches of many sequences, all of one shape, with one reading from the device."""
    residual = residual.float()
    counts = iterations.float()
    moments = torch.stack(
        [
            counts.mean(),
            counts.max(),
            residual.mean(),
            residual.max(),
            converged.float().mean(),
            diverged.float().mean(),
        ]
    )
    read = torch.cat([moments, _percentiles(counts), _percentiles(residual)]).tolist()
    mean, largest, mean_residual, largest_residual, met, lost = read[:6]
    return SearchStatistics(
        iterations=mean,
        iterations_max=int(largest),
        residual=mean_residual,
        residual_max=largest_residual,
        non_converged=1.0 - met,
        diverged=lost,
        iterations_percentiles=tuple(read[6 : 6 + len(PERCENTILES)]),
        residual_percentiles=tuple(read[6 + len(PERCENTILES) :]),
    )


def _percentiles(values: Tensor) -> Tensor:
    # The nearest value, not one between two: those may be infinite.
    at = torch.tensor([percent / 100 for percent in PERCENTILES], device=values.device, dtype=values.dtype)
    return torch.quantile(values, at, interpolation="nearest")

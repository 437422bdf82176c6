"""One training step: the gradient of a global batch, the check that it is finite, and the update.

Shape legend: B sequences of a micro-batch, L tokens, V vocabulary.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.solution import Solution
from trainer.data.source import IGNORED, Batch
from trainer.distributed import Layout, Ranks
from trainer.errors import DataError
from trainer.optim.capturable import step_where_finite
from trainer.reporting.metrics import rounded
from trainer.run.trainable_model import SearchesFixedPoints, TrainingOutput

_Status = tuple[Tensor, Tensor, Tensor, Tensor]


PERCENTILES = (50, 90, 99)
"""Percentiles over the sequences of a batch that the metrics contain."""

_SEARCH_COLUMNS = (
    "iterations",
    *(f"iterations_p{percent}" for percent in PERCENTILES),
    "iterations_max",
    "residual",
    *(f"residual_p{percent}" for percent in PERCENTILES),
    "residual_max",
    "non_converged",
    "diverged",
)


@dataclass(frozen=True)
class SearchStatistics:
    """Iterations, residuals and convergence of the fixed-point searches of a batch."""

    iterations: float
    iterations_max: int
    residual: float
    residual_max: float
    non_converged: float
    diverged: float
    iterations_percentiles: tuple[float, ...] = ()
    """At :data:`PERCENTILES`."""
    residual_percentiles: tuple[float, ...] = ()
    """At :data:`PERCENTILES`."""


@dataclass(frozen=True)
class StepResult:
    """Measurements of one training step over all ranks.

    ``search`` is None for an explicit model. ``adjoint`` describes the adjoint solves in backward; it is None
    for a gradient without them. ``iterations_executed`` is the mean number of calls of the map that a
    sequence was part of, whether it had converged or not.
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
        """The quantity that is NaN or infinite; None if the update was made."""
        for quantity, value in (("loss", self.loss), ("gradient norm", self.gradient_norm)):
            if not math.isfinite(value):
                return quantity
        return None


class MadeStep(NamedTuple):
    """A step of a run: its measurements, learning rate, tokens over all ranks and duration."""

    result: StepResult
    learning_rate: float
    tokens: int
    seconds: float


def autocast(device: torch.device, precision: str) -> AbstractContextManager[None]:
    """Return the context of a model's passes: bfloat16 autocast, or an empty one for float32."""
    if precision == "bfloat16":
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return nullcontext()


def correct_and_scored(predictions_BL: Tensor, labels_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return where the most likely token is the label and where there is a label, both bool (B, L)."""
    scored_BL = labels_BL != IGNORED
    return (predictions_BL == labels_BL) & scored_BL, scored_BL


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate of every parameter group."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


def training_step(
    layout: Layout,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    *,
    precision: str,
    micro_batch_size: int | None,
    max_grad_norm: float | None,
    last_tokens: int,
    place: str = "the batch",
) -> StepResult:
    """Make one update from a global batch.

    The loss is the mean over the scored tokens of the global batch, and the penalty of a gradient estimator
    the mean over its rows, both independent of the micro-batches. If the loss or the gradient norm is not
    finite, weights and optimizer state do not change on any rank (``StepResult.not_finite``).

    Args:
        layout: the model over the ranks.
        optimizer: of that model, with the learning rate of this step.
        batch: this rank's share of the global batch.
        precision: ``float32``, or ``bfloat16`` for autocast.
        micro_batch_size: sequences per forward pass; None: the whole share.
        max_grad_norm: the norm to which gradients are clipped; None: not clipped.
        last_tokens: tokens at the end of a sequence that ``accuracy_last`` covers.
        place: name of the batch in messages, such as its step.

    Raises:
        DataError: no token of the global batch is scored; all ranks raise it.

    """
    ranks = layout.ranks
    layout.forward.train()
    size = min(micro_batch_size or len(batch), len(batch))
    scored_total = int(layout.grid.batches.sum([int((batch.labels != IGNORED).sum())])[0])
    if scored_total == 0:
        raise not_scored(batch, place)
    sequences = layout.sequences
    if sequences is not None:
        last_tokens = sequences.last_tokens(last_tokens, batch.inputs.shape[1])
    tally = Tally(ranks.device)
    optimizer.zero_grad(set_to_none=True)
    for first in range(0, len(batch), size):
        part = batch.rows(first, first + size)
        if sequences is not None:
            part = sequences.own(part)
        share = int((part.labels != IGNORED).sum()) / scored_total
        part = part.to(ranks.device)
        labels_BL = part.labels
        if share == 0.0:  # a mean over no labels is NaN: add a label, with weight 0
            labels_BL = labels_BL.clone()
            labels_BL[0, 0] = 0
        with layout.accumulating(last=first + size >= len(batch)):
            with autocast(ranks.device, precision):
                output: TrainingOutput = layout.forward(
                    part.inputs, labels=labels_BL, return_logits=False, **part.context()
                )
            loss = output.loss
            assert loss is not None
            rows = len(part) / (len(batch) * layout.grid.data.world_size)
            objective = _objective(loss, output.solution, share=share, rows=rows)
            (objective * layout.gradient_scale).backward()
        tally.add(loss.detach() * share, output, part.labels, last_tokens)

    # All measurements are read from the device at once, before the update, which NaN would destroy. Where
    # the device itself makes no such update, the host prepares the next step meanwhile.
    norm = layout.clip(math.inf if max_grad_norm is None else max_grad_norm)
    tally.send(norm)
    updated = norm.is_cuda and ranks.is_single and step_where_finite(optimizer, tally.loss, norm)
    grid = layout.grid
    totals = tally.over(grid.data, at_once=size, compacts=compacts(layout.model), parts=grid.parts)
    if totals.not_finite is None and not updated:
        optimizer.step()
    return totals


def not_scored(batch: Batch, place: str) -> DataError:
    """Return the error for a batch without labels."""
    return DataError(
        f"no token of {place} has a label: all {batch.labels.numel()} labels of this process are "
        f"{IGNORED}; increase training.batch_size or data.seq_len, or score more tokens (data.scoring)"
    )


def compacts(model: object) -> bool:
    """Whether sequences that have converged leave the batch of a model, see :func:`step_result`."""
    return not isinstance(model, SearchesFixedPoints) or model.gradient.searches


def _objective(loss: Tensor, solution: Solution | None, *, share: float, rows: float) -> Tensor:
    """Return a micro-batch's part of the loss, by its share of the labels, and of a penalty, by its rows."""
    if solution is None or solution.penalty is None:
        return loss * share
    return loss * share + solution.penalty.mean() * rows


class Tally:
    """Sums over a rank's micro-batches, on the device until the end of the step."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), device=device)
        # correct, scored, correct among the last, scored among the last
        self._correct = torch.zeros(4, device=device)
        self._searches: list[_Status] = []
        self._adjoints: list[_Status] = []

    def add(self, loss: Tensor, output: TrainingOutput, labels_BL: Tensor, last_tokens: int) -> None:
        """Add a micro-batch, whose loss is its part of the step's."""
        self.loss = self.loss + loss.to(self.loss)
        assert output.predictions is not None
        correct_BL, scored_BL = correct_and_scored(output.predictions, labels_BL)
        first = max(0, labels_BL.shape[1] - last_tokens)
        last_correct, last_scored = correct_BL[:, first:], scored_BL[:, first:]
        self._correct += torch.stack(
            [part.sum() for part in (correct_BL, scored_BL, last_correct, last_scored)]
        )
        solution = output.solution
        if solution is None:
            return
        self._searches.append(_status(solution))
        if solution.adjoint is not None:
            self._adjoints += map(_status, solution.adjoint.solutions)

    def values(self, norm: Tensor) -> tuple[Tensor, int]:
        """Return all sums and the norm of the gradients, float64 (N,), and the first index of the adjoints.

        ``step_result`` reads them.
        """
        searches, adjoints = _columns(self._searches), _columns(self._adjoints)
        scalars = torch.cat([torch.stack([self.loss, norm.to(self.loss)]), self._correct])
        first_adjoint = _SCALARS + sum(column.numel() for column in searches)
        return torch.cat([scalars.double(), *searches, *adjoints]), first_adjoint

    def send(self, norm: Tensor) -> None:
        """Begin the copy of all sums to the host, with the norm of the gradients."""
        values, self._first_adjoint = self.values(norm)
        self._read = AsyncHostCopy(values).read if values.is_cuda else values.tolist

    def over(self, ranks: Ranks, *, at_once: int, compacts: bool = True, parts: int = 1) -> StepResult:
        """Wait for what was sent and combine it with that of the other ranks; see :func:`step_result`."""
        every = ranks.gather(self._read())
        return step_result(
            every, first_adjoint=self._first_adjoint, at_once=at_once, compacts=compacts, parts=parts
        )


_SCALARS = 6
"""Number of values of :meth:`Tally.values` before the columns of the searches."""


def step_result(
    values: Sequence[Sequence[float]],
    *,
    first_adjoint: int,
    at_once: int,
    compacts: bool = True,
    parts: int = 1,
) -> StepResult:
    """Return the measurements of a step from the values of all ranks (`Tally.values`).

    ``at_once`` is the number of sequences of a rank in one search; ``compacts``: as for ``_executed``.
    Each run of ``parts`` ranks has parts of the same sequences.
    """
    every = torch.tensor(values, dtype=torch.float64)
    correct, scored, last_correct, last_scored = every[:, 2:_SCALARS].sum(0).tolist()
    sequences = every[::parts]
    found = sequences[:, _SCALARS:first_adjoint]
    return StepResult(
        loss=float(every[:, 0].sum()),
        accuracy=correct / max(1.0, scored),
        accuracy_last=last_correct / max(1.0, last_scored),
        gradient_norm=float(every[0, 1]),  # of all ranks' gradients already
        search=_summed_up(found),
        adjoint=_summed_up(sequences[:, first_adjoint:]),
        iterations_executed=_executed(found.unflatten(1, (4, -1))[:, 0], at_once, compacts=compacts)
        if found.numel()
        else None,
    )


def _status(solution: Solution) -> _Status:
    # Not the solution itself, which would keep its values in memory until the end of the step.
    return solution.iterations, solution.residual, solution.converged, solution.diverged


def _columns(searches: list[_Status]) -> list[Tensor]:
    return [torch.cat(column).double() for column in zip(*searches, strict=True)]


def _summed_up(every: Tensor) -> SearchStatistics | None:
    """Summarize the four columns of all ranks' searches, (ranks, 4 · sequences of a rank)."""
    return search_statistics(*every.unflatten(1, (4, -1)).unbind(1)) if every.numel() else None


def _executed(iterations: Tensor, at_once: int, *, compacts: bool = True) -> float:
    """Return the mean number of calls a sequence was part of, given its iterations (ranks, sequences).

    Converged sequences stay in the batch until half of its sequences have converged (`Search.compact`), or,
    unless the gradient estimator searches (``compacts``), until all have taken their loops.
    """
    total = 0
    # A rank's share need not be a multiple of the micro-batch size: the last micro-batch may be smaller.
    for batch in [row.tolist() for part in iterations.split(at_once, dim=1) for row in part]:
        ordered = sorted(batch) if compacts else [max(batch)] * len(batch)
        inside, begun = len(batch), 0
        for done_after in ordered:
            left = len(batch) - bisect_right(ordered, done_after)
            if done_after > begun and 2 * left <= inside:
                total += inside * (int(done_after) - begun)
                inside, begun = left, int(done_after)
    return total / iterations.numel()


def search_row(search: SearchStatistics | None) -> dict[str, Any]:
    """Return the metrics columns of a search; all None for an explicit model."""
    if search is None:
        return dict.fromkeys(_SEARCH_COLUMNS)
    values = (
        rounded(search.iterations),
        *search.iterations_percentiles,
        search.iterations_max,
        rounded(search.residual),
        *map(rounded, search.residual_percentiles),
        rounded(search.residual_max),
        rounded(search.non_converged),
        rounded(search.diverged),
    )
    return dict(zip(_SEARCH_COLUMNS, values, strict=True))


def adjoint_row(adjoint: SearchStatistics | None) -> dict[str, Any]:
    """Return the metrics columns of the adjoint solves; no columns for gradients without them."""
    if adjoint is None:
        return {}
    keys = ("iterations", "residual", "residual_max", "non_converged")
    return {f"adjoint_{key}": value for key, value in search_row(adjoint).items() if key in keys}


def search_statistics(
    iterations: Tensor, residual: Tensor, converged: Tensor, diverged: Tensor
) -> SearchStatistics:
    """Summarize the searches of many sequences, all tensors of one shape, in one read from the device."""
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
    # The nearest value: interpolating between infinite values gives NaN.
    at = torch.tensor([percent / 100 for percent in PERCENTILES], device=values.device, dtype=values.dtype)
    return torch.quantile(values, at, interpolation="nearest")

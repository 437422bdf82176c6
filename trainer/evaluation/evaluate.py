"""Evaluation of a model on sets of sequences, with the convergence of its searches.

Shape legend: B sequences, L tokens.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from implicit_blocks.search.iteration_budget import FIRST, IterationBudget
from trainer.data.source import Batch, EvaluationSet
from trainer.distributed import Ranks
from trainer.reporting.metrics import rounded
from trainer.run.step import SearchStatistics, autocast, correct_and_scored, search_row, search_statistics


class EvaluationStopped(Exception):  # noqa: N818  # requested by the user, not an error
    """The evaluation was stopped early; there is no result."""


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """A model's results on one set.

    ``loss`` is the mean cross-entropy (nats) of the scored tokens, ``accuracy_last`` the accuracy over the
    last tokens of each sequence; both are NaN if no token is scored. ``sequence_accuracy`` is the fraction of
    sequences whose scored tokens are all correct, NaN likewise. ``search`` and
    ``iterations_by_position`` (L,) are None for an explicit model, the latter also if iterations are not
    counted per token. ``token_converged`` is the fraction of tokens that have converged: their residual and
    those of all tokens before them are within the tolerance. ``token_within`` is the fraction of tokens whose
    own residual is; None with a target of iterations, or likewise.
    """

    name: str
    settings: Mapping[str, float]
    length: int
    sequences: int
    loss: float
    accuracy: float
    accuracy_last: float
    sequence_accuracy: float
    search: SearchStatistics | None
    token_converged: float | None
    token_within: float | None
    accuracy_by_position: tuple[float, ...]
    iterations_by_position: tuple[float, ...] | None
    seconds: float

    @property
    def perplexity(self) -> float:
        """``exp(loss)``; infinite if it overflows."""
        return math.inf if self.loss >= 700.0 else math.exp(self.loss)

    def as_row(self, *, by_position: bool) -> dict[str, Any]:
        """Return the result as JSON values, optionally with the values of every position."""
        row: dict[str, Any] = {
            "set": self.name,
            **self.settings,
            "length": self.length,
            "sequences": self.sequences,
            "loss": rounded(self.loss),
            "perplexity": rounded(self.perplexity),
            "accuracy": rounded(self.accuracy),
            "accuracy_last": rounded(self.accuracy_last),
            "sequence_accuracy": rounded(self.sequence_accuracy),
            **search_row(self.search),
            "token_converged": self.token_converged,
            "token_within": self.token_within,
            "seconds": rounded(self.seconds, 4),
        }
        if by_position:
            row["accuracy_by_position"] = [rounded(value, 4) for value in self.accuracy_by_position]
            iterations = self.iterations_by_position
            row["iterations_by_position"] = (
                None if iterations is None else [rounded(value, 4) for value in iterations]
            )
        return row


@torch.no_grad()
def evaluate(
    model: nn.Module,
    sets: Iterable[EvaluationSet],
    *,
    device: torch.device,
    precision: str,
    batch_size: int,
    last_tokens: int,
    window_length: int | None = None,
    search: Mapping[str, float] | None = None,
    mean_iterations: float | None = None,
    announce: Callable[[str], None] = lambda text: None,
    ranks: Ranks | None = None,
    equal_calls: bool = False,
    stop: Callable[[], bool] | None = None,
    on_result: Callable[[EvaluationResult], object] = lambda result: None,
) -> list[EvaluationResult]:
    """Evaluate ``model`` on every set, in eval mode (its evaluation solver and stopping).

    Each rank evaluates its share of a set, and all ranks receive the combined result. With ``equal_calls``
    all ranks call the model equally often, for models that communicate in their forward pass. ``batch_size``
    is that of the shortest set and is reduced in proportion for longer ones. ``search`` contains search
    options of the model, ``max_iterations`` and ``tolerance``. ``mean_iterations`` adjusts the tolerance from
    batch to batch, on each rank for its share and anew for each set, so that sequences have this mean number
    of iterations (`implicit_blocks.IterationBudget`); the tolerance begins at that of ``search``, or 0.05.
    ``stop`` is called before every batch, equally
    often on all ranks, and must return the same value on all of them. ``on_result`` is called with each set's
    result when it is available.

    Raises:
        EvaluationStopped: ``stop`` returned True.
        ValueError: ``mean_iterations`` is below 1.

    """
    sets = list(sets)
    tokens_at_once = batch_size * min((evaluation_set.length for evaluation_set in sets), default=1)
    ranks = Ranks(device) if ranks is None else ranks
    was_training = model.training
    model.eval()
    try:
        results = []
        for evaluation_set in sets:
            announce(f"evaluating {evaluation_set.name}")
            tolerance = (search or {}).get("tolerance")
            in_force = model_tolerance(model) if tolerance is None else tolerance
            sums = _Sums(evaluation_set.length, in_force if mean_iterations is None else None)
            first = FIRST if tolerance is None else tolerance
            budget = None if mean_iterations is None else IterationBudget(mean_iterations, tolerance=first)
            at_once = max(1, tokens_at_once // evaluation_set.length)
            for shared, counts in _share(evaluation_set, at_once, ranks, equal_calls=equal_calls):
                if stop is not None and stop():
                    raise EvaluationStopped
                if shared is None:
                    continue
                batch = shared.to(device)
                with autocast(device, precision):
                    # No logits: at eight times the training length they exceed a GPU's memory.
                    output = model(
                        batch.inputs,
                        labels=batch.labels,
                        return_logits=False,
                        window_length=window_length,
                        **{**(search or {}), **({} if budget is None else {"tolerance": budget.tolerance})},
                        **batch.context(),
                    )
                if budget is not None:
                    budget.record(output.solution)
                if counts:
                    sums.take(output, batch.labels)
            results.append(sums.result(evaluation_set, ranks, last_tokens=last_tokens))
            on_result(results[-1])
        return results
    finally:
        model.train(was_training)


def model_tolerance(model: nn.Module) -> float | None:
    """Return the tolerance of the model's searches in its current mode; None: it does not search."""
    config = getattr(model, "search_config", None)
    stopping = None if config is None else config()[1]
    return None if stopping is None else float(stopping.tolerance)


class _Sums:
    """Sums over a rank's share of a set, combined over ranks in the result."""

    def __init__(self, length: int, tolerance: float | None = None) -> None:
        self.tolerance = tolerance
        self.began = time.perf_counter()
        self.loss = 0.0
        self.correct_L = torch.zeros(length, dtype=torch.int64)
        self.scored_L = torch.zeros(length, dtype=torch.int64)
        self.sequences_correct = self.sequences_scored = 0
        self.iterations_L = torch.zeros(length, dtype=torch.float64)
        self.by_token = True
        """Whether every search has reported per-token results."""
        self.tokens_converged = self.tokens_within = 0
        self.searches: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        """Iterations, residual, converged, diverged of the sequences, per batch."""

    def take(self, output: Any, labels_BL: Tensor) -> None:
        """Add a batch."""
        correct_BL, scored_BL = correct_and_scored(output.predictions, labels_BL)
        scored = int(scored_BL.sum())
        if scored > 0:
            self.loss += float(output.loss) * scored
        self.correct_L += correct_BL.sum(0).cpu()
        self.scored_L += scored_BL.sum(0).cpu()
        has_scored_B = scored_BL.any(1)
        self.sequences_scored += int(has_scored_B.sum())
        self.sequences_correct += int(((correct_BL | ~scored_BL).all(1) & has_scored_B).sum())
        solution = output.solution
        if solution is None:
            return
        self.searches.append((solution.iterations, solution.residual, solution.converged, solution.diverged))
        if solution.token_iterations is None or solution.token_converged is None:
            self.by_token = False
        else:
            self.iterations_L += solution.token_iterations.sum(0).cpu()
            self.tokens_converged += int(solution.token_converged.sum())
            if self.tolerance is not None:
                self.tokens_within += int((solution.token_residual <= self.tolerance).sum())

    def result(self, evaluation_set: EvaluationSet, ranks: Ranks, *, last_tokens: int) -> EvaluationResult:
        """Combine the sums of all ranks, each of which must call this."""
        length, sequences = evaluation_set.length, evaluation_set.sequences
        status = [torch.cat(column).cpu() for column in zip(*self.searches, strict=True)]
        every = [columns for columns in ranks.gather_objects(status) if columns]
        by_token = bool(every) and ranks.all(self.by_token)
        by_position = [*self.correct_L.tolist(), *self.scored_L.tolist(), *self.iterations_L.tolist()]
        whole = [self.sequences_correct, self.sequences_scored]
        loss, converged, within, correct, answered, *summed = ranks.sum(
            [self.loss, self.tokens_converged, self.tokens_within, *whole, *by_position]
        )
        correct_L, scored_L, iterations_L = torch.tensor(summed, dtype=torch.float64).view(3, length)
        return EvaluationResult(
            name=evaluation_set.name,
            settings=dict(evaluation_set.settings),
            length=length,
            sequences=sequences,
            loss=loss / scored if (scored := int(scored_L.sum())) else math.nan,
            accuracy=_ratio(correct_L, scored_L),
            accuracy_last=_ratio(correct_L[-last_tokens:], scored_L[-last_tokens:]),
            sequence_accuracy=correct / answered if answered else math.nan,
            search=search_statistics(*map(torch.cat, zip(*every, strict=True))) if every else None,
            token_converged=rounded(converged / (sequences * length)) if by_token else None,
            token_within=rounded(within / (sequences * length))
            if by_token and self.tolerance is not None
            else None,
            accuracy_by_position=tuple((correct_L / scored_L.clamp(min=1)).tolist()),
            iterations_by_position=tuple((iterations_L / sequences).tolist()) if by_token else None,
            seconds=time.perf_counter() - self.began,
        )


def _share(
    evaluation_set: EvaluationSet, batch_size: int, ranks: Ranks, *, equal_calls: bool
) -> Iterator[tuple[Batch | None, bool]]:
    """Iterate over a rank's share of a set, in the same number of turns on every rank.

    Turns with False only keep the number of turns equal, with a batch if the model must be called.
    """
    turns = 0
    for batch in evaluation_set.batches(batch_size, rank=ranks.rank, world_size=ranks.world_size):
        yield batch, True
        turns += 1
    largest_share = -(-evaluation_set.sequences // ranks.world_size)
    for _ in range(turns, -(-largest_share // batch_size)):
        yield evaluation_set.source.batch(0, 1) if equal_calls else None, False


def _ratio(correct: Tensor, scored: Tensor) -> float:
    return int(correct.sum()) / count if (count := int(scored.sum())) else math.nan


def table(results: Iterable[EvaluationResult], *, last_tokens: int, words: bool) -> str:
    """Return the results as an aligned text table of accuracies (``words``) or perplexities."""
    rows = [
        ["set", f"last {last_tokens}", "all", "sequences", "loss"] if words else ["set", "perplexity", "loss"]
    ]
    results = list(results)
    searched = any(result.search is not None for result in results)
    if searched:
        rows[0] += ["iterations", "max", "residual", "max", "converged"]
    for result in results:
        if words:
            shares = (result.accuracy_last, result.accuracy, result.sequence_accuracy)
            row = [result.name, *(f"{share:.2%}" for share in shares), f"{result.loss:.4f}"]
        else:
            row = [result.name, f"{result.perplexity:.3f}", f"{result.loss:.4f}"]
        if result.search is not None:
            search = result.search
            row += [f"{search.iterations:.1f}", f"{search.iterations_max}", f"{search.residual:.1e}"]
            row += [f"{search.residual_max:.1e}", f"{1.0 - search.non_converged:.1%}"]
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]
    return "\n".join(lines)

"""Running all tasks for each budget of iterations; the scores as JSON and tables."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lm_eval
from lm_eval.api.metrics import mean, mean_stderr, perplexity
from lm_eval.api.task import Task

from trainer.errors import DataError
from trainer.evaluation.harness import HarnessLM, SearchTally
from trainer.reporting.metrics import rounded
from trainer.specs.evaluation_tasks import EvaluationTaskSpec

PAPER_COLUMNS = ("LMB ppl", "LMB", "HS", "PIQA", "ArcE", "ArcC", "WG", "OBQA")
"""Columns of the paper's table, in order."""
_AVERAGED = PAPER_COLUMNS[1:]


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """A task ready to run, with the name that the user gave."""

    name: str
    spec: EvaluationTaskSpec
    task: Task
    file: Path | None


@dataclass(frozen=True, kw_only=True)
class TaskScore:
    """A model's score on one task.

    ``metrics`` are lm-eval's, ``errors`` their standard errors over the items if available (for a perplexity
    to first order). ``columns`` maps metrics to headers of the table. ``search`` is None without searches;
    ``truncated`` is the number of requests whose context was truncated.
    """

    name: str
    items: int
    metrics: Mapping[str, float]
    errors: Mapping[str, float]
    columns: Mapping[str, str]
    search: SearchTally | None
    truncated: int
    seconds: float
    samples: Sequence[Mapping[str, Any]]

    def as_row(self) -> dict[str, Any]:
        """Return the score as JSON values."""
        search = None if self.search is None else {k: _number(v) for k, v in vars(self.search).items()}
        return {
            "items": self.items,
            **{name: _number(value) for name, value in self.metrics.items()},
            **{f"{name}_stderr": _number(value) for name, value in self.errors.items()},
            "search": search,
            "truncated": self.truncated,
            "seconds": rounded(self.seconds, 4),
        }


@dataclass(frozen=True, kw_only=True)
class Scores:
    """All tasks at one budget of self-iterations; None uses the spec's stopping."""

    self_iterations: int | None
    tasks: Sequence[TaskScore]

    def columns(self) -> dict[str, float]:
        """Return the table's values by header: the paper's first, with their mean if all are present."""
        values = {
            header: task.metrics[metric] for task in self.tasks for metric, header in task.columns.items()
        }
        ordered = {header: values.pop(header) for header in PAPER_COLUMNS if header in values}
        if all(header in ordered for header in _AVERAGED):
            ordered["mean"] = sum(ordered[header] for header in _AVERAGED) / len(_AVERAGED)
        return {**ordered, **values}

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield every item: its requests, responses and metrics."""
        for task in self.tasks:
            for sample in task.samples:
                counts = {name: sample[name] for name in sample["metrics"]}
                yield {
                    "task": task.name,
                    "self_iterations": self.self_iterations,
                    "item": sample["doc_id"],
                    "requests": sample["arguments"],
                    "answers": sample["filtered_resps"],
                    "target": sample["target"],
                    **counts,
                }

    def as_row(self) -> dict[str, Any]:
        """Return the scores as JSON values."""
        return {
            "self_iterations": self.self_iterations,
            "columns": {header: _number(value) for header, value in self.columns().items()},
            "tasks": {task.name: task.as_row() for task in self.tasks},
        }


def run_tasks(
    lm: HarnessLM,
    tasks: Sequence[EvalTask],
    *,
    budgets: Sequence[int | None] = (None,),
    limit_name: str = "max_iterations",
    search: Mapping[str, float] | None = None,
    limit: int | None = None,
    announce: Callable[[str], None] = lambda text: None,
    found: list[Scores] | None = None,
    failed: dict[str, str] | None = None,
    on_result: Callable[[], object] = lambda: None,
) -> list[Scores]:
    """Run every task at every budget; a task that fails leaves the results of the others.

    Args:
        lm: the model.
        tasks: the tasks.
        budgets: maximum numbers of iterations; None: as in the model's spec.
        limit_name: the search option that sets them; ``"loops"`` for a model with a fixed number.
        search: further search options, such as the tolerance.
        limit: only the first items of each task.
        announce: called with a message before and after each task.
        found: list to append the scores to as they arrive, so that they survive a failure; None: a new list.
        failed: collects the error of each task that fails, by its name and budget; None: errors propagate.
        on_result: called after every task that was scored.

    """
    found = [] if found is None else found
    for budget in budgets:
        search_options = {**(search or {}), **({} if budget is None else {limit_name: budget})}
        scores: list[TaskScore] = []
        for task in tasks:
            announce(_label(task.name, budget))
            lm.restart(search=search_options)
            try:
                scores.append(_run_task(lm, task, limit=limit))
            except Exception as error:
                if failed is None:
                    raise
                failed[_label(task.name, budget)] = f"{type(error).__name__}: {error}"
                announce(f"  FAILED: {type(error).__name__}: {error}")
                continue
            if len(scores) == 1:
                found.append(Scores(self_iterations=budget, tasks=scores))
            announce(f"  {_summary(scores[-1])}")
            on_result()
    return found


def check_lengths(lm: HarnessLM, tasks: Sequence[EvalTask], *, limit: int | None, truncate: bool) -> None:
    """Check the lengths of all requests against the model's maximum before running any task.

    Args:
        lm: the model.
        tasks: the tasks.
        limit: only the first items of each task.
        truncate: whether contexts may be truncated; continuations never are.

    Raises:
        DataError: lists the tasks with requests that do not fit.

    """
    if not lm.limited:
        return
    most, complaints, longest = lm.max_length, [], 0
    for one in tasks:
        one.task.build_all_requests(limit=limit, rank=0, world_size=1)
        counts = lm.token_counts(one.task.instances)
        continuation = max((after for _, after in counts), default=0)
        # The model reads all tokens but the last.
        whole = [before + after - 1 for before, after in counts]
        too_long = sum(length > most for length in whole)
        longest = max(longest, *whole)
        if continuation > most:
            complaints.append(f"{one.name}: a continuation has {continuation} tokens")
        elif too_long and not truncate:
            complaints.append(
                f"{one.name}: {too_long} of {len(whole)} requests are longer, up to {max(whole)} tokens"
            )
    if complaints:
        listed = "".join(f"\n  {complaint}" for complaint in complaints)
        remedy = (
            f"raise the maximum (--max-length, max_length) to at least {longest}"
            if truncate
            else f"truncate the contexts on the left (--max-length {most}, max_length)"
        )
        raise DataError(
            f"requests exceed the maximum of {most} tokens:{listed}\n{remedy}, or omit these tasks"
        )


def _run_task(lm: HarnessLM, eval_task: EvalTask, *, limit: int | None) -> TaskScore:
    began = time.perf_counter()
    # One task at a time: lm-eval mixes the requests of several, which would mix their search statistics.
    # Without lm-eval's bootstrap of standard errors, which uses separate processes and seeds.
    found = lm_eval.evaluate(
        lm, {"tasks": {eval_task.name: eval_task.task}}, limit=limit, bootstrap_iters=0, log_samples=True
    )
    samples = found["samples"][eval_task.name]
    metrics = {
        name.removesuffix(",none"): float(value)
        for name, value in found["results"][eval_task.name].items()
        if isinstance(value, int | float) and "," in name and "_stderr" not in name
    }
    columns = eval_task.spec.columns or {name: f"{eval_task.name} {name}" for name in metrics}
    absent = [name for name in columns if name not in metrics]
    if absent:
        raise ValueError(
            f"{eval_task.name} has no metric {', '.join(absent)}; its metrics are {', '.join(metrics)}"
        )
    return TaskScore(
        name=eval_task.name,
        items=found["n-samples"][eval_task.name]["effective"],
        metrics=metrics,
        errors=_errors(eval_task.task, samples),
        columns=columns,
        search=lm.tally(),
        truncated=lm.truncated,
        seconds=time.perf_counter() - began,
        samples=samples,
    )


def _errors(task: Task, samples: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if len(samples) < 2:
        return {}
    errors = {}
    for metric, aggregation in task.aggregation().items():
        values = [sample[metric] for sample in samples if metric in sample]
        if len(values) != len(samples):
            continue
        if aggregation is mean:
            errors[metric] = float(mean_stderr(values))
        elif aggregation is perplexity:  # exp(−mean), to first order
            errors[metric] = float(perplexity(values) * mean_stderr(values))
    return errors


def _number(value: float | None) -> float | None:
    """Return a value rounded for JSON; None if it is not finite."""
    if not isinstance(value, float):
        return value
    return rounded(value) if math.isfinite(value) else None


def _label(name: str, budget: int | None) -> str:
    return name if budget is None else f"{name}, {budget} self-iteration{'s' if budget > 1 else ''}"


def _summary(score: TaskScore) -> str:
    parts = [f"{name} {value:.4g}" for name, value in score.metrics.items()]
    if score.search is not None:
        parts.append(f"iterations {score.search.iterations:.1f}")
        parts.append(f"converged {1.0 - score.search.non_converged:.1%}")
    if score.truncated:
        parts.append(f"{score.truncated} requests truncated")
    return f"{', '.join(parts)} ({score.items} items, {score.seconds:.0f} s)"

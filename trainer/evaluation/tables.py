"""Tables of scores in Markdown. Imports no lm-eval, which is not needed for perplexities of token files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainer.evaluation.evaluate import EvaluationResult
    from trainer.evaluation.scores import Scores


def paper_table(found: Sequence[Scores]) -> str:
    """Return the paper's columns as a Markdown table, one row per budget of iterations."""
    columns = list(found[0].columns())
    searched = any(task.search is not None for scores in found for task in scores.tasks)
    header = ["self-iterations", *columns, *(["iterations", "converged"] if searched else [])]
    rows = []
    for scores in found:
        values = scores.columns()
        row = ["as in the spec" if scores.self_iterations is None else str(scores.self_iterations)]
        row += [_cell(name, values[name]) if name in values else "" for name in columns]
        if searched:
            tallies = [task.search for task in scores.tasks if task.search is not None]
            sequences = max(1, sum(tally.sequences for tally in tallies))
            iterations = sum(tally.iterations * tally.sequences for tally in tallies) / sequences
            unconverged = sum(tally.non_converged * tally.sequences for tally in tallies) / sequences
            row += [f"{iterations:.1f}", f"{1.0 - unconverged:.1%}"]
        rows.append(row)
    return markdown([header, *rows])


def task_table(found: Sequence[Scores]) -> str:
    """Return all metrics per task, with standard errors and search statistics, as a Markdown table."""
    header = ["task", "self-iterations", "items", "metric", "value", "±", "iterations", "max", "converged"]
    rows = []
    for scores in found:
        for task in scores.tasks:
            for metric, value in task.metrics.items():
                error = task.errors.get(metric)
                search = task.search
                rows.append(
                    [
                        task.name,
                        "" if scores.self_iterations is None else str(scores.self_iterations),
                        str(task.items),
                        metric,
                        _cell(metric, value),
                        "" if error is None else _cell(metric, error),
                        "" if search is None else f"{search.iterations:.1f}",
                        "" if search is None else str(search.iterations_max),
                        "" if search is None else f"{1.0 - search.non_converged:.1%}",
                    ]
                )
    return markdown([header, *rows])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the first of them the header, as an aligned Markdown table."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "| " + " | ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "| " + " | ".join("-" * (width - 1) + ":" for width in widths) + " |")
    return "\n".join(lines)


def _cell(name: str, value: float) -> str:
    if "ppl" not in name and "perplexity" not in name:
        return f"{value:.4f}"
    return f"{value:.2f}" if value < 1e6 else f"{value:.2e}"


def length_table(found: Sequence[EvaluationResult]) -> str:
    """Return the perplexities of token files, one row per length and budget of iterations."""
    rows = [["length", "sequences", "perplexity", "loss", "iterations", "max", "converged"]]
    budgets = any("self_iterations" in result.settings for result in found)
    if budgets:
        rows[0].insert(1, "self-iterations")
    for result in found:
        search = result.search
        row = [str(result.length), str(result.sequences), f"{result.perplexity:.3f}", f"{result.loss:.4f}"]
        if budgets:
            row.insert(1, f"{result.settings['self_iterations']:g}")
        row += ["", ""] if search is None else [f"{search.iterations:.1f}", str(search.iterations_max)]
        row += [""] if search is None else [f"{1.0 - search.non_converged:.1%}"]
        rows.append(row)
    return markdown(rows)

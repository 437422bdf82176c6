"""What is measured of a trained run: held-out text, at the trained number of loops and at others."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from implicit_blocks.models.implicit import ImplicitLM
from trainer.data.source import EvaluationSet
from trainer.data.tokens import TokenData
from trainer.evaluation.evaluate import EvaluationResult, evaluate
from trainer.experiments.common.runs import data_of, evaluation_set
from trainer.reporting.metrics import rounded
from trainer.specs.run import RunSpec

LOOPS = (8, 16, 32)
"""Numbers of loops in evaluation, besides the trained one."""
BUDGETS = (16, 32)
"""Iterations within which tokens may converge."""
TOLERANCE = 1e-3
SEARCHED = 32
"""Sequences of the searches for the fixed point, which run in float32."""

CHOICE, REPORT = "choice", "report"
"""The sets: text held out from training, on which recipes are chosen; books that decide nothing."""


def evaluation_sets(spec: RunSpec, report: Path, *, sequences: int | None = None) -> dict[str, EvaluationSet]:
    """Return both sets of a run: the validation split of its tokens, and the tokens in ``report``.

    Raises:
        ValueError: there is no validation split, or a folder cannot be read.

    """
    data = data_of(spec)
    count = spec.evaluation.sequences if sequences is None else sequences
    if not data.evaluation_sets(spec.evaluation.at(spec.data.seq_len)):
        raise ValueError(
            f"the tokens in {getattr(spec.data, 'path', None)} have no validation split, on which recipes "
            "are chosen; tokenize with --validation"
        )
    chosen = evaluation_set(spec, data, spec.data.seq_len, count)
    books = TokenData(
        report,
        length=spec.data.seq_len,
        seed=spec.evaluation.seed,
        vocab_size=getattr(spec.model, "vocab_size", None),
    )
    reported = EvaluationSet(name=REPORT, source=books, sequences=min(count, books.samples))
    return {CHOICE: chosen, REPORT: reported}


def windows(sets: Mapping[str, EvaluationSet]) -> dict[str, Any]:
    """Return what identifies the evaluation windows: text, number and length of the sequences."""
    return {
        name: {"text": dict(one.source.identity()), "sequences": one.sequences, "length": one.length}
        for name, one in sets.items()
    }


def measure(
    model: nn.Module,
    spec: RunSpec,
    sets: Mapping[str, EvaluationSet],
    *,
    device: torch.device,
    loops: Sequence[int] = LOOPS,
) -> dict[str, Any]:
    """Return perplexities on both sets, and of an implicit model those at other numbers of loops.

    ``loops`` and ``fixed_point`` rows are measured on the reported set. Each token's convergence is that of
    the search with prefix scope: within the tolerance, and so are those before it.
    """

    def run(one: EvaluationSet, precision: str, **search: Any) -> EvaluationResult:
        (result,) = evaluate(
            model,
            [one],
            device=device,
            precision=precision,
            batch_size=spec.evaluation.batch_size,
            last_tokens=spec.evaluation.last_tokens,
            search=search,
        )
        return result

    precision = spec.training.precision
    implicit = isinstance(model, ImplicitLM)
    depth = getattr(getattr(spec.model, "depth", None), "loops", None) if implicit else None
    trained = {} if depth is None else {"loops": depth}
    found: dict[str, Any] = {name: _row(run(one, precision, **trained)) for name, one in sets.items()}
    if not implicit:
        return found
    report = sets[REPORT]
    few = EvaluationSet(name=REPORT, source=report.source, sequences=min(SEARCHED, report.sequences))
    found["loops"] = [
        {"loops": n, **_row(run(report, precision, loops=n))} for n in sorted({*loops, *trained.values()})
    ]
    found["fixed_point"] = [
        {
            "max_iterations": most,
            "tolerance": TOLERANCE,
            "damping": damping,
            **_row(run(few, "float32", tolerance=TOLERANCE, max_iterations=most, damping=damping)),
        }
        for most in BUDGETS
        for damping in (1.0, 0.8)
    ]
    found["trained_loops_few"] = _row(run(few, "float32", **trained))
    return found


def _row(result: EvaluationResult) -> dict[str, Any]:
    search = result.search
    row = {
        "loss": rounded(result.loss, 7),
        "perplexity": rounded(result.perplexity),
        "sequences": result.sequences,
    }
    if search is None:
        return row
    return {
        **row,
        "iterations": rounded(search.iterations),
        "residual": rounded(search.residual),
        "residual_max": rounded(search.residual_max),
        "token_converged": result.token_converged,
        "diverged": rounded(search.diverged),
    }

"""Scores: standard errors, and means over tasks of different sizes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="benchmarks need the extra 'eval'")

from lm_eval.api.metrics import mean, median, perplexity

from trainer.evaluation.harness import SearchTally
from trainer.evaluation.scores import Scores, TaskScore, _errors
from trainer.evaluation.tables import paper_table


def test_errors_are_of_the_mean_and_to_first_order_of_a_perplexity() -> None:
    task: Any = SimpleNamespace(
        aggregation=lambda: {"acc": mean, "perplexity": perplexity, "middle": median, "other": mean}
    )
    samples = [{"acc": acc, "perplexity": -acc, "middle": acc} for acc in (0.0, 1.0, 1.0, 2.0)]
    deviation = math.sqrt(2 / 3) / math.sqrt(4)
    assert _errors(task, samples) == {
        "acc": pytest.approx(deviation), "perplexity": pytest.approx(math.e * deviation)
    }  # fmt: skip
    assert _errors(task, samples[:1]) == {}


def test_iterations_of_the_table_are_means_over_sequences() -> None:
    def score(name: str, sequences: int, iterations: float, open_: float) -> TaskScore:
        search = SearchTally(
            sequences=sequences, iterations=iterations, iterations_max=9, token_iterations=None,
            residual=0.1, residual_max=0.1, non_converged=open_, diverged=0.0,
        )  # fmt: skip
        return TaskScore(
            name=name, items=1, metrics={"acc": 0.5}, errors={}, columns={"acc": name}, search=search,
            truncated=0, seconds=1.0, samples=[],
        )  # fmt: skip

    tasks = [score("WG", 30, 2.0, 0.0), score("HS", 10, 6.0, 1.0)]
    *_, row = paper_table([Scores(self_iterations=None, tasks=tasks)]).splitlines()
    assert [cell.strip() for cell in row.split("|")[2:-1]] == ["0.5000", "0.5000", "3.0", "75.0%"]

"""The task of a model that tracks products: its elements, and the right answer at each token.

Such a model predicts at each token the product of all tokens so far, not the token that follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from implicit_blocks.checkpoints.find import SPEC
from implicit_blocks.checkpoints.run_folder import run_of
from implicit_blocks.specs import load_spec


class WordProblem(Protocol):
    """The elements that token IDs stand for, as the data of a run describe them.

    ``names`` and ``permutations`` (the images of 0, 1, …) have one entry per token ID, or none.
    """

    name: str
    names: Sequence[str]
    permutations: Sequence[Sequence[int]]

    def products(self, tokens: Sequence[int]) -> list[int]:
        """Return the product of the tokens up to each."""


def word_problem_of(source: Path) -> WordProblem | None:
    """Return the word problem that a run or a checkpoint of one was trained on; None for other sources."""
    run = run_of(source)
    if run is None:
        return None
    notation = getattr(getattr(load_spec(run / SPEC), "data", None), "notation", None)
    problem: WordProblem | None = None if notation is None else notation()
    return problem


def group_card(problem: WordProblem | None) -> dict[str, Any] | None:
    """Return a word problem as JSON."""
    if problem is None:
        return None
    return {
        "name": problem.name,
        "names": list(problem.names),
        "permutations": [list(each) for each in problem.permutations],
    }

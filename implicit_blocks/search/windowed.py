"""Windowed search: a few tokens at a time, each window given the solution of those before it.

Block Gauss-Seidel over time: causality makes the system of all tokens block triangular, so that solving the
blocks in order solves it (L. Hageman and D. Young, "Applied Iterative Methods", 1981). For non-linear
recurrences: Y. Song et al., "Accelerating Feedforward Computation via Parallel Nonlinear Equation Solving",
ICML 2021.

Shape legend: B batch, L tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map, SequenceMap, Solver
from implicit_blocks.solution import Solution
from implicit_blocks.specs import Stopping
from implicit_blocks.specs.base import require_count

if TYPE_CHECKING:
    from implicit_blocks.search.search import Search


@dataclass
class WindowedSearch:
    """Search ``length`` tokens at a time; each window stops independently, and its state is committed.

    Use it where a token's solution depends strongly on that of the token before it, so that searches over L
    tokens take a number of iterations that grows with L: windows then spare the iterations of tokens that
    cannot converge yet. Where the number does not grow, as in language models, windows save nothing, and
    small ones leave a GPU idle. Where each token's equation has one fixed point, the result is the same, to
    the tolerance; where it has several, windows may find another one.

    The stopping rule applies to each window: with scope ``sequence`` a row stops window by window, and
    ``max_iterations`` limits each window. A row reports the iterations of its slowest window and its worst
    residual. A window that has not converged is committed with its best value.

    Calls of ``f`` for a token: its window's iterations, and one to commit it (none for the last window).

    Args:
        search: the search of each window.
        length: tokens per window, at least 1; the last window may be shorter.

    Raises:
        ValueError: a length below 1.

    """

    search: Search
    length: int

    def __post_init__(self) -> None:
        require_count("window_length", self.length)
        self.solver: Solver = self.search.solver
        self.stopping: Stopping = self.search.stopping
        self.valid: Tensor | None = self.search.valid
        self.agree, self.loops = self.search.agree, self.search.loops
        self.trajectory, self.trace = self.search.trajectory, self.search.trace

    def __call__(self, f: Map, z0: Tensor) -> Solution:
        """Search from ``z0`` (B, L, …), without gradients.

        Raises:
            ValueError: ``f`` cannot be cut in time.

        """
        if not isinstance(f, SequenceMap):
            raise ValueError(
                f"a search in windows of {self.length} tokens needs a map with the methods first and after, "
                f"as language models have; got {type(f).__name__}"
            )
        found: list[Solution] = []
        criterion = self.search.exit
        with torch.no_grad():
            for part in z0.detach().split(self.length, dim=1):
                if found:
                    f = f.after(found[-1].z)
                    criterion = criterion and criterion.restrict("after", found[-1].z)
                at, tokens = sum(window.z.shape[1] for window in found), part.shape[1]
                valid = None if self.valid is None else self.valid[:, at : at + tokens]
                head, of_head = f, criterion
                if at + tokens < z0.shape[1]:
                    head, of_head = f.first(tokens), criterion and criterion.restrict("first", tokens)
                loops = None if self.loops is None else self.loops.cut(at, at + tokens)
                found.append(replace(self.search, valid=valid, loops=loops, exit=of_head)(head, part))
        return Solution.concatenate(found)

    def report(self, z: Tensor, fz: Tensor, *, iterations: int | Tensor) -> Solution:
        """Return a solution with the value ``z``, given ``f(z)``, measured over all tokens."""
        return self.search.report(z, fz, iterations=iterations)

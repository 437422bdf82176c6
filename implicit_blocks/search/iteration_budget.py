"""A budget of iterations: the tolerance that keeps the mean number of iterations at a target.

The residual of a search falls by about the same factor in each iteration, so that the number of iterations is
about proportional to the logarithm of the tolerance. The controller multiplies that logarithm by a power of
the wanted over the measured number, whose exponent halves whenever a call was corrected too far.
"""

from __future__ import annotations

import math

from implicit_blocks.solution import Solution

TIGHTEST = 1e-6
"""The smallest tolerance."""
LOOSEST = 0.9
"""The largest tolerance."""
FIRST = 0.05
"""The tolerance of the first call, unless another one is given."""
LEAST_GAIN = 0.1
"""The smallest exponent of a correction."""
CALLS = 4
"""Calls in which iterations that are owed, or were too many, are made up for."""


class IterationBudget:
    """Keeps the mean number of iterations of consecutive calls at a target by adjusting the tolerance.

    Users pay for iterations, and the tolerance for which a model takes 8 of them is rarely known. Pass
    ``tolerance`` to each call and ``record`` its solution::

        budget = ib.IterationBudget(8)
        for ids in batches:
            output = model(ids, tolerance=budget.tolerance)
            budget.record(output.solution)

    The mean is over sequences; with scope ``prefix`` a sequence has the iterations of its slowest token. The
    same calls give the same tolerances. A target above the limit on iterations, or below what the loosest
    tolerance takes, is not reached; ``mean`` says what was.

    Args:
        mean_iterations: the target, at least 1; it should be well below ``max_iterations``.
        tolerance: of the first call.

    Raises:
        ValueError: the target is below 1 or not finite, or the tolerance is outside 1e-6 to 0.9.

    """

    def __init__(self, mean_iterations: float, *, tolerance: float = FIRST) -> None:
        if not 1 <= mean_iterations < math.inf:
            raise ValueError(f"mean_iterations must be at least 1 and finite, got {mean_iterations!r}")
        if not TIGHTEST <= tolerance <= LOOSEST:
            raise ValueError(f"tolerance must be in [{TIGHTEST:g}, {LOOSEST:g}], got {tolerance!r}")
        self.target = float(mean_iterations)
        self.tolerance = tolerance
        """The tolerance for the next call."""
        self._sum, self._sequences = 0, 0
        self._gain, self._above = 1.0, False

    @property
    def mean(self) -> float:
        """The mean so far; NaN before the first call."""
        return self._sum / self._sequences if self._sequences else math.nan

    def record(self, solution: Solution) -> None:
        """Count the iterations of a call, and choose the tolerance for the next one; waits for the device."""
        own, count = int(solution.iterations.sum()), solution.iterations.numel()
        if not count:
            return
        self._sum, self._sequences = self._sum + own, self._sequences + count
        owed = (self.target * self._sequences - self._sum) / (CALLS * count)
        wanted = min(max(self.target + owed, self.target / 2), 2 * self.target)
        above = own > wanted * count
        if self._sequences > count:
            turned = above != self._above
            self._gain = max(self._gain / 2, LEAST_GAIN) if turned else min(1.25 * self._gain, 1.0)
        self._above = above
        factor = min(max((wanted * count / max(own, 1)) ** self._gain, 0.5), 2.0)
        self.tolerance = min(max(self.tolerance**factor, TIGHTEST), LOOSEST)

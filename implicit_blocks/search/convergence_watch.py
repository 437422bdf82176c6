"""One warning where many of a training run's searches or adjoints don't converge. Imports no torch.

A single solve that doesn't converge is normal, and its solution says so. A training run in which a quarter of
them don't is often a mistake that nobody looks for, since the loss falls all the same.
"""

from __future__ import annotations

SOLVES = 20
"""Solves in training that are looked at together: the batches of so many steps."""

SHARE = 0.25
"""The share of rows that may stay above the tolerance without a warning."""

BOUNDED = 8
"""A search of fewer iterations is cut off on purpose, as those of a run's bounded phase are; no warning."""


class ConvergenceWarning(UserWarning):
    """Many searches, or adjoint solves, of a layer in training did not converge."""


def expects_convergence(*, searches: bool, tolerance: float, max_iterations: int) -> bool:
    """Whether searches by this rule are supposed to reach the tolerance.

    Not those with the tolerance 0, nor those that are cut off after fewer than 8 iterations, nor steps that
    are no search (``GradientEstimator.searches``).
    """
    return searches and tolerance > 0 and max_iterations >= BOUNDED


class ConvergenceWatch:
    """Takes in the share of unconverged rows, solve by solve, and reports a large one once.

    Args:
        what: the solves, which begin the message: "searches".
        remedy: what to do, which ends it.

    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        self.reported = False
        self._shares: list[float] = []

    def add(self, share: float) -> str | None:
        """Take in a solve's share of unconverged rows; return the warning where it is due."""
        if self.reported:
            return None
        self._shares.append(share)
        if len(self._shares) < SOLVES:
            return None
        mean = sum(self._shares) / len(self._shares)
        self._shares.clear()
        if mean <= SHARE:
            return None
        self.reported = True
        steps = f"the last {SOLVES} training steps"
        return f"{mean:.0%} of the {self.what} of {steps} did not converge; {self.remedy}"


def search_watch() -> ConvergenceWatch:
    """Return a watch of searches."""
    return ConvergenceWatch(
        "searches",
        "the model is trained at points that are not fixed points: raise stopping.max_iterations or "
        "stopping.tolerance, dampen the solver, or choose another one",
    )


def adjoint_watch() -> ConvergenceWatch:
    """Return a watch of the adjoint solves of ``implicit_function``."""
    return ConvergenceWatch(
        "adjoint solves",
        "the gradient is not that of the fixed point: raise max_iterations of the gradient's stopping, "
        "choose another solver for it, or use the gradient phantom",
    )

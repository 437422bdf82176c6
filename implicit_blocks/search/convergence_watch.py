"""One warning if many of a training run's searches or adjoints don't converge. Imports no torch.

A single solve that doesn't converge is normal, and its solution reports it. A training run in which a quarter
of them don't is often a mistake that goes unnoticed, since the loss falls nevertheless.
"""

from __future__ import annotations

SOLVES = 20
"""The number of training steps whose solves are evaluated together."""

SHARE = 0.25
"""The largest share of rows above the tolerance that gives no warning."""

BOUNDED = 8
"""A search of fewer iterations is cut off deliberately, as in a run's bounded phase, and gives no warning."""


class ConvergenceWarning(UserWarning):
    """Many searches, or adjoint solves, of a layer in training did not converge."""


def expects_convergence(*, searches: bool, tolerance: float, max_iterations: int) -> bool:
    """Whether searches by this rule are expected to reach the tolerance.

    Not with the tolerance 0, nor with fewer than 8 iterations, nor if the gradient estimator takes steps
    without a search (``GradientEstimator.searches``).
    """
    return searches and tolerance > 0 and max_iterations >= BOUNDED


class ConvergenceWatch:
    """Collects the share of unconverged rows, solve by solve, and reports a large share once.

    Args:
        what: the name of the solves in the message, such as "searches".
        remedy: what to do, at the end of the message.

    """

    def __init__(self, what: str, remedy: str) -> None:
        self.what, self.remedy = what, remedy
        self.reported = False
        self._shares: list[float] = []

    def add(self, share: float) -> str | None:
        """Add a solve's share of unconverged rows; return the warning if it is due."""
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
        "the model is trained at points that are not fixed points: raise stopping.max_iterations (with a "
        "depth its loops) or stopping.tolerance, lower the solver's damping, or choose another solver",
    )


def adjoint_watch() -> ConvergenceWatch:
    """Return a watch of the adjoint solves of ``implicit_function``."""
    return ConvergenceWatch(
        "adjoint solves",
        "the gradient is not that of the fixed point: raise max_iterations of the gradient's stopping, "
        "choose another solver for it, or use the gradient phantom",
    )

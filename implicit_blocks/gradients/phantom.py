"""The phantom gradient: a search without gradients, then a few differentiated damped steps."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from implicit_blocks.cuda.host_copy import AsyncHostCopy
from implicit_blocks.gradients.diverged import replace_diverged, restore_diverged
from implicit_blocks.interfaces import GradientEstimator, Map, SearchLike, SteppingMap
from implicit_blocks.solution import Solution
from implicit_blocks.specs.base import require_count, require_share


class Phantom(GradientEstimator):
    """Differentiate ``steps`` damped Picard steps taken at the point that the search found.

    The gradient is ``λ ∂f/∂θ · Σ_{i<steps} (λ ∂f/∂z + (1 − λ) I)^i``: the Neumann series of the implicit
    function theorem's ``(I − ∂f/∂z)^{-1}``, damped and cut off (Geng et al., "On Training Implicit Models",
    NeurIPS 2021). The point is a constant in it, also in second derivatives, which are those of the steps
    alone. Biased, robust, and as cheap as a network of ``steps`` layers; memory holds the activations of the
    ``steps`` steps. If the gradient must be exact, use ``ImplicitFunction``.

    Calls of ``f``: the search's and ``steps`` more, which a ``SteppingMap``, such as a language model's,
    performs in one call of ``damped_steps``. The solution's ``z`` is the point after those steps; its
    residual and status are the search's. Rows whose search has diverged take no steps: they keep the search's
    best value, without a gradient, and affect neither the loss nor the weights' gradients, unless every row
    has diverged (or ``f`` is not a ``RowMap`` and a row's first call was not finite).

    Args:
        steps: number of differentiated steps, at least 1.
        damping: λ in (0, 1].

    Raises:
        ValueError: a number out of its range.

    """

    def __init__(self, *, steps: int = 4, damping: float = 0.8) -> None:
        require_count("steps", steps)
        require_share("damping", damping)
        self.steps, self.damping = steps, damping

    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Search, then take the differentiated steps."""
        solution = search(f, z0)
        # On a GPU the steps are launched before the flag is read, for which it would wait: in vain where some
        # rows have diverged.
        some = solution.diverged.any() & ~solution.diverged.all()
        flag = AsyncHostCopy(some) if some.is_cuda else None
        some_diverged = flag is None and bool(some)
        while True:
            z, rows = solution.z, None
            if some_diverged:
                f, rows = replace_diverged(f, z0, solution)
                z = z[rows]
            if isinstance(f, SteppingMap):
                z = f.damped_steps(z, count=self.steps, damping=self.damping)
            else:
                for _ in range(self.steps):
                    z = f(z) if self.damping == 1 else torch.lerp(z, f(z), self.damping)
            if flag is None or not flag.read():
                break
            flag, some_diverged = None, True
        return replace(solution, z=z if rows is None else restore_diverged(z, solution.z, solution))


def jacobian_free() -> Phantom:
    """Return the Jacobian-free estimator (Fung et al., "JFB", AAAI 2022): one undamped phantom step.

    The inverse ``(I − ∂f/∂z)^{-1}`` is replaced by the identity.
    """
    return Phantom(steps=1, damping=1.0)

"""The exact gradient by the implicit function theorem, with any solver for its linear equation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_blocks.gradients.diverged import call_at_solution
from implicit_blocks.interfaces import GradientEstimator, Map, SearchLike, Solver
from implicit_blocks.ops.backends import first_derivatives_only
from implicit_blocks.search.agreement import DividedRows
from implicit_blocks.search.search import Search
from implicit_blocks.solution import Adjoint, Solution
from implicit_blocks.solvers import Picard
from implicit_blocks.specs import Stopping
from implicit_blocks.specs.base import require_part


class ImplicitFunction(GradientEstimator):
    """Differentiate the fixed point, independently of the search that found it.

    At ``z = f(z, θ)`` the theorem gives ``dL/dθ = a ∂f/∂θ`` with ``a = dL/dz + a ∂f/∂z``: a fixed-point
    equation in ``a``, solved in backward by ``solver`` to its own tolerance (Bai et al., "Deep Equilibrium
    Models", NeurIPS 2019). Memory holds the activations of one call of ``f``, whatever the number of
    iterations. The gradient is as exact as both solves: far from convergence it is wrong, so check both
    residuals.

    The solution's ``adjoint.solution`` reports the backward solve once it has run: iterations, residual,
    status. The adjoint is solved in the precision of ``z``, also under autocast. Rows are solved in parallel;
    the scope is the whole row, since a token's gradient depends on the tokens after it. Backward raises
    ``RuntimeError`` if second derivatives are requested (``create_graph=True``): the point is a constant in
    it, so that they would lack its derivative. Use ``Unrolled`` for them. Rows whose search has diverged keep
    its best value, without a gradient (see `Phantom`).

    Calls of ``f``: the search's and one more; in backward one vector-Jacobian product per iteration.

    Args:
        solver: solver of the adjoint equation; Picard by default.
        stopping: its stopping rule; scope ``sequence``.

    Raises:
        ValueError: another scope; a solver or stopping of another type, such as its name or its spec.

    """

    retains_graph = True

    def __init__(self, *, solver: Solver | None = None, stopping: Stopping | None = None) -> None:
        require_part("solver", solver, Solver, such_as="Anderson(memory=5)")
        require_part("stopping", stopping, Stopping, such_as="Stopping(tolerance=1e-4)")
        self.solver = solver if solver is not None else Picard()
        self.stopping = stopping if stopping is not None else Stopping(tolerance=1e-4, max_iterations=64)
        if self.stopping.scope != "sequence":
            raise ValueError(
                f"the adjoint's stopping has scope {self.stopping.scope!r}, but a token's gradient depends "
                "on the tokens after it; give it the scope 'sequence'"
            )

    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Search, then attach the adjoint solve to one differentiated call."""
        found = call_at_solution(f, z0, search)
        value, adjoint = found.fz, Adjoint()
        if value.requires_grad:  # else the map depends on nothing differentiable, not even on z
            agree = getattr(search, "agree", None)  # a plain function has none
            agree = agree if isinstance(agree, DividedRows) else None
            backward = Search(solver=self.solver, stopping=self.stopping, agree=agree, valid=found.valid)
            value = _Implicit.apply(value, found.z, backward, adjoint)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return found.solution.with_value(found.restore(value), adjoint=adjoint)


class _Implicit(torch.autograd.Function):
    """Identity on ``fz``; in backward, ``g`` becomes the solution of ``a = g + a ∂f/∂z``."""

    @staticmethod
    def forward(ctx: Any, fz: Tensor, z: Tensor, search: Search, adjoint: Adjoint) -> Tensor:
        # A reference to the graph of fz makes no cycle, because this node comes after it.
        ctx.fz, ctx.z, ctx.search, ctx.adjoint = fz, z, search, adjoint
        return fz.detach()

    @staticmethod
    @first_derivatives_only(
        "the gradient of ImplicitFunction",
        "use the gradient Unrolled, which can be differentiated any number of times",
    )
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        fz, z = ctx.fz, ctx.z
        target = g.to(z.dtype)

        def transposed(a: Tensor) -> Tensor:
            with torch.enable_grad(), torch.autocast(a.device.type, enabled=False):
                (product,) = torch.autograd.grad(fz, z, a.to(fz.dtype), retain_graph=True, allow_unused=True)
            return target if product is None else target + product.to(target.dtype)

        solution = ctx.search(transposed, target)
        ctx.adjoint.add(solution)
        return solution.z.to(fz.dtype), None, None, None

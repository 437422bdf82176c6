"""``FixedPoint``: an implicit layer from any map."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from implicit_blocks._utils.describe import shape_and_type
from implicit_blocks.gradients import LastLoops, Phantom
from implicit_blocks.interfaces import GradientEstimator, Map, Solver
from implicit_blocks.ops.backends import is_transformed
from implicit_blocks.search.convergence_watch import ConvergenceWarning, expects_convergence
from implicit_blocks.search.options import SearchOptions
from implicit_blocks.search.search import solve_fixed_point
from implicit_blocks.solution import Solution
from implicit_blocks.solvers import Picard
from implicit_blocks.specs import Stopping
from implicit_blocks.specs.base import require_part


class FixedPoint(nn.Module):
    """The layer whose output is the ``z`` with ``z = f(z, x)``.

    ```python
    layer = FixedPoint(lambda z, x: torch.tanh(linear(z) + x), stopping=Stopping(tolerance=1e-4))
    solution = layer(x)     # solution.z is the output; see also .iterations, .residual, .converged
    ```

    Rows of the batch are solved in parallel and stop independently. A search that does not converge raises no
    error: check ``solution.converged``. The first search in training in which a row does not converge gives a
    ``ConvergenceWarning``, and so does the first such adjoint solve in backward: one of each per layer.
    Searches of fewer than 8 iterations or with the tolerance 0 are assumed to be cut off deliberately and
    give no warning. Under autocast ``z`` keeps the type of its start, whatever the type in which ``f``
    computes.

    With ``returns="tensor"`` a call returns the fixed point alone, so that the layer fits ``nn.Sequential``;
    the warnings are then the only sign of a search that does not converge.

    Args:
        f: any callable ``f(z, x)`` that returns ``z``'s shape, each row from its own row; a module's
            parameters become this layer's.
        solver: Picard by default.
        gradient: phantom with its defaults. Used if gradients are enabled; otherwise only the search runs.
        stopping: tolerance, iterations, norm, scope.
        returns: ``"solution"``, or ``"tensor"`` for its ``z`` alone.

    Raises:
        ValueError: a solver, gradient or stopping of another type, such as its name or its spec.

    """

    def __init__(
        self,
        f: Callable[[Any, Any], Any],
        *,
        solver: Solver | None = None,
        gradient: GradientEstimator | None = None,
        stopping: Stopping | None = None,
        returns: Literal["solution", "tensor"] = "solution",
    ) -> None:
        super().__init__()
        if not callable(f):
            raise ValueError(f"f is {f!r}; give a function f(z, x), or a module")
        require_part("solver", solver, Solver, such_as="Anderson(memory=5)")
        require_part("gradient", gradient, GradientEstimator, such_as="Phantom(steps=4)")
        require_part("stopping", stopping, Stopping, such_as="Stopping(tolerance=1e-3)")
        self.f = f
        self.solver = solver if solver is not None else Picard()
        self.gradient = gradient if gradient is not None else Phantom()
        self.stopping = stopping if stopping is not None else Stopping()
        if returns not in ("solution", "tensor"):
            raise ValueError(f"returns is {returns!r}; choose 'solution' or 'tensor'")
        self.returns = returns
        self._warned: set[str] = set()

    def extra_repr(self) -> str:
        """Return the solver, gradient and stopping rule for the module's representation."""
        return f"solver={self.solver!r}, gradient={self.gradient!r}, stopping={self.stopping!r}"

    def forward(
        self,
        x: Any,
        z0: Any = None,
        *,
        trace: bool = False,
        tolerance: float | None = None,
        max_iterations: int | None = None,
    ) -> Any:
        """Solve for the fixed point; return the ``Solution``, or with ``returns="tensor"`` its ``z``.

        Args:
            x: passed to ``f`` unchanged: a tensor, or any object if ``z0`` is given.
            z0: the start, (B, …) with at least two dimensions; zeros of ``x``'s shape by default. It may be a
                tuple, list or dict of tensors that lead with B and share a type. ``f`` then receives and
                returns this structure, the solution's ``z`` has it, and residuals cover all of it.
            trace: keep the residual of every iteration.
            tolerance: of this call's search; None: that of ``stopping``.
            max_iterations: of this call's search; None: that of ``stopping``.

        Raises:
            ValueError: if there is no start, if it is empty, not floating-point or inconsistent, if ``f``
                returns another shape or structure, if ``tolerance`` or ``max_iterations`` is out of range, if
                ``max_iterations`` would have no effect because the gradient estimator does not search, or if
                a tensor alone would drop its penalty.

        """
        stopping = SearchOptions(tolerance=tolerance, max_iterations=max_iterations).stopping(self.stopping)
        own_steps = not self.gradient.searches and not isinstance(self.gradient, LastLoops)
        if max_iterations is not None and own_steps and torch.is_grad_enabled():
            raise ValueError(
                f"max_iterations is {max_iterations}, but gradient {self.gradient!r} has its own number of "
                "steps; leave it out, or call without gradients, which searches"
            )
        if z0 is None:
            if not isinstance(x, Tensor):
                raise ValueError(f"x is a {type(x).__name__}, not a tensor; give the start z0")
            z0 = torch.zeros_like(x)
        if isinstance(z0, Tensor):
            solution = self._solve(lambda z: self._checked(z, x), z0, stopping, trace)
        else:
            solution = self._solve_structure(x, z0, stopping, trace)
        if self.returns == "solution":
            return solution
        if solution.penalty is not None:
            raise ValueError(
                f"gradient {self.gradient!r} has a penalty, which returns='tensor' would drop; choose "
                "returns='solution' and add solution.penalty.mean() to the loss"
            )
        return solution.z

    def _solve(self, f: Map, z0: Tensor, stopping: Stopping, trace: bool) -> Solution:
        solution = solve_fixed_point(
            f, z0, solver=self.solver, gradient=self.gradient, stopping=stopping, trace=trace
        )
        if torch.is_grad_enabled() and solution.z.requires_grad and not is_transformed():
            if expects_convergence(
                searches=self.gradient.searches,
                tolerance=stopping.tolerance,
                max_iterations=stopping.max_iterations,
            ):
                _warn_once(self._warned, "a search", solution)
            if solution.adjoint is not None:
                solution.adjoint.listeners.append(partial(_warn_once, self._warned, "an adjoint solve"))
        return solution

    def _checked(self, z: Tensor, x: Any) -> Tensor:
        fz: Tensor = self.f(z, x)
        if not isinstance(fz, Tensor):
            raise ValueError(f"f returned a {type(fz).__name__}; it must return a tensor")
        if fz.shape != z.shape:
            raise ValueError(
                f"f returned shape {tuple(fz.shape)} for z of shape {tuple(z.shape)}; the shapes must agree"
            )
        return _cast_like(z, fz)

    def _solve_structure(self, x: Any, z0: Any, stopping: Stopping, trace: bool) -> Solution:
        leaves, structure = pytree.tree_flatten(z0)
        _check_start(leaves)
        shapes = [leaf.shape for leaf in leaves]
        widths = [leaf[0].numel() for leaf in leaves]

        def pack(value: Any) -> Tensor:
            try:
                parts = structure.flatten_up_to(value)  # a dict's entries by name, in any order
            except ValueError as error:
                raise ValueError(f"f returned a structure that differs from z's: {error}") from None
            if [getattr(part, "shape", None) for part in parts] != shapes:
                returned = [tuple(p.shape) if isinstance(p, Tensor) else type(p).__name__ for p in parts]
                raise ValueError(f"f returned {returned} for z of {[tuple(shape) for shape in shapes]}")
            return torch.cat([part.reshape(part.shape[0], -1) for part in parts], dim=1)

        def unpack(packed: Tensor) -> Any:
            parts = [part.reshape(shape) for part, shape in zip(packed.split(widths, 1), shapes, strict=True)]
            return pytree.tree_unflatten(parts, structure)

        start = torch.cat([leaf.reshape(leaf.shape[0], -1) for leaf in leaves], dim=1)
        solution = self._solve(lambda z: _cast_like(z, pack(self.f(unpack(z), x))), start, stopping, trace)
        return solution.with_value(unpack(solution.z))


_REMEDIES = {
    "a search": (
        "the layer is trained at a point that is not a fixed point: raise max_iterations or tolerance of its "
        "stopping, lower the solver's damping, or choose another solver"
    ),
    "an adjoint solve": (
        "the gradient is not that of the fixed point: raise max_iterations of the gradient's stopping, "
        "choose another solver for it, or use the gradient Phantom"
    ),
}


def _warn_once(warned: set[str], what: str, solution: Solution) -> None:
    """Warn of a layer's first search, or adjoint solve, with rows that have not converged.

    Until then it copies one number per solve from the device.
    """
    if what in warned or solution.converged.is_meta:
        return
    unconverged = int((~solution.converged).sum())
    if unconverged:
        warned.add(what)
        rows, calls = solution.converged.numel(), int(solution.iterations.max())
        warnings.warn(
            f"FixedPoint: {unconverged} of {rows} rows did not converge in {what} of {calls} iterations "
            f"(largest residual {float(solution.residual.max()):.2g}); {_REMEDIES[what]}. This layer warns "
            "of it once",
            ConvergenceWarning,
            stacklevel=6,
        )


def _check_start(leaves: list[Any]) -> None:
    """Refuse a start that is not a structure of tensors of one batch size and type.

    Raises:
        ValueError: naming the parts that don't fit.

    """
    if not leaves or not all(isinstance(leaf, Tensor) for leaf in leaves):
        kinds = ", ".join(type(leaf).__name__ for leaf in leaves if not isinstance(leaf, Tensor))
        raise ValueError(
            f"z0 contains {kinds or 'nothing'}; give a tensor, or a tuple, list or dict of tensors only"
        )
    parts = [shape_and_type(leaf) for leaf in leaves]
    batches = {leaf.shape[:1] for leaf in leaves}
    if len(batches) > 1 or not all(leaf.numel() for leaf in leaves) or torch.Size() in batches:
        raise ValueError(
            f"z0 contains tensors {', '.join(parts)}; all must have the batch as first dimension, and no "
            "tensor may be empty"
        )
    if len({leaf.dtype for leaf in leaves}) > 1:
        raise ValueError(f"z0 contains tensors {', '.join(parts)}; give all of them the same type")


def _cast_like(z: Tensor, fz: Tensor) -> Tensor:
    """Return ``f(z)`` in ``z``'s type: under autocast, f may end with a product in half precision.

    Raises:
        ValueError: another type without autocast.

    """
    if fz.dtype != z.dtype and not torch.is_autocast_enabled(z.device.type):
        raise ValueError(
            f"f returned {fz.dtype} for z of {z.dtype}; the types must agree: give z0 in the type of f"
        )
    return fz.to(z.dtype)

"""One step of the adjoint equation in place of its solution, optionally limited in norm.

The training gradient of "Attractor" models (github.com/jacobfa/Attractor, 2026): the Neumann series of the
implicit function theorem, cut off after its second term (compare Geng et al., "On Training Implicit Models",
NeurIPS 2021, and Fung et al., "JFB", AAAI 2022, which keeps the first term alone).

Shape legend: B batch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from implicit_blocks.gradients.diverged import call_at_solution
from implicit_blocks.interfaces import GradientEstimator, Map, SearchLike
from implicit_blocks.ops.backends import first_derivatives_only
from implicit_blocks.solution import Solution, norm


class OneStepAdjoint(GradientEstimator):
    """Return the search's value, with the gradient ``u ∂f/∂θ``, where ``u = v + clip(v ∂f/∂z)``.

    v is the gradient of the loss in the returned value ``z*``, and both derivatives are those at ``z*``. The
    exact adjoint is ``u = v + u ∂f/∂z`` (`ImplicitFunction`); its first iterate from v is the one used here.
    With ``max_norm_ratio`` the second term of a row is rescaled to at most that multiple of ``‖v‖``, which
    limits the gradient where the map expands.

    Biased: two terms of the Neumann series. Forward value and gradient belong to the same point, unlike those
    of `Phantom`, whose value is the point after its steps. Choose `ImplicitFunction` if the gradient must be
    exact, and `Phantom` for a longer series. Memory holds the activations of one call of ``f``. Backward
    raises ``RuntimeError`` if second derivatives are requested (``create_graph=True``). Rows whose search has
    diverged keep its best value, without a gradient (see `Phantom`).

    Calls of ``f``: the search's and one more; in backward one more vector-Jacobian product.

    Args:
        max_norm_ratio: the largest norm of ``v ∂f/∂z`` of a row, relative to ``‖v‖``; None: no limit.

    Raises:
        ValueError: a ratio that is not positive.

    """

    retains_graph = True

    def __init__(self, *, max_norm_ratio: float | None = None) -> None:
        if max_norm_ratio is not None and not max_norm_ratio > 0:
            raise ValueError(
                f"max_norm_ratio must be positive, got {max_norm_ratio}; choose a number above 0, or None "
                "for no limit"
            )
        self.max_norm_ratio = max_norm_ratio

    def __call__(self, f: Map, z0: Tensor, search: SearchLike) -> Solution:
        """Search, then attach the gradient of one call at the result."""
        found = call_at_solution(f, z0, search)
        if not found.fz.requires_grad:  # a map that depends on nothing differentiable, not even on z
            return found.solution
        value = _OneStep.apply(found.fz, found.z, self.max_norm_ratio)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return found.solution.with_value(found.restore(value))


class _OneStep(torch.autograd.Function):
    """Return ``z``; in backward, the gradient v of ``z`` becomes ``v + clip(v ∂f/∂z)`` of ``fz``."""

    @staticmethod
    def forward(ctx: Any, fz: Tensor, z: Tensor, limit: float | None) -> Tensor:
        # A reference to the graph of fz makes no cycle, because this node comes after it.
        ctx.fz, ctx.z, ctx.limit = fz, z, limit
        return z.detach()

    @staticmethod
    @first_derivatives_only(
        "the gradient of OneStepAdjoint",
        "use the gradient Unrolled, which can be differentiated any number of times",
    )
    def backward(ctx: Any, v: Tensor) -> tuple[Tensor, None, None]:
        fz, z = ctx.fz, ctx.z
        with torch.enable_grad(), torch.autocast(v.device.type, enabled=False):
            (product,) = torch.autograd.grad(fz, z, v.to(fz.dtype), retain_graph=True, allow_unused=True)
        if product is None:  # the map does not depend on its argument
            return v.to(fz.dtype), None, None
        return v.to(fz.dtype) + _limited(product, v, ctx.limit).to(fz.dtype), None, None


def _limited(product: Tensor, v: Tensor, limit: float | None) -> Tensor:
    """Return ``product`` (B, …) with each row rescaled to at most ``limit · ‖v‖``."""
    if limit is None:
        return product
    size, most = norm(product.flatten(1)), limit * norm(v.flatten(1))
    factor = torch.where(size > most, most / size, 1.0)
    return product * factor.to(product.dtype).view(-1, *[1] * (product.ndim - 1))

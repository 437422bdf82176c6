"""The residual of each element of a search, without overflow or underflow.

The squares of float32 numbers above 2e19 are infinite, and those of numbers below 1e-23 are 0. A relative
residual whose denominator overflows first would be 0, that is, converged. Sums of squares are therefore
computed in float64, which can represent the squares of every smaller type; float64 inputs are scaled by their
largest entry.

Shape legend: … elements, F features.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

RELATIVE_FLOOR = 1e-9
"""Added to the denominator of a relative residual, in units of the element's scale (see ``initial_scale``):
‖f(z)‖ below this share of its former size counts as 0."""

SMALLEST_SCALE = 1e-60
"""The initial scale of an element, so that the residual at an exact fixed point in 0 is 0, not 0 / 0."""


def norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm over F, (…, 1), in float64 (float32 on MPS, which has no float64)."""
    if x.dtype != torch.float64 and x.device.type != "mps":
        wide: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        return wide
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    scaled: Tensor = torch.linalg.vector_norm(x / largest, dim=-1, keepdim=True)
    return scaled * largest  # NaN where an entry is infinite


def difference(z: Tensor, fz: Tensor) -> Tensor:
    """Return ``f(z) − z`` in float32 or better: the difference of two float16 numbers can overflow."""
    if z.dtype.itemsize < 4:
        return fz.float() - z.float()
    return fz - z


def initial_scale(z: Tensor, count: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the scale of elements before their first call, of shape ``count``, and its upper limit, ().

    The scale of an element is the largest ``‖f(z)‖`` of its search so far, at most 1. The floor of the
    relative residual is proportional to it: with a fixed floor of 1e-9, every search for a solution much
    smaller than that would converge in its first call.
    """
    precision = torch.float32 if z.device.type == "mps" else torch.float64
    return z.new_full(count, SMALLEST_SCALE, dtype=precision), z.new_ones((), dtype=precision)


def relative_residual(
    difference: Tensor,
    fz: Tensor,
    scale: Tensor,
    limit: Tensor,
    *,
    of_whole_rows: Callable[[Tensor], Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``‖f(z) − z‖ / (‖f(z)‖ + 1e-9 · scale)``, (…, 1), and the updated scale.

    It is not finite where ``f(z)`` is not, and where a norm exceeds the type's range.

    Args:
        difference: ``f(z) − z``, (…, F).
        fz: ``f(z)``, (…, F).
        scale: after the previous calls, (…, 1); see ``initial_scale``.
        limit: upper limit of the scale, ().
        of_whole_rows: the norms of rows of which processes have parts, given those of this one's parts.

    """
    step, size = norm(difference), norm(fz)
    if of_whole_rows is not None:
        step, size = of_whole_rows(torch.stack((step, size)))
    scale = torch.clamp(size, scale, limit)
    denominator = torch.add(size, scale, alpha=RELATIVE_FLOOR)
    if size.dtype != fz.dtype and size.dtype == torch.float64:  # wide enough for norms and quotients
        return step / denominator, scale
    limits = torch.finfo(size.dtype)
    ratio = (step / denominator.clamp(min=limits.tiny)).clamp(max=limits.max)
    return torch.where((step < torch.inf) & (denominator < torch.inf), ratio, torch.inf), scale


def narrow(residual: Tensor, precision: torch.dtype) -> Tensor:
    """Return residuals in this type; those beyond its range stay finite."""
    if residual.dtype == precision:
        return residual
    most = torch.finfo(precision).max
    return torch.where(residual < torch.inf, residual.clamp(max=most), residual).to(precision)

"""How fast a map contracts at a point: the spectral radius of its Jacobian.

W. E. Arnoldi, "The principle of minimized iterations in the solution of the matrix eigenvalue problem",
Quart. Appl. Math. 9, 1951; Y. Saad, "Numerical Methods for Large Eigenvalue Problems", SIAM 2011.

Shape legend: B batch, F features of a row, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicit_blocks._utils.validation import require_count
from implicit_blocks.interfaces import Map


@dataclass(frozen=True)
class Spectrum:
    """The largest eigenvalue found for each row, (B,).

    ``radius`` is its absolute value, ``eigenvalue`` complex (one of a conjugate pair); ``residual`` says by
    how much the eigenvector misses, relative to ``radius``: ``‖Jᵀ v − λ v‖ / |λ|``. Above a few per cent take
    more steps. ``eigenvalues`` (B, K) are all that were found, 0 where the space was exhausted. Rows whose
    Jacobian is not finite have NaN.
    """

    radius: Tensor
    eigenvalue: Tensor
    residual: Tensor
    eigenvalues: Tensor


def spectral_radius(
    f: Map, z: Tensor, *, steps: int = 40, generator: torch.Generator | None = None
) -> Spectrum:
    """Return the spectral radius of ``∂f/∂z`` at ``z``, for each row.

    Below 1 Picard's iteration converges near a fixed point, by this factor an iteration; above 1 it does not,
    while damping, Anderson and Broyden may. Found by Arnoldi's method on vector-Jacobian products: the
    transpose has the same eigenvalues, and needs one backward pass of ``f`` a step and no second derivatives.
    Unlike a Rayleigh quotient in a power iteration, which is 0 for a rotation, it is right where eigenvalues
    are complex. Causal maps over many tokens are far from normal: their eigenvalues are those of the single
    tokens, and need many steps; look at the residual.

    Args:
        f: the map, each row from its own row.
        z: where, (B, …); computed in its type, the small eigenproblems in float64.
        steps: size of the space, and calls of backward, at most the number of features.
        generator: of the random start; None: torch's own.

    Raises:
        ValueError: fewer steps than one, a point that is none, or a map that gives another shape.

    """
    require_count("steps", steps)
    if z.ndim < 2 or not z.numel() or not z.is_floating_point():
        raise ValueError(
            f"z has shape {tuple(z.shape)} of {z.dtype}; give floating-point numbers, the batch and at least "
            "one more dimension, none of them 0"
        )
    point = z.detach().requires_grad_()
    with torch.enable_grad():
        value = f(point)
    if value.shape != z.shape:
        raise ValueError(
            f"f returned shape {tuple(value.shape)} for z of shape {tuple(z.shape)}; they must agree"
        )
    wide = torch.promote_types(z.dtype, torch.float32)

    def transposed(v_BF: Tensor) -> Tensor:
        (product,) = torch.autograd.grad(
            value, point, v_BF.view(z.shape).to(value.dtype), retain_graph=True, allow_unused=True
        )
        return torch.zeros_like(v_BF) if product is None else product.flatten(1).to(wide)

    if not value.requires_grad:  # a constant map
        zeros = torch.zeros(z.shape[0], dtype=torch.float64, device=z.device)
        return Spectrum(zeros, zeros.to(torch.complex128), zeros, zeros[:, None].to(torch.complex128))
    with torch.no_grad():
        return _arnoldi(transposed, z.flatten(1).to(wide), steps=steps, generator=generator)


def _arnoldi(apply: Map, like_BF: Tensor, *, steps: int, generator: torch.Generator | None) -> Spectrum:
    batch, features = like_BF.shape
    count = min(steps, features)
    start = torch.randn(like_BF.shape, dtype=like_BF.dtype, device=like_BF.device, generator=generator)
    basis = [start / torch.linalg.vector_norm(start, dim=1, keepdim=True)]
    hessenberg = torch.zeros(batch, count + 1, count, dtype=torch.float64, device=like_BF.device)
    for step in range(count):
        vector = apply(basis[-1])
        size = torch.linalg.vector_norm(vector, dim=1)
        known = torch.stack(basis, dim=1)
        for _ in range(2):  # once more against rounding
            weights = torch.bmm(known, vector[:, :, None]).squeeze(2)
            vector = vector - torch.bmm(weights[:, None], known).squeeze(1)
            hessenberg[:, : step + 1, step] += weights.double()
        left = torch.linalg.vector_norm(vector, dim=1)
        left = torch.where(left > 100 * torch.finfo(left.dtype).eps * size, left, 0.0)  # the space is whole
        hessenberg[:, step + 1, step] = left.double()
        basis.append(torch.where(left[:, None] > 0, vector / left.clamp(min=1e-300)[:, None], 0.0))
    finite = hessenberg.isfinite().flatten(1).all(1)
    hessenberg = torch.where(finite[:, None, None], hessenberg, 0.0)
    values, vectors = torch.linalg.eig(hessenberg[:, :count])
    values = torch.where(finite[:, None], values, torch.nan)
    largest = values.abs().argmax(1)
    rows = torch.arange(batch, device=values.device)
    eigenvalue = values[rows, largest]
    radius = eigenvalue.abs()
    misses = hessenberg[:, count, count - 1] * vectors[rows, count - 1, largest].abs()
    residual = torch.where(radius > 0, misses / radius.clamp(min=1e-300), misses)
    return Spectrum(radius, eigenvalue, torch.where(finite, residual, torch.nan), values)

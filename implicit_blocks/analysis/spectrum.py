"""The spectral radius of a map's Jacobian, which determines how fast the map contracts at a point.

W. E. Arnoldi, "The principle of minimized iterations in the solution of the matrix eigenvalue problem",
Quart. Appl. Math. 9, 1951; Y. Saad, "Numerical Methods for Large Eigenvalue Problems", SIAM 2011.

Shape legend: B batch, F features of a row, K steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map
from implicit_blocks.models.training import keep_saved_tensors
from implicit_blocks.specs.base import require_count


@dataclass(frozen=True)
class Spectrum:
    """The largest eigenvalue found for each row, (B,).

    ``radius`` is its absolute value; ``eigenvalue`` is complex (one of a conjugate pair). ``residual`` is the
    error of the eigenvector relative to ``radius``: ``‖Jᵀ v − λ v‖ / |λ|``; if it exceeds a few per cent, use
    more steps. ``eigenvalues`` (B, K) are all that were found, with 0 where the Krylov space was exhausted.
    Rows whose Jacobian is not finite have NaN.
    """

    radius: Tensor
    eigenvalue: Tensor
    residual: Tensor
    eigenvalues: Tensor


def spectral_radius(
    f: Map, z: Tensor, *, steps: int = 40, generator: torch.Generator | None = None
) -> Spectrum:
    """Return the spectral radius of ``∂f/∂z`` at ``z`` for each row.

    Near a fixed point, Picard iteration converges if the radius is below 1, by this factor per iteration;
    with a larger radius it does not, but damping, Anderson and Broyden may. The method is Arnoldi's on
    vector-Jacobian products: the transpose has the same eigenvalues, and each step needs one backward pass of
    ``f`` and no second derivatives. Complex eigenvalues are found, unlike with the Rayleigh quotient of a
    power iteration, which is 0 for a rotation. Causal maps over many tokens are far from normal: their
    eigenvalues are those of the single tokens and need many steps; check the residual.

    Args:
        f: the map; each row of the result depends on the same row of its argument.
        z: the point, (B, …); ``f`` is evaluated in its type, the small eigenproblems in float64.
        steps: dimension of the Krylov space and number of backward passes, at most the number of features.
        generator: for the random start; None: torch's default generator.

    Raises:
        ValueError: fewer than one step, an invalid point, or a map that changes the shape.

    """
    require_count("steps", steps)
    if z.ndim < 2 or not z.numel() or not z.is_floating_point():
        raise ValueError(
            f"z has shape {tuple(z.shape)} of {z.dtype}; expected floating-point numbers with a batch and "
            "at least one more dimension, all positive"
        )
    keep_saved_tensors()
    point = z.detach().requires_grad_()
    with torch.enable_grad():
        value = f(point)
    if value.shape != z.shape:
        raise ValueError(
            f"f returned shape {tuple(value.shape)} for z of shape {tuple(z.shape)}; the shapes must be equal"
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
        for _ in range(2):  # the second pass removes rounding errors
            weights = torch.bmm(known, vector[:, :, None]).squeeze(2)
            vector = vector - torch.bmm(weights[:, None], known).squeeze(1)
            hessenberg[:, : step + 1, step] += weights.double()
        left = torch.linalg.vector_norm(vector, dim=1)
        left = torch.where(
            left > 100 * torch.finfo(left.dtype).eps * size, left, 0.0
        )  # the space is exhausted
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

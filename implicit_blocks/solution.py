"""The result of a search for a fixed point: its value, its residual and its status.

The residual is computed without overflow or underflow. The squares of float32 numbers above 2e19 are
infinite, and those of numbers below 1e-23 are 0. A relative residual whose denominator overflows first would
be 0, that is, converged. Sums of squares are therefore computed in float64, which can represent the squares
of every smaller type; float64 inputs are scaled by their largest entry.

Shape legend: B batch, L tokens of a window, … elements of a search, F features of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from implicit_blocks.cuda.host_copy import AsyncHostCopy

RELATIVE_FLOOR = 1e-9
"""Added to the denominator of a relative residual, in units of the element's scale, the largest
‖f(z)‖ so far, at most 1: ‖f(z)‖ below this share of its former size counts as 0."""

SMALLEST_SCALE = 1e-60
"""The initial scale of an element, so that the residual at an exact fixed point in 0 is 0, not 0 / 0."""


@dataclass(frozen=True)
class Adjoint:
    """The results of the backward solves of an implicit-function gradient."""

    solutions: list[Solution] = field(default_factory=list)
    listeners: list[Callable[[Solution], None]] = field(default_factory=list, repr=False, compare=False)
    """Called with each solve's solution, within backward."""

    def add(self, solution: Solution) -> None:
        """Add the solution of a backward solve, and pass it to the listeners."""
        self.solutions.append(solution)
        for listener in self.listeners:
            listener(solution)

    @property
    def solution(self) -> Solution | None:
        """The latest backward solve's iterations, residual and status per row; None before the first one."""
        return self.solutions[-1] if self.solutions else None


@dataclass(frozen=True)
class Solution:
    """The value and status of a search, per sequence, and with prefix scope per token.

    ``z`` (B, …) is, for every element, the ``f(z)`` whose residual was lowest. ``iterations`` (B,) int64
    counts the calls of ``f`` that an element took part in. ``residual`` (B,) float32 or better is that of the
    returned value. ``converged`` and ``diverged`` (B,) bool are both False if the iterations ran out. With
    prefix scope the ``token_…`` fields (B, L) report each token, and a row's entry is that of its worst
    token; otherwise they are None. ``trace`` (iterations, B) or (iterations, B, L), on request, contains the
    residual of every call, NaN once an element has left the loop. ``penalty`` (B,), of gradient estimators
    that have one, carries gradients; add its mean to the loss. ``trajectory``, on request, maps chosen t ≥ 1
    to the point after t calls of the map, of ``z``'s shape; an element that left the search before has the
    value that it left with. Numbers of calls that the search did not reach are left out.
    """

    z: Tensor
    iterations: Tensor
    residual: Tensor
    converged: Tensor
    diverged: Tensor
    token_iterations: Tensor | None = None
    token_residual: Tensor | None = None
    token_converged: Tensor | None = None
    token_diverged: Tensor | None = None
    trace: Tensor | None = None
    adjoint: Adjoint | None = None
    penalty: Tensor | None = None
    trajectory: dict[int, Tensor] | None = None

    @classmethod
    def of_tokens(
        cls,
        z: Tensor,
        *,
        iterations: Tensor,
        residual: Tensor,
        converged: Tensor,
        diverged: Tensor,
        trace: Tensor | None = None,
        trajectory: dict[int, Tensor] | None = None,
    ) -> Self:
        """Return a solution from the status of its tokens; all but ``z`` are (B, L)."""
        return cls(
            z=z,
            iterations=iterations.amax(1),
            residual=residual.amax(1),
            converged=converged.all(1),
            diverged=diverged.any(1),
            token_iterations=iterations,
            token_residual=residual,
            token_converged=converged,
            token_diverged=diverged,
            trace=trace,
            trajectory=trajectory,
        )

    @classmethod
    def concatenate(cls, windows: Sequence[Solution]) -> Solution:
        """Join the solutions of consecutive windows: values along the tokens, status from the worst window.

        Traces and adjoints are per window and are not joined. The trajectory has the iterates that every
        window has. Penalties are added: that of a window is its share of the row's.
        """
        if len(windows) == 1:
            return windows[0]

        def join(name: str) -> Tensor | None:
            parts = [getattr(window, name) for window in windows]
            return None if any(part is None for part in parts) else torch.cat(parts, dim=1)

        def stack(name: str) -> Tensor:
            return torch.stack([getattr(window, name) for window in windows])

        return cls(
            z=torch.cat([window.z for window in windows], dim=1),
            iterations=stack("iterations").amax(0),
            residual=stack("residual").amax(0),
            converged=stack("converged").all(0),
            diverged=stack("diverged").any(0),
            token_iterations=join("token_iterations"),
            token_residual=join("token_residual"),
            token_converged=join("token_converged"),
            token_diverged=join("token_diverged"),
            penalty=None if windows[0].penalty is None else stack("penalty").sum(0),
            trajectory=_join_trajectories([window.trajectory for window in windows]),
        )

    @property
    def finest_residual(self) -> Tensor:
        """The residual of each token, (B, L), where it is known; otherwise that of each row, (B,)."""
        return self.residual if self.token_residual is None else self.token_residual

    def with_tolerance(self, tolerance: float) -> Self:
        """Return the solution with what has converged by this tolerance, after a search that ignored it."""
        if self.token_residual is None or self.token_diverged is None:
            return replace(self, converged=(self.residual <= tolerance) & ~self.diverged)
        worst = self.token_residual.masked_fill(self.token_diverged, torch.inf).cummax(1).values
        return replace(self, converged=worst[:, -1] <= tolerance, token_converged=worst <= tolerance)

    def some_diverged(self) -> bool:
        """Whether some rows have diverged, but not all; copies one flag to the host."""
        some = self.diverged.any() & ~self.diverged.all()
        return bool(AsyncHostCopy().read(some) if some.is_cuda else some)

    def with_value(self, z: Tensor, *, adjoint: Adjoint | None = None) -> Solution:
        """Return the solution with another ``z`` (B, …), and with another adjoint if one is given."""
        return replace(self, z=z, adjoint=adjoint or self.adjoint)

    def __repr__(self) -> str:
        """Return a one-line summary."""
        iterations, residual = self.iterations, self.residual
        if iterations.is_meta or not iterations.numel():
            return f"Solution(rows={iterations.numel()})"
        parts = [
            f"converged={int(self.converged.sum())} of {self.converged.numel()}",
            f"iterations={_span(iterations, 'd')}",
            f"residual={_span(residual, '.2g')}",
        ]
        if self.diverged.any():
            parts.insert(1, f"diverged={int(self.diverged.sum())}")
        if (tokens := self.token_converged) is not None:
            parts.append(f"token_converged={int(tokens.sum())} of {tokens.numel()}")
        if isinstance(self.z, Tensor):
            parts.insert(0, f"z={tuple(self.z.shape)}")
        return f"Solution({', '.join(parts)})"


def _join_trajectories(windows: Sequence[dict[int, Tensor] | None]) -> dict[int, Tensor] | None:
    """Join the iterates that all windows have along the tokens; None if a window has no trajectory."""
    known = [window for window in windows if window is not None]
    if len(known) < len(windows):
        return None
    common = [t for t in known[0] if all(t in window for window in known)]
    return {t: torch.cat([window[t] for window in known], dim=1) for t in common}


def _span(values: Tensor, form: str) -> str:
    """Return the smallest and the largest value, or the one value if they are equal."""
    least, largest = (format(value.item(), form) for value in values.detach().aminmax())
    return least if least == largest else f"{least}…{largest}"


def norm(x: Tensor) -> Tensor:
    """Return the Euclidean norm over F, (…, 1), in float64 (float32 on MPS, which has no float64)."""
    if x.dtype != torch.float64 and x.device.type != "mps":
        wide: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float64)
        return wide
    x = x.to(torch.promote_types(x.dtype, torch.float32))
    largest = x.abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    scaled: Tensor = torch.linalg.vector_norm(x / largest, dim=-1, keepdim=True)
    return scaled * largest  # NaN where an entry is infinite


def finite_or(value: Tensor, before: Tensor) -> Tensor:
    """Return the value (..., D), or the point before it where the sum of its features is not finite."""
    return torch.where(value.sum(-1, keepdim=True).isfinite(), value, before)


def difference(z: Tensor, fz: Tensor) -> Tensor:
    """Return ``f(z) − z`` in float32 or better: the difference of two float16 numbers can overflow."""
    if z.dtype.itemsize < 4:
        return fz.float() - z.float()
    return fz - z


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
        scale: the largest ``‖f(z)‖`` in the previous calls, at most 1, (…, 1).
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

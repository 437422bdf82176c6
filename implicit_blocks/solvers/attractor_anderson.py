"""Anderson mixing over whole rows with one stopping rule for the batch, as published with Attractor models.

The rule of github.com/jacobfa/Attractor (2026); the mixing is that of D. G. Anderson, "Iterative procedures
for nonlinear integral equations", J. ACM 12, 1965, with a ridge on the weights.

Shape legend: B rows of the batch, E elements of a search, F features of an element, M stored points.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.solution import Solution, difference, narrow, norm
from implicit_blocks.specs.base import require_count, require_share

if TYPE_CHECKING:
    from implicit_blocks.search.search import Search


class NonCausalSolverWarning(UserWarning):
    """A solver makes the value of a token depend on later tokens, or on other rows of the batch."""


class AttractorAndersonState(NamedTuple):
    """The last M points of E elements; ``slots`` counts the points stored so far."""

    points_EMF: Tensor  # z at past points
    values_EMF: Tensor  # f(z) there
    slots_E: Tensor


class AttractorAnderson(Solver):
    """Reproduce published Attractor models; choose ``anderson`` for a causal rule.

    With the last n ≤ ``memory`` points ``x_j`` of a row and ``r_j = f(x_j) − x_j``, the weights minimize
    ``‖Σ a_j r_j‖² + λ Σ a_j²`` with ``Σ a_j = 1``, and the next point is ``β Σ a_j f(x_j) + (1 − β) Σ a_j
    x_j``. The first two points are plain steps. λ is absolute: once ``‖r‖²`` is far below it, the weights
    approach 1/n, and the rule needs more iterations than Picard.

    The search (``run``) ends for all rows together: after at least ``min_iterations`` calls of ``f``, and not
    before the third, when the largest ``‖f(x) − x‖ / ‖x‖`` of the batch is below the tolerance (with an
    absolute norm: ``‖f(x) − x‖``). Its value is the ``f(x)`` of the last call, its residual that of ``x``.

    Do not use it for new models. The weights of a row are computed over all its tokens, and the batch stops
    as a whole: before convergence a token depends on later tokens and on the other rows. Building one raises
    a ``NonCausalSolverWarning``. Scope ``prefix`` is refused. Rows never leave the batch.

    Departures from the published rule: padding enters no norm; a row whose value is not finite keeps its
    last finite one and no longer decides when the batch stops; a tolerance of 0 takes all iterations. With
    ``memory=1`` it is the published plain iteration. With fewer than three iterations all steps are plain.

    Costs 2 · memory copies of ``z``.

    Args:
        memory: number of stored points, at least 1.
        beta: β in (0, 1].
        lam: λ, above 0.
        min_iterations: number of calls before the first test, at least 0.

    Raises:
        ValueError: an argument is out of range.

    """

    def __init__(
        self, *, memory: int = 5, beta: float = 1.0, lam: float = 1e-4, min_iterations: int = 6
    ) -> None:
        require_count("memory", memory)
        require_share("beta", beta)
        if not 0 < lam < float("inf"):
            raise ValueError(f"lam must be positive and finite, got {lam}; the published value is 1e-4")
        if min_iterations < 0:
            raise ValueError(f"min_iterations must be at least 0, got {min_iterations}")
        self.memory, self.beta, self.lam, self.min_iterations = memory, beta, lam, min_iterations
        warnings.warn(
            "solver attractor_anderson is a published rule that is not causal: before convergence a token "
            "depends on later tokens and on the other rows of the batch; choose anderson for new models",
            NonCausalSolverWarning,
            stacklevel=2,
        )

    def init(self, z0_EF: Tensor) -> AttractorAndersonState:
        """Return an empty history with room for 2 · memory copies of ``z0``."""
        elements, features = z0_EF.shape
        history = z0_EF.new_zeros(elements, self.memory, features)
        return AttractorAndersonState(history, history, z0_EF.new_zeros(elements, dtype=torch.int64))

    def update(
        self, z_EF: Tensor, fz_EF: Tensor, state: AttractorAndersonState, f: Map
    ) -> tuple[Tensor, AttractorAndersonState]:
        """Return the next point, mixed from the second call on, and the state."""
        slots = torch.arange(self.memory, device=z_EF.device)
        newest = (slots == (state.slots_E % self.memory)[:, None])[:, :, None]
        points = torch.where(newest, z_EF[:, None], state.points_EMF)
        values = torch.where(newest, fz_EF[:, None], state.values_EMF)
        stored = state.slots_E + 1
        mixed = self._mix(points, values, slots < stored[:, None])
        z = torch.where((stored < 2)[:, None], fz_EF, mixed)
        return z, AttractorAndersonState(points, values, stored)

    def _mix(self, points_EMF: Tensor, values_EMF: Tensor, filled_EM: Tensor) -> Tensor:
        precision = torch.promote_types(points_EMF.dtype, torch.float32)
        with torch.autocast(points_EMF.device.type, enabled=False):
            x, fx = points_EMF.to(precision), values_EMF.to(precision)
            r = torch.where(filled_EM[:, :, None], fx - x, 0.0)
            # The bordered system [0 1ᵀ; 1 G + λI] [ν; a] = [1; 0], by elimination: a ∝ (G + λI)⁻¹ 1.
            gram = (r @ r.mT).double() + self.lam * torch.eye(
                self.memory, dtype=torch.float64, device=r.device
            )
            a, _ = torch.linalg.solve_ex(gram, filled_EM[:, :, None].double())
            a = (a / a.sum(1, keepdim=True)).to(precision).mT
            mixed = torch.bmm(a, fx)
            if self.beta < 1:
                mixed = self.beta * mixed + (1 - self.beta) * torch.bmm(a, x)
        return mixed.squeeze(1).to(points_EMF.dtype)

    def run(self, f: Map, z0: Tensor, search: Search) -> Solution:
        """Search from ``z0`` (B, …) until the whole batch has converged.

        The solution's ``trace`` (calls, B), on request, contains the residual of every call.

        Raises:
            ValueError: the stopping rule has scope ``prefix``.

        """
        stopping, valid, rows = search.stopping, search.valid, z0.shape[0]
        if stopping.scope != "sequence":
            raise ValueError(
                "solver attractor_anderson mixes the tokens of a row, but the stopping rule has scope "
                f"{stopping.scope!r}; give it the scope 'sequence', or choose anderson"
            )
        real = None if valid is None else valid.view(*valid.shape, *[1] * (z0.ndim - 2)).expand_as(z0)

        def call(x_EF: Tensor) -> Tensor:
            x = x_EF.view(z0.shape)
            fx = f(x)
            return (fx if real is None else torch.where(real, fx, z0)).reshape(rows, -1)

        x, trace, trajectory = z0.reshape(rows, -1), [], {}
        state, value, sound = self.init(x), x, z0.new_ones(rows, dtype=torch.bool)
        for calls in range(1, stopping.max_iterations + 1):
            fx = call(x)
            residual = _residual(x, fx, real, relative=stopping.norm == "relative")
            sound = sound & residual.isfinite()
            value = torch.where(sound[:, None], fx, value)
            trace.append(residual)
            if calls in search.trajectory:
                trajectory[calls] = value.view(z0.shape)
            last = calls == stopping.max_iterations
            done = False
            if not last and calls >= max(3, self.min_iterations):
                done = bool((~sound | (residual < stopping.tolerance)).all())
            if last or (done if search.agree is None else search.agree(done)):
                break
            x, state = self.update(x, fx, state, call)
        return Solution(
            z=value.view(z0.shape),
            iterations=torch.full((rows,), calls, dtype=torch.int64, device=z0.device),
            residual=residual,
            converged=sound & (residual <= stopping.tolerance),
            diverged=~sound,
            trace=torch.stack(trace) if search.trace else None,
            trajectory=trajectory if search.trajectory else None,
        )


def _residual(x_BF: Tensor, fx_BF: Tensor, real: Tensor | None, *, relative: bool) -> Tensor:
    """Return ``‖f(x) − x‖ / ‖x‖`` of each row, (B,), or with an absolute norm ``‖f(x) − x‖``."""
    precision = torch.promote_types(x_BF.dtype, torch.float32)
    step, size = difference(x_BF, fx_BF), x_BF
    if real is not None:
        step, size = (torch.where(real.reshape(x_BF.shape), each, 0.0) for each in (step, size))
    step, size = norm(step), norm(size)
    # A start at zero has no finite quotient; the first calls decide nothing.
    quotient = step / size.clamp(min=torch.finfo(size.dtype).tiny) if relative else step
    quotient = torch.where(step < torch.inf, quotient.clamp(max=torch.finfo(size.dtype).max), step)
    return narrow(quotient, precision).squeeze(1)

"""The Jacobian of a token's state with respect to the state before it, computed in three ways.

M. Schöne et al., "Implicit Language Models are RNNs: Balancing Parallelization and Expressivity", ICML 2025,
Theorem 1 and Figure 7.

Shape legend: B batch, T tokens, D model width, S entries of the state h.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from implicit_blocks.gradients import ImplicitFunction
from implicit_blocks.interfaces import Map
from implicit_blocks.mixers.mamba2.mixer import Mamba2
from implicit_blocks.mixers.mamba2.state import Mamba2State
from implicit_blocks.models.explicit import ExplicitLM
from implicit_blocks.models.implicit import ImplicitLM
from implicit_blocks.models.language_model import LanguageModel
from implicit_blocks.models.stack import BoundMap
from implicit_blocks.search.search import Search
from implicit_blocks.solvers import Broyden
from implicit_blocks.specs import Stopping

EXPLICIT, IMPLICIT = "explicit", "implicit"


@dataclass(frozen=True)
class StateJacobian:
    """``∂h_t / ∂h_{t−1}`` of one token, (S, S), in three ways; row i is the gradient of entry i of h_t.

    ``formula`` evaluates Theorem 1, ``autograd`` differentiates through the fixed point, ``differences``
    moves every entry of ``h_{t−1}`` up and down and solves again. ``transition`` (S,) is the diagonal Λ of
    the scan, which is the whole Jacobian of an explicit model. ``residual`` is the relative residual of the
    fixed point, 0 in an explicit model.
    """

    kind: str
    formula: Tensor
    autograd: Tensor
    differences: Tensor
    transition: Tensor
    residual: float
    iterations: int

    @property
    def formula_against_autograd(self) -> float:
        """Largest absolute difference of an entry."""
        return float((self.formula - self.autograd).abs().max())

    @property
    def formula_against_differences(self) -> float:
        """Largest absolute difference of an entry."""
        return float((self.formula - self.differences).abs().max())

    @property
    def off_diagonal_mass(self) -> float:
        """Share of the sum of squares that lies off the diagonal, of the Jacobian by autograd."""
        square = self.autograd.square()
        return float((square - torch.diag(square.diagonal())).sum() / square.sum())

    @property
    def rank(self) -> int:
        """Rank of the Jacobian computed by autograd."""
        return _rank(self.autograd)

    @property
    def feedback_rank(self) -> int:
        """Rank of the Jacobian minus the diagonal of the scan: 0 in an explicit model."""
        return _rank(self.autograd - torch.diag(self.transition), of=self.autograd)


class _Token(NamedTuple):
    """One token after committed tokens: the map of its window, the start of its search, the state before."""

    map: BoundMap
    start_BLD: Tensor
    state: Mamba2State

    def bound(self, h_BS: Tensor) -> BoundMap:
        """Return the map with these values of h and an unchanged convolution tail."""
        h = h_BS.view(h_BS.shape[0], *self.state.h_BHPN.shape[1:])
        rows = torch.zeros(h_BS.shape[0], dtype=torch.int64, device=h.device)
        many = self.map.select_rows(rows)
        (state,) = many.states
        return replace(many, states=(Mamba2State(state.conv_BWC, h),))

    def after(self, z_BLD: Tensor, h_BS: Tensor) -> Tensor:
        """Return the state after the token, (B, S), from its fixed point and the state before."""
        _, (state,) = self.bound(h_BS).commit(z_BLD)
        return state.h_BHPN.flatten(1)  # type: ignore[no-any-return]  # the states of mixers are untyped


def state_jacobian(
    model: LanguageModel,
    tokens: Tensor,
    *,
    tolerance: float = 1e-12,
    max_iterations: int = 512,
    step: float = 1e-5,
) -> StateJacobian:
    """Return the Jacobian of the last token's step from state to state, computed in three ways.

    With ``h_t = Λ(z) h_{t−1} + u(z)`` and ``z = f(z, h_{t−1})``, the theorem says ``J = Λ + h_{t−1} ∂Λ/∂z
    dz/dh + ∂u/∂z dz/dh`` with ``dz/dh = (I − ∂f/∂z)^{-1} ∂f/∂h``: dense, whereas the Jacobian of an explicit
    model is Λ, a diagonal. Λ and u are read from the scan itself: its value at h = 0 is u, and at h = 1 Λ +
    u. The state is the scan's h; the tail of the convolution is held constant.

    Args:
        model: one Mamba2 layer, in float64 (``model.double()``), in evaluation mode.
        tokens: (1, T) int64, T at least 2; the last token is analyzed.
        tolerance: of the fixed point, and of the adjoint equation that autograd solves.
        max_iterations: of either; Broyden's method solves both, since an untrained map need not contract.
        step: of the central differences.

    Raises:
        ValueError: the model or the type or shape of the tokens does not fit, or the fixed point is not
            found.

    """
    _check(model, tokens)
    model.eval()
    token = _token(model, tokens)
    h = token.state.h_BHPN.flatten(1)
    explicit = isinstance(model, ExplicitLM)
    search = Search(
        solver=Broyden(memory=2 * token.start_BLD.shape[2]),
        stopping=Stopping(tolerance=tolerance, max_iterations=max_iterations),
    )

    if explicit:
        z, residual, iterations = token.start_BLD, 0.0, 0
    else:
        found = search(token.bound(h), token.start_BLD)
        if not bool(found.converged.all()):
            raise ValueError(
                f"the fixed point was not found: residual {float(found.residual):.1e} after {max_iterations} "
                f"iterations, tolerance {tolerance:.1e}; raise one of them, or use other tokens or weights"
            )
        z, residual, iterations = found.z, float(found.residual), int(found.iterations)
    transition, formula = _formula(token, z, h, explicit=explicit)
    return StateJacobian(
        kind=EXPLICIT if explicit else IMPLICIT,
        formula=formula,
        autograd=_autograd(token, z, h, search, explicit=explicit),
        differences=_differences(token, z, h, search, step=step, explicit=explicit),
        transition=transition,
        residual=residual,
        iterations=iterations,
    )


def _formula(token: _Token, z: Tensor, h: Tensor, *, explicit: bool) -> tuple[Tensor, Tensor]:
    """Return Λ (S,) and the Jacobian of the theorem (S, S), from dense Jacobians of one call each."""
    zeros, ones = torch.zeros_like(h), torch.ones_like(h)

    def source(point: Tensor) -> Tensor:
        return token.after(point.view_as(z), zeros)[0]

    def diagonal(point: Tensor) -> Tensor:
        return token.after(point.view_as(z), ones)[0] - source(point)

    transition = diagonal(z).detach()
    if explicit:
        return transition, torch.diag(transition)
    flat = z.flatten().detach()
    of_z = _dense(lambda point: token.bound(h)(point.view_as(z)).flatten(), flat)
    of_h = _dense(lambda before: token.bound(before[None])(z).flatten(), h[0])
    eye = torch.eye(flat.numel(), dtype=z.dtype, device=z.device)
    z_of_h = torch.linalg.solve(eye - of_z, of_h)
    scan = h[0][:, None] * _dense(diagonal, flat) + _dense(source, flat)
    return transition, torch.diag(transition) + scan @ z_of_h


def _autograd(token: _Token, z: Tensor, h: Tensor, search: Search, *, explicit: bool) -> Tensor:
    """Differentiate through the fixed point: row i of a batch computes the gradient of entry i."""
    size = h.shape[1]
    before = h.detach().repeat(size, 1).requires_grad_()
    points = z.expand(size, -1, -1)
    if not explicit:
        estimator = ImplicitFunction(solver=search.solver, stopping=search.stopping)
        solution = estimator(token.bound(before), points.contiguous(), search)
        points = solution.z
    after = token.after(points, before)
    (jacobian,) = torch.autograd.grad(after.diagonal().sum(), before)
    return jacobian


@torch.no_grad()
def _differences(
    token: _Token, z: Tensor, h: Tensor, search: Search, *, step: float, explicit: bool
) -> Tensor:
    """Solve again from each perturbed state, all in one batch."""
    size = h.shape[1]
    moves = step * torch.eye(size, dtype=h.dtype, device=h.device)
    before = torch.cat((h + moves, h - moves))
    points = z.expand(2 * size, -1, -1)
    if not explicit:
        points = search(token.bound(before), points.contiguous()).z
    ahead, behind = token.after(points, before).chunk(2)
    return (ahead - behind).T / (2 * step)


def _dense(function: Map, point: Tensor) -> Tensor:
    jacobian: Tensor = torch.autograd.functional.jacobian(function, point.detach())
    return jacobian.detach()


def _rank(matrix: Tensor, *, of: Tensor | None = None) -> int:
    """Count singular values above 1e-9 times the largest, of ``of`` if given."""
    values = torch.linalg.svdvals(matrix)
    largest = torch.linalg.svdvals(matrix if of is None else of)[0]
    return int((values > 1e-9 * largest).sum())


@torch.no_grad()
def _token(model: LanguageModel, tokens: Tensor) -> _Token:
    embedded = model.embedding(tokens)
    encoded = model.encode(embedded[:, :-1], return_state=True)
    assert encoded.state is not None
    bound, start = model.bind(embedded[:, -1:], encoded.state, weights=model.cache_weights())
    return _Token(bound, start, encoded.state.layers[0])


def _check(model: LanguageModel, tokens: Tensor) -> None:
    if not isinstance(model, ImplicitLM | ExplicitLM):
        raise ValueError(f"model is a {type(model).__name__}; expected an ImplicitLM or ExplicitLM")
    layers = model.backbone.blocks()
    mixers = [type(block.mixer).__name__ for block in layers]
    if len(layers) != 1 or not isinstance(layers[0].mixer, Mamba2):
        raise ValueError(
            f"the model's layers are {', '.join(mixers)}; the theorem needs a single Mamba2 layer, whose "
            "scan is diagonal"
        )
    if model.embedding.weight.dtype != torch.float64:
        raise ValueError(
            f"the model is {model.embedding.weight.dtype}; differences need float64: call model.double()"
        )
    if tokens.ndim != 2 or tokens.shape[0] != 1 or tokens.shape[1] < 2:
        raise ValueError(f"tokens have shape {tuple(tokens.shape)}; expected (1, T) with T at least 2")

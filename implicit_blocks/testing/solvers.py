"""The contracts of a solver, each a function of one; ``check_solver`` runs them all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.driver import Search
from implicit_blocks.interfaces import Map, Solver
from implicit_blocks.specs import Stopping
from implicit_blocks.testing.contract import relative_error, require

ROWS, FEATURES = 4, 12


def contraction(
    rate: float,
    *,
    rows: int = ROWS,
    features: int = FEATURES,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[Map, Tensor]:
    """Return an affine map, its Jacobians symmetric with spectral radius ``rate``, and its fixed point."""
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(rows, features, features, dtype=torch.float64, generator=generator)
    basis, _ = torch.linalg.qr(random)
    spectrum = torch.linspace(-rate, rate, features, dtype=torch.float64)
    jacobian = basis * spectrum @ basis.mT
    offset = torch.randn(rows, features, dtype=torch.float64, generator=generator)
    solution = torch.linalg.solve(torch.eye(features, dtype=torch.float64) - jacobian, offset)
    jacobian, offset = jacobian.to(dtype), offset.to(dtype)
    return lambda z: torch.bmm(jacobian, z[:, :, None]).squeeze(2) + offset, solution


def _search(solver: Solver, **stopping: Any) -> Search:
    return Search(solver=solver, stopping=Stopping(**stopping), compact=False)


def contractions(solver: Solver) -> None:
    """Check that it finds the fixed point of contractions, every row of them, and says so."""
    for rate in (0.3, 0.9):
        f, expected = contraction(rate)
        solution = _search(solver, tolerance=1e-10, max_iterations=2000)(f, torch.zeros_like(expected))
        error = relative_error(solution.z, expected)
        require(
            bool(solution.converged.all()) and error < 1e-8,
            type(solver).__name__,
            "contractions",
            f"rate {rate}: {int(solution.converged.sum())} of {ROWS} rows converged, error {error:.1e}",
        )


def one_iteration(solver: Solver) -> None:
    """With one iteration it returns ``f(z0)``."""
    f, expected = contraction(0.5)
    z0 = torch.randn_like(expected)
    solution = _search(solver, tolerance=1e-10, max_iterations=1)(f, z0)
    require(
        torch.equal(solution.z, f(z0)),
        type(solver).__name__,
        "one iteration",
        "init must not change the first point",
    )


def elements_apart(solver: Solver) -> None:
    """Check that an element's path depends on no other element, even one that turns into NaN."""
    f, expected = contraction(0.8)
    z0 = torch.zeros_like(expected)

    def poisoned(z: Tensor) -> Tensor:
        fz = f(z).clone()
        fz[0] = torch.nan
        return fz

    search = _search(solver, tolerance=0.0, max_iterations=7)
    clean, dirty = search(f, z0), search(poisoned, z0)
    error = relative_error(dirty.z[1:], clean.z[1:])
    require(
        error < 1e-12 and bool(dirty.diverged[0]) and not bool(dirty.diverged[1:].any()),
        type(solver).__name__,
        "elements apart",
        f"a NaN in element 0 moved the others by {error:.1e}",
    )


def best_survives(solver: Solver) -> None:
    """Check that a NaN in a later step does not cost the best value so far."""
    f, expected = contraction(0.8)
    calls = 0

    def breaks(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return f(z) if calls < 4 else torch.full_like(z, torch.nan)

    solution = _search(solver, tolerance=0.0, max_iterations=9)(breaks, torch.zeros_like(expected))
    require(
        bool(solution.z.isfinite().all()) and bool(solution.diverged.all()),
        type(solver).__name__,
        "best survives",
        "the value returned after a NaN must be the best before it, reported as diverged",
    )


def state_layout(solver: Solver) -> None:
    """Check that the state's tensors lead with the elements, and that ``update`` writes into none of them."""
    f, expected = contraction(0.5)
    z = torch.randn_like(expected)
    state = solver.init(z)
    for _ in range(3):
        before = pytree.tree_map(torch.clone, state)
        z, after = solver.update(z, f(z), state, f)
        leaves = pytree.tree_leaves(state)
        require(
            all(isinstance(leaf, Tensor) and leaf.ndim > 0 and leaf.shape[0] == ROWS for leaf in leaves),
            type(solver).__name__,
            "state layout",
            "every leaf of the state must be a tensor that leads with the elements, counters included",
        )
        same = all(torch.equal(a, b) for a, b in zip(leaves, pytree.tree_leaves(before), strict=True))
        require(
            same,
            type(solver).__name__,
            "state layout",
            "update must return a new state, not write into the old",
        )
        state = after


def low_precision(solver: Solver) -> None:
    """Check that it works on bfloat16 values, and ends near the fixed point."""
    f, expected = contraction(0.5, dtype=torch.bfloat16)
    solution = _search(solver, tolerance=2e-2, max_iterations=60)(
        f, torch.zeros_like(expected, dtype=torch.bfloat16)
    )
    error = relative_error(solution.z.double(), expected)
    require(
        solution.z.dtype == torch.bfloat16 and error < 0.1,
        type(solver).__name__,
        "low precision",
        f"in bfloat16 the error is {error:.2f}; solve small systems in float32 or better",
    )


SOLVER_CONTRACTS: dict[str, Callable[[Solver], None]] = {
    contract.__name__: contract
    for contract in (contractions, one_iteration, elements_apart, best_survives, state_layout, low_precision)
}


def check_solver(solver: Solver) -> None:
    """Run every contract on a solver.

    Raises:
        ContractError: naming the solver, the contract and what to look at.

    """
    for contract in SOLVER_CONTRACTS.values():
        contract(solver)

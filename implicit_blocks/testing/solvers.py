"""The contracts of a solver; each is a function of a solver or its spec.

``check_solver(MySpec(...))`` runs all; ``SOLVER_CONTRACTS`` names them, to write one test each:

```python
@pytest.mark.parametrize("contract", SOLVER_CONTRACTS)
def test_relaxed(contract):
    SOLVER_CONTRACTS[contract](RelaxedSpec(first=0.7))
```

Shape legend: E elements of a search, F features of an element.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from implicit_blocks.interfaces import Solver
from implicit_blocks.registry import build
from implicit_blocks.search.loop import check_next_point, check_solver_state, point_and_state
from implicit_blocks.search.search import Search
from implicit_blocks.solution import Solution
from implicit_blocks.specs import SolverSpec, Stopping
from implicit_blocks.testing.contract import named, relative_error, require

ROWS, FEATURES = 4, 12


@dataclass(frozen=True)
class AffineMap:
    """``f(z) = J z + b`` for each element, with J (E, F, F) and b (E, F); a ``RowMap``."""

    jacobian: Tensor
    offset: Tensor

    def __call__(self, z: Tensor) -> Tensor:
        """Return ``f(z)``, (E, F)."""
        return torch.bmm(self.jacobian, z[:, :, None]).squeeze(2) + self.offset

    def select_rows(self, rows: Tensor) -> AffineMap:
        """Return the map of these elements."""
        return AffineMap(self.jacobian[rows], self.offset[rows])


def contraction(
    rate: float | Sequence[float],
    *,
    rows: int = ROWS,
    features: int = FEATURES,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> tuple[AffineMap, Tensor]:
    """Return an affine map and its fixed point, (E, F).

    The Jacobians are symmetric with eigenvalues spread over [−rate, rate]; the rate is one number, or one
    per element.
    """
    generator = torch.Generator().manual_seed(seed)
    random = torch.randn(rows, features, features, dtype=torch.float64, generator=generator)
    basis, _ = torch.linalg.qr(random)
    rates = torch.tensor(rate, dtype=torch.float64).expand(rows)
    spectrum = rates[:, None, None] * torch.linspace(-1, 1, features, dtype=torch.float64)
    jacobian = basis * spectrum @ basis.mT
    offset = torch.randn(rows, features, dtype=torch.float64, generator=generator)
    solution = torch.linalg.solve(torch.eye(features, dtype=torch.float64) - jacobian, offset)
    return AffineMap(jacobian.to(dtype), offset.to(dtype)), solution


def _built(subject: Solver | SolverSpec) -> Solver:
    solver = build(subject) if isinstance(subject, SolverSpec) else subject
    require(isinstance(solver, Solver), solver, "is a Solver", "pass an instance of implicit_blocks.Solver")
    return solver


def _search(solver: Solver, *, compact: bool = False, trajectory: Any = (), **stopping: Any) -> Search:
    return Search(solver=solver, stopping=Stopping(**stopping), compact=compact, trajectory=trajectory)


def _require_converged(solution: Solution, solver: Solver, contract: str) -> None:
    count = int(solution.converged.sum())
    message = f"{count} of {ROWS} rows converge to a residual of 1e-8 in 1000 iterations, at rates up to 0.9"
    require(count == ROWS, solver, contract, message)


def contractions(subject: Solver | SolverSpec) -> None:
    """Check that the solver converges to the fixed point of contractions in every row."""
    solver = _built(subject)
    for rate in (0.3, 0.9):
        f, expected = contraction(rate)
        solution = _search(solver, tolerance=1e-10, max_iterations=2000)(f, torch.zeros_like(expected))
        error = relative_error(solution.z, expected)
        require(
            bool(solution.converged.all()) and error < 1e-8,
            solver,
            "contractions",
            f"rate {rate}: {int(solution.converged.sum())} of {ROWS} rows converged to a residual of 1e-10 "
            f"in 2000 iterations, error {error:.1e} (allowed: 1e-8); the fixed point of the update must "
            "be z = f(z), and iterates must approach it",
        )


def one_iteration(subject: Solver | SolverSpec) -> None:
    """Check that one iteration returns ``f(z0)`` and does not modify the start."""
    solver = _built(subject)
    f, expected = contraction(0.5)
    z0 = torch.randn_like(expected)
    start = z0.clone()
    solution = _search(solver, tolerance=1e-10, max_iterations=1)(f, z0)
    require(
        torch.equal(z0, start) and torch.equal(solution.z, f(start)),
        solver,
        "one iteration",
        "init must not change the first point",
    )


def elements_apart(subject: Solver | SolverSpec) -> None:
    """Check that the iterates of an element do not depend on other elements, even if one becomes NaN."""
    solver = _built(subject)
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
        solver,
        "elements apart",
        f"a NaN in element 0 changes the others by {error:.1e}; sum over features (dim 1), not over "
        "elements, and keep all memory in the state",
    )


def best_survives(subject: Solver | SolverSpec) -> None:
    """Check that after a NaN in a later step, in some rows and then all, the best value is returned."""
    solver = _built(subject)
    f, expected = contraction(0.8)
    calls = 0

    def breaks(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        fz = f(z).clone()
        fz[: 0 if calls < 4 else 2 if calls < 6 else ROWS] = torch.nan
        return fz

    solution = _search(solver, tolerance=0.0, max_iterations=9)(breaks, torch.zeros_like(expected))
    require(
        bool(solution.z.isfinite().all()) and bool(solution.diverged.all()),
        solver,
        "best survives",
        "after a NaN the returned value must be the best before it, reported as diverged; "
        "return the output of f, and do not write to tensors passed to update",
    )


def divergence(subject: Solver | SolverSpec) -> None:
    """Check that a map without a reachable fixed point raises no error and reports no convergence."""
    solver = _built(subject)

    def grows(z: Tensor) -> Tensor:
        """Two rows overflow within a few calls, two oscillate."""
        return torch.cat((z[:2].square() + 10.0, torch.where(z[2:] > 0, -1.0, 1.0)))

    search = _search(solver, tolerance=1e-6, max_iterations=30, norm="absolute")
    solution = search(grows, torch.ones(ROWS, FEATURES))
    require(
        not bool(solution.converged.any()) and bool(solution.z.isfinite().all()),
        solver,
        "divergence",
        f"{int(solution.converged.sum())} rows are reported as converged without a fixed point",
    )


def state_layout(subject: Solver | SolverSpec) -> None:
    """Check that the state's tensors lead with the elements and that ``update`` modifies no argument."""
    solver = _built(subject)
    f, expected = contraction(0.5)
    z = torch.randn_like(expected)
    state = solver.init(z)
    for _ in range(3):
        check_solver_state(solver, state, ROWS)
        leaves, fz = pytree.tree_leaves(state), f(z)
        before, originals = [leaf.clone() for leaf in leaves], (z.clone(), fz.clone())
        proposed, after = point_and_state(solver, solver.update(z, fz, state, f))
        check_next_point(solver, proposed, z, fz)
        same = all(torch.equal(a, b) for a, b in zip(leaves, before, strict=True))
        require(
            same and torch.equal(z, originals[0]) and torch.equal(fz, originals[1]),
            solver,
            "state layout",
            "update must return a new point and state and must not modify its arguments",
        )
        z, state = proposed, after


def frozen_elements(subject: Solver | SolverSpec) -> None:
    """Check that a converged element keeps its exact value while others iterate."""
    solver = _built(subject)
    f, expected = contraction([0.05, 0.3, 0.6, 0.9])
    z0 = torch.zeros_like(expected)
    solution = _search(solver, tolerance=1e-8, max_iterations=1000, trajectory=range(1, 1001))(f, z0)
    _require_converged(solution, solver, "frozen elements")
    points = [z0, *(solution.trajectory or {}).values()]
    for row, count in enumerate(solution.iterations.tolist()):
        value = f(points[count - 1])[row]  # the output of f in the call in which it converged
        require(
            all(torch.equal(point[row], value) for point in (solution.z, *points[count:])),
            solver,
            "frozen elements",
            f"row {row} converged in {count} iterations and changed afterwards; "
            "do not write to tensors passed to update",
        )


def selected_elements(subject: Solver | SolverSpec) -> None:
    """Check that selecting and dropping elements does not change the others' steps and solutions."""
    solver = _built(subject)
    f, expected = contraction([0.05, 0.3, 0.6, 0.9])
    z, rows = torch.randn_like(expected), torch.tensor([3, 1])
    state = solver.init(z)
    for _ in range(3):
        part = pytree.tree_map(lambda leaf: leaf[rows], state)
        few, few_after = solver.update(z[rows], f(z)[rows], part, f.select_rows(rows))
        z, state = solver.update(z, f(z), state, f)
        pairs = [(few, z[rows])]
        pairs += [
            (a.double(), b[rows].double())
            for a, b in zip(pytree.tree_leaves(few_after), pytree.tree_leaves(state), strict=True)
        ]
        error = max(relative_error(a, b) for a, b in pairs)
        require(
            error < 1e-12,
            solver,
            "selected elements",
            f"elements 3 and 1 alone take different steps than in the batch, by {error:.1e}; "
            "keep all memory in the state, one row per element",
        )
    whole, compacted = (
        _search(solver, compact=compact, tolerance=1e-8, max_iterations=1000)(f, torch.zeros_like(expected))
        for compact in (False, True)
    )
    _require_converged(compacted, solver, "selected elements")
    error = relative_error(compacted.z, whole.z)
    require(
        error < 1e-5,
        solver,
        "selected elements",
        f"dropping finished rows from the batch changes the solution by {error:.1e}",
    )


def low_precision(subject: Solver | SolverSpec) -> None:
    """Check that the solver runs on bfloat16 values and ends near the fixed point."""
    solver = _built(subject)
    f, expected = contraction(0.5, dtype=torch.bfloat16)
    solution = _search(solver, tolerance=2e-2, max_iterations=60)(
        f, torch.zeros_like(expected, dtype=torch.bfloat16)
    )
    error = relative_error(solution.z.double(), expected)
    require(
        solution.z.dtype == torch.bfloat16 and error < 0.1,
        solver,
        "low precision",
        f"in bfloat16 the error is {error:.2f}; solve small systems in float32 or better",
    )


def differentiable(subject: Solver | SolverSpec) -> None:
    """Check the gradients of a differentiable solver's steps against finite differences, in float64."""
    solver = _built(subject)
    if isinstance(subject, SolverSpec):
        require(
            subject.differentiable == solver.differentiable,
            solver,
            "differentiable",
            f"differentiable is {subject.differentiable} in the spec, {solver.differentiable} in the solver",
        )
    if not solver.differentiable:
        return
    rows = 2
    f, expected = contraction(0.5, rows=rows, features=4)
    weights = torch.linspace(1, 2, expected.numel(), dtype=expected.dtype).view_as(expected)

    def unrolled(offset: Tensor) -> Tensor:
        shifted = AffineMap(f.jacobian, offset)
        z = torch.zeros_like(expected)
        state = solver.init(z)
        for _ in range(3):
            z, state = solver.update(z, shifted(z), state, shifted)
        return (z * weights).sum()

    offset = f.offset.clone().requires_grad_()
    value = unrolled(offset)
    found = torch.autograd.grad(value, offset)[0] if value.requires_grad else torch.zeros_like(offset)
    step = 1e-6
    with torch.no_grad():
        shifts = step * torch.eye(offset.numel(), dtype=offset.dtype).view(-1, *offset.shape)
        differences = [(unrolled(offset + s) - unrolled(offset - s)) / (2 * step) for s in shifts]
    error = relative_error(found.flatten(), torch.stack(differences))
    require(
        error < 1e-5,
        solver,
        "differentiable",
        f"the gradient of three steps has error {error:.1e}; detach nothing, or set differentiable = False",
    )


def memory_claim(subject: Solver | SolverSpec) -> None:
    """Check that the state does not grow and has the size that the spec's ``state_bytes`` returns.

    ``state_bytes`` builds the solver on the meta device, where ``init`` must run, unless the spec overrides
    it.
    """
    solver = _built(subject)
    for features, dtype in ((FEATURES, torch.float64), (7, torch.float32), (FEATURES, torch.bfloat16)):
        f, expected = contraction(0.5, features=features, dtype=dtype)
        z = torch.zeros_like(expected, dtype=dtype)
        state, sizes = solver.init(z), []
        for _ in range(12):
            z, state = solver.update(z, f(z), state, f)
            sizes.append(sum(leaf.numel() * leaf.element_size() for leaf in pytree.tree_leaves(state)))
        require(
            len(set(sizes)) == 1,
            solver,
            "memory claim",
            f"the state grows from {sizes[0]} to {sizes[-1]} bytes; the shapes of a state must not change",
        )
        if isinstance(subject, SolverSpec):
            claim = subject.state_bytes(features, itemsize=dtype.itemsize)
            require(
                claim * ROWS == sizes[-1],
                subject,
                "memory claim",
                f"state_bytes({features}, itemsize={dtype.itemsize}) returns {claim}, "
                f"but an element of the state takes {sizes[-1] / ROWS:g}",
            )


SOLVER_CONTRACTS: dict[str, Callable[[Solver | SolverSpec], None]] = named(
    (
        state_layout,
        contractions,
        one_iteration,
        elements_apart,
        best_survives,
        divergence,
        frozen_elements,
        selected_elements,
        low_precision,
        differentiable,
        memory_claim,
    )
)


def check_solver(subject: Solver | SolverSpec) -> None:
    """Run every contract on a solver, or on the one that a registered spec builds.

    Args:
        subject: the solver or its spec; a spec's ``state_bytes`` is checked too.

    Raises:
        ContractError: names the solver, the broken contract and a remedy.

    """
    for contract in SOLVER_CONTRACTS.values():
        contract(subject)

"""The contracts of a gradient estimator; each is a function of an estimator or its spec.

``check_gradient(MySpec(...), oracle=…)`` runs all; ``GRADIENT_CONTRACTS`` names them, to write one test each.
The map is ``f(z, x) = tanh(W z + x) + 0.3 sin(x z)``, a contraction, in float64.

The *oracle* is the gradient that the estimator claims to compute: ``"implicit"`` is the gradient of the fixed
point by the implicit function theorem, ``g (I − J)^{-1} ∂f/∂θ`` with ``J = ∂f/∂z``, from a dense inverse; a
function of J replaces that inverse, for instance by a truncated series; ``"computation"`` is the gradient of
the returned value as it was computed, by finite differences.

Shape legend: B rows, F features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from implicit_blocks.interfaces import GradientEstimator, Solver
from implicit_blocks.registry import build
from implicit_blocks.search.search import solve_fixed_point
from implicit_blocks.solution import Solution
from implicit_blocks.solvers import Picard
from implicit_blocks.specs import GradientSpec, SolverSpec, Stopping
from implicit_blocks.testing.contract import named, relative_error, require
from implicit_blocks.testing.ranks import run_two_ranks

Subject = GradientEstimator | GradientSpec
Oracle = Callable[[Tensor], Tensor] | Literal["implicit", "computation"]

ROWS, FEATURES = 3, 5
TIGHT = Stopping(tolerance=1e-13, max_iterations=500)


class Problem(nn.Module):
    """The map with an estimator: ``problem(x)`` returns a ``Solution``; calls of the map are counted."""

    def __init__(
        self, subject: Subject, *, solver: Solver | SolverSpec | None, stopping: Stopping = TIGHT
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        random = torch.randn(FEATURES, FEATURES, dtype=torch.float64, generator=generator)
        self.weight = nn.Parameter(0.3 * torch.linalg.qr(random)[0].contiguous())
        self.gradient = _built(subject)
        self.solver = build(solver) if isinstance(solver, SolverSpec) else solver
        self.stopping = stopping
        self.calls = 0

    def map(self, z: Tensor, x: Tensor) -> Tensor:
        """Return ``f(z, x)``, (B, F)."""
        self.calls += 1
        return torch.tanh(nn.functional.linear(z, self.weight) + x) + 0.3 * torch.sin(x * z)

    def forward(self, x: Tensor) -> Solution:
        """Solve, starting at zero."""
        return solve_fixed_point(
            lambda z: self.map(z, x).to(z.dtype),
            torch.zeros_like(x),
            solver=Picard() if self.solver is None else self.solver,
            gradient=self.gradient,
            stopping=self.stopping,
        )


def inputs(seed: int = 1, *, rows: int = ROWS) -> Tensor:
    """Return a random x, (B, F), that requires gradients."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, FEATURES, dtype=torch.float64, generator=generator).requires_grad_()


def _built(subject: Subject) -> GradientEstimator:
    gradient = build(subject) if isinstance(subject, GradientSpec) else subject
    require(
        isinstance(gradient, GradientEstimator),
        gradient,
        "is a GradientEstimator",
        "pass an instance of implicit_blocks.GradientEstimator",
    )
    return gradient


def upstream(z: Tensor) -> Tensor:
    """Return the gradient of ``weighted`` in z, (B, F)."""
    return torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(9))


def weighted(z: Tensor) -> Tensor:
    """Return a sum of z's entries with fixed weights: a loss."""
    return (z * upstream(z)).sum()


def value(
    subject: Subject, *, oracle: Oracle = "implicit", solver: Solver | SolverSpec | None = None
) -> None:
    """Check that the result is a Solution, at the fixed point unless the oracle is the computation."""
    problem, x = Problem(subject, solver=solver), inputs()
    solution = problem(x)
    require(
        isinstance(solution, Solution) and solution.z.shape == x.shape and solution.z.dtype == x.dtype,
        problem.gradient,
        "value",
        "return the search's Solution with the new value: solution.with_value(z)",
    )
    fields = (solution.iterations, solution.residual, solution.converged, solution.diverged)
    require(
        all(field.shape == (ROWS,) for field in fields) and solution.z.requires_grad,
        problem.gradient,
        "value",
        "the solution must have one entry per row, and its z must carry the gradient",
    )
    if oracle != "computation":
        with torch.no_grad():
            residual = relative_error(solution.z, problem.map(solution.z, x))
        require(
            residual < 1e-8 and bool(solution.converged.all()),
            problem.gradient,
            "value",
            f"the value is not the fixed point: residual {residual:.1e} after a search to 1e-13",
        )


def formula(
    subject: Subject, *, oracle: Oracle = "implicit", solver: Solver | SolverSpec | None = None
) -> None:
    """Compare the gradients of parameters and inputs with the oracle."""
    problem, x = Problem(subject, solver=solver), inputs()
    solution = problem(x)
    found = torch.autograd.grad(weighted(solution.z), (problem.weight, x))
    expected = _differences(problem, x) if oracle == "computation" else _dense(problem, x, solution.z, oracle)
    limit = 1e-6 if oracle == "computation" else 1e-8
    for name, gradient, wanted in zip(("parameters", "inputs"), found, expected, strict=True):
        error = relative_error(gradient, wanted)
        require(
            error < limit,
            problem.gradient,
            "formula",
            f"the gradient of the {name} differs from the oracle's by {error:.1e}; the oracle is {oracle!r}, "
            "and that of a biased estimator is its own formula: oracle=lambda J: …",
        )


def _dense(problem: Problem, x: Tensor, z: Tensor, oracle: Oracle) -> tuple[Tensor, Tensor]:
    """Return ``g · oracle(∂f/∂z) · ∂f/∂θ``, row by row, for the weight and for x."""
    weight, rows = torch.zeros_like(problem.weight), []
    for row in range(x.shape[0]):
        zi, xi = z[row].detach(), x[row].detach().requires_grad_()

        def of_z(v: Tensor, xi: Tensor = xi) -> Tensor:
            return problem.map(v[None], xi[None])[0]

        jacobian: Any = torch.autograd.functional.jacobian(of_z, zi)
        eye = torch.eye(FEATURES, dtype=torch.float64)
        inverse = oracle(jacobian) if callable(oracle) else torch.linalg.inv(eye - jacobian)
        adjoint = upstream(z)[row] @ inverse
        of_weight, of_x = torch.autograd.grad(of_z(zi), (problem.weight, xi), adjoint)
        weight += of_weight
        rows.append(of_x)
    return weight, torch.stack(rows)


def _differences(problem: Problem, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return central differences of the value for each entry."""
    step, results = 1e-6, []
    for tensor in (problem.weight, x):
        result, flat = torch.zeros_like(tensor), tensor.detach().view(-1)
        for index in range(flat.numel()):
            middle = flat[index].item()
            ends = []
            for place in (middle + step, middle - step):
                flat[index] = place
                ends.append(float(weighted(problem(x).z.detach())))
            flat[index] = middle
            result.view(-1)[index] = (ends[0] - ends[1]) / (2 * step)
        results.append(result)
    return results[0], results[1]


def budget(
    subject: Subject, *, oracle: Oracle = "implicit", solver: Solver | SolverSpec | None = None
) -> None:
    """Check that the number of calls of ``f`` is the search's iterations plus a constant."""
    counts = []
    for iterations in (7, 12):
        stopping = Stopping(tolerance=0.0, max_iterations=iterations)
        problem = Problem(subject, solver=solver, stopping=stopping)
        problem(inputs())
        counts.append(problem.calls)
    require(
        counts[1] - counts[0] <= 5,
        problem.gradient,
        "budget",
        f"5 more iterations cost {counts[1] - counts[0]} more calls of f; add a constant number",
    )


def rows_apart(
    subject: Subject, *, oracle: Oracle = "implicit", solver: Solver | SolverSpec | None = None
) -> None:
    """Check that the value and gradient of a row do not depend on the other rows."""
    problem, x = Problem(subject, solver=solver), inputs()
    whole = problem(x)
    (together,) = torch.autograd.grad(weighted(whole.z), x)
    weights = upstream(whole.z)
    for row in range(ROWS):
        single = x[row : row + 1].detach().requires_grad_()
        alone = problem(single)
        (gradient,) = torch.autograd.grad((alone.z * weights[row : row + 1]).sum(), single)
        error = max(relative_error(alone.z[0], whole.z[row]), relative_error(gradient[0], together[row]))
        require(
            error < 1e-9,
            problem.gradient,
            "rows apart",
            f"row {row} alone differs by {error:.1e} from row {row} of the batch",
        )


def several_solves(
    subject: Subject, *, oracle: Oracle = "implicit", solver: Solver | SolverSpec | None = None
) -> None:
    """Check that one backward pass through two solves gives the sum of their gradients."""
    problem, x, other = Problem(subject, solver=solver), inputs(), inputs(2)
    first, second = problem(x), problem(other)
    (together,) = torch.autograd.grad(weighted(first.z) + 3 * weighted(second.z), problem.weight)
    (one,) = torch.autograd.grad(weighted(problem(x).z), problem.weight)
    (two,) = torch.autograd.grad(3 * weighted(problem(other).z), problem.weight)
    error = relative_error(together, one + two)
    require(
        error < 1e-12,
        problem.gradient,
        "several solves",
        f"one backward pass through two solves differs by {error:.1e} from two passes; "
        "keep nothing of a solve on the estimator",
    )


def autocast(
    subject: Subject, *, oracle: Oracle = "implicit", solver: Solver | SolverSpec | None = None
) -> None:
    """Check that gradients under bfloat16 autocast are float32 and close to those without autocast."""
    results = []
    for enabled in (False, True):
        problem = Problem(subject, solver=solver, stopping=Stopping(tolerance=1e-3, max_iterations=30))
        problem.float()
        x = inputs().detach().float().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            loss = weighted(problem(x).z.float())
        results.append(torch.autograd.grad(loss, (problem.weight, x)))
    for name, exact, found in zip(("parameters", "inputs"), *results, strict=True):
        error = relative_error(found.float(), exact)
        require(
            found.dtype == torch.float32 and error < 0.1,
            problem.gradient,
            "autocast",
            f"under bfloat16 autocast the gradient of the {name} is {found.dtype} with error {error:.2f}; "
            "call f under the caller's autocast, and solve in float32 or better",
        )


def ddp(subject: Subject, *, oracle: Oracle = "implicit", solver: Solver | SolverSpec | None = None) -> None:
    """Check that two ranks finish, one with harder data, and average their gradients.

    Runs two processes connected by gloo. They import the estimator by name, so its class must be defined in
    an importable module.
    """
    problem = Problem(subject, solver=solver)
    expected = torch.stack(
        [torch.autograd.grad(weighted(problem(_shard(rank)).z), problem.weight)[0] for rank in (0, 1)]
    ).mean(0)
    for rank, found in enumerate(run_two_ranks(rank_gradient, subject, solver, name=problem.gradient)):
        error = relative_error(found, expected)
        require(
            error < 1e-10,
            problem.gradient,
            "ddp",
            f"the gradient on rank {rank} of 2 differs by {error:.1e} from the mean over both shards; "
            "let gradients flow through autograd to the parameters, and do not depend on the rank",
        )


def _shard(rank: int) -> Tensor:
    """Return the data of a rank; those of rank 1 are harder."""
    return (inputs(5 + rank).detach() * (0.1 + 2 * rank)).requires_grad_()


def rank_gradient(subject: Subject, solver: Solver | SolverSpec | None, rank: int) -> Tensor:
    """Return the gradient of the parameter on one of two ranks, (F, F), in a process group."""
    problem = nn.parallel.DistributedDataParallel(Problem(subject, solver=solver))
    weighted(problem(_shard(rank)).z).backward()
    gradient = problem.module.weight.grad
    assert isinstance(gradient, Tensor)
    return gradient


GRADIENT_CONTRACTS: dict[str, Callable[..., None]] = named(
    (value, formula, budget, rows_apart, several_solves, autocast, ddp)
)


def check_gradient(
    subject: Subject, *, oracle: Oracle = "implicit", solver: Solver | SolverSpec | None = None
) -> None:
    """Run every contract on a gradient estimator, or on the one that a registered spec builds.

    Args:
        subject: the estimator or its spec.
        oracle: the gradient that the estimator claims to compute: ``"implicit"``, ``"computation"``, or a
            function of J, (F, F) to (F, F), that replaces ``(I − J)^{-1}``.
        solver: solver of the search; Picard by default.

    Raises:
        ContractError: names the estimator, the broken contract and a remedy.

    """
    for contract in GRADIENT_CONTRACTS.values():
        contract(subject, oracle=oracle, solver=solver)

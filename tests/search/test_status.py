"""``converged`` and ``diverged``: their contracts, from tiny numbers to those near overflow."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import solution as results
from implicit_blocks.decoding.slots.search import SlotSearch
from implicit_blocks.search.search import solve_fixed_point
from implicit_blocks.search.state import initial_scale

DTYPES = {
    str(d).removeprefix("torch."): d for d in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}
SCOPES = ("sequence", "prefix")
SOLVERS = {
    "picard": ib.Picard(),
    "damped": ib.Picard(damping=0.7, undamped_first=True),
    "patient": ib.PatientPicard(),
    "anderson": ib.Anderson(memory=3),
    "broyden": ib.Broyden(memory=4),
}
GRADIENTS = {
    "search": None,
    "phantom": ib.Phantom(steps=2),
    "implicit": ib.ImplicitFunction(stopping=ib.Stopping(tolerance=1e-3, max_iterations=120)),
    "penalty": ib.JacobianPenalty(),
    "unrolled": ib.Unrolled(steps=12),
}


def solved(f, z0, *, solver=None, tolerance=1e-3, max_iterations=100, scope="sequence", **options):
    stopping = ib.Stopping(tolerance=tolerance, max_iterations=max_iterations, scope=scope)
    search = ib.Search(solver=solver or ib.Picard(), stopping=stopping, **options)
    return search(f, z0)


# ------------------------------------------------------------------------------------ the residual


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_norm_neither_overflows_nor_underflows(dtype):
    limits = torch.finfo(dtype)
    for size in (limits.smallest_normal, 1.0, 0.25 * limits.max):
        x = torch.full((2, 4), size, dtype=dtype)
        torch.testing.assert_close(results.norm(x), 2 * x[:, :1].double(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_a_residual_is_finite_if_and_only_if_its_norms_are(dtype):
    largest = torch.finfo(dtype).max
    fz = torch.tensor([[torch.inf, 1.0], [torch.nan, 1.0], [largest, -largest], [0.0, 0.0]], dtype=dtype)
    z = torch.tensor([[1.0, 1.0], [1.0, 1.0], [0.5 * largest, 1.0], [0.0, 0.0]], dtype=dtype)
    scale, limit = initial_scale(z, (4, 1))
    found, _ = results.relative_residual(results.difference(z, fz), fz, scale, limit)
    finite = found.isfinite().flatten().tolist()
    assert finite[:2] == [False, False]
    assert finite[3]
    if dtype == torch.float64:  # the norm itself is beyond the type
        assert not finite[2]
    else:
        assert float(found[2]) == pytest.approx(1.25**0.5 / 2**0.5, rel=0.01)
    assert float(found[3]) == 0  # a fixed point in 0


def test_the_scale_is_the_largest_value_so_far_up_to_1():
    z = torch.zeros(1, 1)
    scale, limit = initial_scale(z, (1, 1))
    for size, expected in ((1e-20, 1e-20), (1e-3, 1e-3), (1e-5, 1e-3), (50.0, 1.0), (1e-9, 1.0)):
        fz = torch.full((1, 1), size)
        _, scale = results.relative_residual(fz - z, fz, scale, limit)
        assert float(scale) == pytest.approx(expected)


# ------------------------------------------------------------------------------------ one map at a time


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("growth", [1.5, 2.0, 10.0])
@pytest.mark.parametrize("max_iterations", [100, 2000])
def test_a_map_that_grows_never_converges(dtype, scope, growth, max_iterations):
    x = torch.ones(4, 3, 5, dtype=dtype)
    for average in (None, 0.5):
        solution = solved(
            lambda z: growth * z + x,
            torch.zeros_like(x),
            scope=scope,
            tolerance=0.05,
            max_iterations=max_iterations,
            moving_average=average,
        )
        assert not solution.converged.any()
        assert (solution.residual > 0.3).all()
        assert solution.diverged.all() == (
            max_iterations == 2000 or bool((growth**101) > torch.finfo(dtype).max)
        )


@pytest.mark.parametrize("average", [None, 0.5])
@pytest.mark.parametrize("scope", SCOPES)
@pytest.mark.parametrize("rate", [0.9, -0.9])
@pytest.mark.parametrize(
    ("dtype", "size"),
    [(torch.float32, 1e-30), (torch.float32, 1e30), (torch.float64, 1e-50), (torch.float64, 1e300)],
    ids=str,
)
def test_a_contraction_converges_whatever_its_size(dtype, size, rate, scope, average):
    x = torch.linspace(1, 2, 60, dtype=dtype).view(4, 3, 5) * size
    solution = solved(
        lambda z: rate * z + x, torch.zeros_like(x), scope=scope, moving_average=average, max_iterations=200
    )
    assert solution.converged.all()
    assert not solution.diverged.any()
    torch.testing.assert_close(solution.z / size, x / size / (1 - rate), rtol=0.05, atol=0)
    usual = solved(
        lambda z: rate * z + x / size,
        torch.zeros_like(x),
        scope=scope,
        moving_average=average,
        max_iterations=200,
    )
    assert torch.equal(solution.iterations, usual.iterations)


def test_a_solution_of_zero_converges():
    for size in (1e-20, 1.0, 1e20):
        solution = solved(lambda z: 0.5 * z, torch.full((2, 4), size), max_iterations=150)
        assert solution.converged.all()
        assert (solution.z.abs() < 1e-9 * max(size, 1)).all()
    constant = solved(torch.zeros_like, torch.full((2, 4), 1e30))
    assert constant.converged.all()
    assert constant.iterations.tolist() == [2, 2]


def test_a_value_near_overflow_that_maps_to_itself_converges():
    large = torch.full((1, 4), 3e38)
    for norm in ("relative", "absolute"):
        stopping = ib.Stopping(tolerance=1e-6, max_iterations=20, norm=norm)
        solution = ib.Search(solver=ib.Picard(), stopping=stopping)(lambda z: large, torch.zeros(1, 4))
        assert solution.converged.all()
        assert solution.iterations.tolist() == [2]


def test_an_overflowing_difference_of_float16_points_does_not_diverge():
    """The difference of 60,000 and −30,000 is not finite in float16."""
    solution = solved(lambda z: -0.5 * z + 10, torch.full((1, 4), 6e4, dtype=torch.float16), tolerance=0.05)
    assert solution.converged.all()


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
def test_an_extrapolation_beyond_the_type_does_not_diverge(solver):
    """The secant of the first two values leads to 300,000; the fixed point is 60,000."""
    z0 = torch.zeros(2, 4, dtype=torch.float16)
    solution = solved(lambda z: (0.9 * z + 3e4).clamp(max=6e4), z0, solver=solver)
    assert solution.converged.all()
    torch.testing.assert_close(solution.z, torch.full_like(z0, 6e4), rtol=0.01, atol=0)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e25])
def test_a_jacobian_penalty_does_not_depend_on_the_size_of_the_solution(size):
    x = torch.linspace(1, 2, 32).view(4, 8) * size
    layer = ib.FixedPoint(lambda z, x: 0.5 * z + x, gradient=ib.JacobianPenalty(weight=1.0))
    torch.testing.assert_close(layer(x).penalty, torch.full((4,), 0.25), rtol=1e-3, atol=0)


@dataclass
class Growing:
    """A linear map of sequences, for windowed searches; it expands if ``rate`` is above 1."""

    rate: float
    tokens: int

    def __call__(self, z):
        return self.rate * z + 1

    def first(self, tokens):
        return replace(self, tokens=tokens)

    def after(self, z):
        return replace(self, tokens=self.tokens - z.shape[1])


@pytest.mark.parametrize("scope", SCOPES)
def test_windows_of_an_expanding_map_do_not_converge(scope):
    from implicit_blocks.search.windowed import WindowedSearch

    for rate, converges in ((2.0, False), (0.5, True)):
        search = ib.Search(
            solver=ib.Picard(), stopping=ib.Stopping(tolerance=0.05, max_iterations=100, scope=scope)
        )
        solution = WindowedSearch(search, 2)(Growing(rate, 6), torch.zeros(3, 6, 4))
        assert solution.converged.tolist() == [converges] * 3


@pytest.mark.parametrize("scope", SCOPES)
def test_a_report_of_large_unequal_values_is_not_converged(scope):
    z = torch.full((2, 3, 4), 1e25)
    search = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(tolerance=0.05, scope=scope))
    assert not search.report(z, 2 * z, iterations=3).converged.any()
    assert search.report(z, 1.01 * z, iterations=3).converged.all()
    assert search.report(z, z * torch.inf, iterations=3).diverged.all()


@pytest.mark.filterwarnings("ignore::implicit_blocks.ConvergenceWarning")
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e25])
def test_an_adjoint_reports_its_own_status(size):
    """The adjoint of a tiny gradient takes as many iterations as that of any other."""

    def backward(rate):
        layer = ib.FixedPoint(
            lambda z, x: rate * z + x,
            solver=ib.Broyden(),  # finds the fixed point of expanding maps too
            gradient=ib.ImplicitFunction(stopping=ib.Stopping(tolerance=1e-3, max_iterations=100)),
        )
        x = torch.linspace(1, 2, 32).view(4, 8).requires_grad_()
        solution = layer(x)
        assert solution.converged.all()
        (size * solution.z).sum().backward()
        return x.grad, solution.adjoint.solution

    grad, adjoint = backward(0.9)
    assert adjoint.converged.all()
    torch.testing.assert_close(grad / size, torch.full_like(grad, 10.0), rtol=0.02, atol=0)
    _, adjoint = backward(1.7)
    assert not adjoint.converged.any()


# ------------------------------------------------------------------------------------ all maps together

TOKENS, FEATURES, EACH = 2, 4, 3
KINDS = (
    "contracting",
    "marginal",
    "expanding",
    "oscillating",
    "not_a_number",
    "tanh",
    "wild",
    "no_fixed_point",
)
LINEAR, TANH = 5, 7  # the number of kinds up to the last linear one, and up to the last tanh


class Maps:
    """Rows of all kinds and sizes, with statistics of the values that they returned.

    Each row has a matrix A, an offset b and a size m: ``A z + b``, ``m tanh(A z / m + b / m)`` or
    ``z + (|z| + m) / 2``. Tokens and rows are independent.
    """

    def __init__(self, seed: int, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(seed)

        def uniform(low, high, *shape):
            return low + (high - low) * torch.rand(shape, generator=generator, dtype=torch.float64)

        rows = len(KINDS) * EACH
        self.kind = torch.arange(len(KINDS)).repeat_interleave(EACH)
        turn = torch.linalg.qr(uniform(-1, 1, rows, FEATURES, FEATURES)).Q
        rate = torch.stack([self._rate(KINDS[kind], uniform) for kind in self.kind.tolist()])
        matrix = rate[:, None, None] * turn
        eye = torch.eye(FEATURES, dtype=torch.float64)
        matrix[self.kind == 1] = eye
        flips = (self.kind == 3) & (uniform(0, 1, rows) < 0.5)
        matrix[flips] = -eye
        low, high = (-2.0, 3.0) if dtype == torch.float16 else (-30.0, 30.0)
        size = 10 ** uniform(low, high, rows, 1, 1)
        self.start = (size * uniform(-1, 1, rows, TOKENS, FEATURES)).to(dtype)
        self.start[uniform(0, 1, rows) < 0.5] = 0.0
        # The oracle computes in float64 with the rounded numbers that the map has.
        self.matrix, self.size = matrix.to(dtype), size.to(dtype)
        self.offset = (size * uniform(0.2, 1, rows, TOKENS, FEATURES)).to(dtype)
        self.slope = torch.where(self.kind == 7, 1.5, rate.clamp(min=1.0))
        self.lost_at = torch.where(self.kind == 4, uniform(2, 40, rows).long(), 10**6)
        self.calls = 0
        self.finite = torch.ones(rows, TOKENS, dtype=torch.bool)
        self.largest = torch.zeros(rows, TOKENS, dtype=torch.float64)

    @staticmethod
    def _rate(kind, uniform):
        bounds = {"expanding": (1.5, 10), "wild": (1.5, 4), "oscillating": (1, 1), "marginal": (1, 1)}
        return uniform(*bounds.get(kind, (0.3, 0.9)))

    def mapped(self, z, dtype):
        """Return the map's values, computed in this type."""
        matrix, offset, size = (t.to(dtype) for t in (self.matrix, self.offset, self.size))
        linear, curved, free = (
            slice(EACH * a, EACH * b) for a, b in ((0, LINEAR), (LINEAR, TANH), (TANH, len(KINDS)))
        )

        def product(rows, point):
            return torch.einsum("bij,blj->bli", matrix[rows], point)

        return torch.cat(
            (
                product(linear, z[linear]) + offset[linear],
                size[curved]
                * torch.tanh(product(curved, z[curved] / size[curved]) + offset[curved] / size[curved]),
                z[free] + 0.5 * (z[free].abs() + size[free]),
            )
        )

    def __call__(self, z):
        self.calls += 1
        fz = self.mapped(z, z.dtype)
        fz = torch.where((self.lost_at <= self.calls)[:, None, None], torch.nan, fz)
        with torch.no_grad():
            found = fz.double()
            self.finite &= (found.abs() < 0.25 * torch.finfo(z.dtype).max).all(-1)  # False for NaN
            self.largest = torch.fmax(self.largest, found.nan_to_num(posinf=0, neginf=0).norm(dim=-1))
        return fz


def by_element(value, scope):
    """Reshape (B, L, F) to elements, (E, F)."""
    return value.flatten(0, 1) if scope == "prefix" else value.flatten(1)


def check_status(maps, solution, value, *, scope, dtype, tolerance, steps=1):
    """Compare a solution's status with the same maps in float64."""
    per_row = TOKENS if scope == "prefix" else 1
    converged = (solution.token_converged if scope == "prefix" else solution.converged).flatten()
    diverged = (solution.token_diverged if scope == "prefix" else solution.diverged).flatten()
    kind = maps.kind.repeat_interleave(per_row)
    assert not (converged & diverged).any()

    finite = maps.finite.flatten() if scope == "prefix" else maps.finite.all(1)
    assert not (diverged & finite).any(), "diverged, but every value was finite"
    bounded = (kind == 0) | (kind == 5) | (kind == 6)
    assert not (diverged & bounded).any(), "diverged, but the map is bounded"

    # If ‖f(z) − z‖ ≤ tolerance ‖f(z)‖, the slope of the map bounds the residual at f(z).
    wide = value.detach().double()
    miss = by_element(maps.mapped(wide, torch.float64) - wide, scope).norm(dim=1)
    size = by_element(wide, scope).norm(dim=1)
    largest = maps.largest.flatten() if scope == "prefix" else maps.largest.norm(dim=1)
    offset = by_element(maps.offset.double(), scope).norm(dim=1)
    slope = maps.slope.repeat_interleave(per_row)
    rounding = 8 * FEATURES * torch.finfo(dtype).eps * (slope * size + offset)
    allowed = slope**steps * (tolerance * (size + 1e-9 * largest) + rounding) + torch.finfo(dtype).tiny
    checked = converged & (kind != 4)
    assert (miss <= 1.05 * allowed)[checked].all(), "converged, but the residual at the value is larger"

    lost_at = maps.lost_at.repeat_interleave(per_row)
    iterations = (solution.token_iterations if scope == "prefix" else solution.iterations).flatten()
    assert (iterations < lost_at)[converged].all(), "converged by a call that returned NaN"


def check_adjoint(maps, solution, g, *, dtype, tolerance):
    """Compare the status of an adjoint of linear rows with ``a = g + Aᵀ a`` in float64."""
    adjoint = solution.adjoint.solution
    linear = (maps.kind < LINEAR - 1) & ~solution.diverged  # rows that have diverged have no gradient
    a, matrix = adjoint.z.double()[linear], maps.matrix.double()[linear]
    target = g.double()[linear]
    miss = (target + torch.einsum("bji,blj->bli", matrix, a) - a).flatten(1).norm(dim=1)
    size, slope = a.flatten(1).norm(dim=1), maps.slope[linear]
    rounding = 8 * FEATURES * torch.finfo(dtype).eps * (slope * size + target.flatten(1).norm(dim=1))
    allowed = slope * (tolerance * size + rounding) + torch.finfo(dtype).tiny
    converged = adjoint.converged[linear]
    assert (miss <= 1.05 * allowed)[converged].all(), "the adjoint converged to something else"
    assert not adjoint.diverged[maps.kind == 0].any()
    if dtype in (torch.float32, torch.float64):
        assert adjoint.converged[maps.kind == 0].all()


def check_maps(seed, dtype, scope, solver, gradient):
    precise = dtype in (torch.float32, torch.float64)
    tolerance = 1e-3 if precise else 0.05
    stopping = ib.Stopping(tolerance=tolerance, max_iterations=120, scope=scope)
    maps = Maps(seed, dtype)
    z0 = maps.start
    if gradient is None:
        solution = ib.Search(solver=solver, stopping=stopping)(maps, z0)
        check_status(maps, solution, solution.z, scope=scope, dtype=dtype, tolerance=tolerance)
        picard = isinstance(solver, ib.Picard) and solver.damping == 1
        if precise and picard:  # the fixed point of every contraction
            assert solution.converged[(maps.kind == 0) | (maps.kind == 5)].all()
        if precise and isinstance(solver, ib.Picard):
            assert not solution.converged[(maps.kind == 1) | (maps.kind == 2) | (maps.kind == 7)].any()
        return
    if isinstance(gradient, ib.Unrolled):
        if not solver.differentiable:
            return
        last = []

        def keep_last(z):
            last[:] = [maps(z)]
            return last[0]

        solution = solve_fixed_point(keep_last, z0, solver=solver, gradient=gradient, stopping=stopping)
        if not solution.diverged.any():  # otherwise the last call contains only the other rows
            check_status(maps, solution, last[0], scope=scope, dtype=dtype, tolerance=tolerance)
        return
    solution = solve_fixed_point(maps, z0, solver=solver, gradient=gradient, stopping=stopping)
    check_status(maps, solution, solution.z, scope=scope, dtype=dtype, tolerance=tolerance, steps=6)
    if isinstance(gradient, ib.ImplicitFunction):
        exponent = (
            torch.linspace(-2, 2, len(z0)) if dtype == torch.float16 else torch.linspace(-30, 25, len(z0))
        )
        generator = torch.Generator().manual_seed(seed)
        exponent = exponent[torch.randperm(len(z0), generator=generator)]
        g = (10 ** exponent.double())[:, None, None] * torch.rand(z0.shape, generator=generator) + 0
        g = g.to(dtype)
        solution.z.backward(g)
        check_adjoint(maps, solution, g, dtype=dtype, tolerance=1e-3)


def cases(covering):
    """Return all combinations, or with ``covering`` every fourth one of those with a gradient."""
    names = itertools.product(DTYPES, SCOPES, SOLVERS, GRADIENTS)
    chosen = [
        case for number, case in enumerate(names) if not covering or "search" in case or number % 4 == 0
    ]
    values = ((DTYPES[d], scope, SOLVERS[s], GRADIENTS[g]) for d, scope, s, g in chosen)
    return [pytest.param(*value, id="-".join(case)) for value, case in zip(values, chosen, strict=True)]


@pytest.mark.parametrize(("dtype", "scope", "solver", "gradient"), cases(covering=True))
def test_the_status_agrees_with_an_oracle_in_float64(dtype, scope, solver, gradient):
    check_maps(0, dtype, scope, solver, gradient)


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "scope", "solver", "gradient"), cases(covering=False))
def test_the_status_agrees_with_an_oracle_in_float64_for_many_maps(dtype, scope, solver, gradient):
    for seed in range(40):
        check_maps(seed, dtype, scope, solver, gradient)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("norm", ["relative", "absolute"])
def test_the_search_of_slots_has_the_status_of_the_loop(norm, solver, dtype):
    """Slots have the iterations, status and residuals that a search reports for rows."""
    stopping = ib.Stopping(tolerance=1e-3, max_iterations=120, norm=norm)
    maps, again = Maps(0, dtype), Maps(0, dtype)
    expected = ib.Search(solver=solver, stopping=stopping)(maps, maps.start)
    rows = torch.arange(len(maps.start))
    slots = SlotSearch(
        solver,
        stopping,
        slots=len(rows),
        width=TOKENS * FEATURES,
        device=torch.device("cpu"),
        dtype=dtype,
    )
    slots.begin(rows, again.start.flatten(1))

    def f(z):
        return again(z.view(-1, TOKENS, FEATURES)).flatten(1)

    while not slots.done.all():
        slots.take(rows, f(slots.z), ~slots.done, f)
    assert torch.equal(slots.converged, expected.converged)
    assert torch.equal(slots.iterations, expected.iterations)
    torch.testing.assert_close(slots.residual, expected.residual.to(slots.residual.dtype))

"""The loop of a search: measuring, stopping, freezing, compaction, and the returned solution."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import implicit_blocks as ib
from implicit_blocks.search.state import RowCompaction
from implicit_blocks.testing.solvers import contraction


def search(**options) -> ib.Search:
    stopping = {k: options.pop(k) for k in ("tolerance", "max_iterations", "norm", "scope") if k in options}
    options.setdefault("solver", ib.Picard())
    return ib.Search(stopping=ib.Stopping(**stopping), **options)


class Counted:
    """A map that counts its calls and has ``select_rows``, for compaction."""

    def __init__(self, f, calls=None, rows=None):
        self.f, self.calls, self.rows = f, calls if calls is not None else [], rows

    def __call__(self, z):
        self.calls.append(len(z))
        return self.f(z, self.rows if self.rows is not None else torch.arange(len(z)))

    def select_rows(self, rows):
        return Counted(self.f, self.calls, rows if self.rows is None else self.rows[rows])


RATES = torch.tensor([0.1, 0.5, 0.9, 0.97], dtype=torch.float64)


def scaled(z, rows):
    """Contract each row towards 1, each at a different rate."""
    rate = RATES[rows].view(-1, *[1] * (z.ndim - 1))
    return rate * z + (1 - rate)


def test_each_row_stops_independently_and_reports_its_residual():
    f = Counted(scaled)
    z0 = torch.zeros(4, 3, dtype=torch.float64)
    solution = search(tolerance=1e-6, max_iterations=500, compact=False)(f, z0)
    assert solution.converged.all()
    assert solution.iterations.tolist() == sorted(solution.iterations.tolist())
    assert solution.iterations[0] < 10 < solution.iterations[3]
    assert (solution.residual <= 1e-6).all()
    assert len(f.calls) == solution.iterations.max()
    torch.testing.assert_close(solution.z, torch.ones_like(z0), atol=1e-4, rtol=0)


def curved(z, rows):
    """Give each entry a different fixed point, so that Anderson too takes some iterations."""
    offset = torch.arange(z[0].numel(), dtype=z.dtype).view(z.shape[1:]) / 3
    return scaled(torch.sin(z) + offset, rows)


@pytest.mark.parametrize("solver", [ib.Picard(), ib.Picard(damping=0.7), ib.Anderson(memory=2)])
@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_compaction_drops_converged_rows_and_changes_no_result(solver, scope):
    z0 = torch.zeros(4, 3, 2, dtype=torch.float64)
    options = {"solver": solver, "tolerance": 1e-8, "max_iterations": 900, "scope": scope, "trace": True}
    f = Counted(curved)
    compacted = search(**options)(f, z0)
    whole = search(**options, compact=False)(Counted(curved), z0)
    assert f.calls[0] == 4
    assert f.calls[-1] == 1
    assert sum(f.calls) <= 0.75 * 4 * len(f.calls)
    assert torch.equal(compacted.iterations, whole.iterations)
    assert torch.equal(compacted.z, whole.z)
    assert torch.equal(compacted.residual, whole.residual)
    assert torch.equal(compacted.trace.isnan(), whole.trace.isnan())
    torch.testing.assert_close(compacted.trace, whole.trace, equal_nan=True)


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_compaction_keeps_the_padding_of_each_row(scope):
    valid = torch.tensor([[1, 0, 0], [0, 0, 1], [0, 1, 1], [1, 1, 0]], dtype=torch.bool)
    z0 = torch.zeros(4, 3, 2, dtype=torch.float64)
    options = {"valid": valid, "tolerance": 1e-8, "max_iterations": 900, "scope": scope}
    f = Counted(scaled)
    found = search(**options)(f, z0)
    whole = search(**options, compact=False)(Counted(scaled), z0)
    assert f.calls[-1] == 1
    assert torch.equal(found.z, whole.z)
    assert torch.equal(found.iterations, whole.iterations)
    assert torch.equal(found.z[~valid], z0[~valid])
    torch.testing.assert_close(found.z[valid], torch.ones_like(found.z[valid]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 23, 100])
def test_bucketed_compaction_uses_four_batch_sizes_and_changes_no_result(rows, scope):
    """Frozen rows that are done fill the batch up."""
    bucketed = RowCompaction(bucket_sizes=True)
    z0 = torch.zeros(rows, 3, 2, dtype=torch.float64)
    options = {"tolerance": 1e-6, "max_iterations": 400, "scope": scope, "trace": True}
    sizes = set()
    for seed in range(4):
        rate = 0.95 * torch.rand(rows, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        if seed == 3:
            rate[:-1] = 0.1  # all but one converge at the same time

        def f(z, which, rate=rate):
            return rate[which].view(-1, 1, 1) * (torch.sin(z) - 1) + 1

        whole = search(**options, compact=False)(Counted(f), z0)
        counted = Counted(f)
        found = search(**options, compact=bucketed)(counted, z0)
        sizes |= set(counted.calls)
        for name in ("z", "iterations", "residual", "converged", "diverged"):
            assert torch.equal(getattr(found, name), getattr(whole, name)), name
        torch.testing.assert_close(found.trace, whole.trace, equal_nan=True)
    allowed = [rows]
    while allowed[-1] // 2 >= max(1, rows // 8):
        allowed.append(allowed[-1] // 2)
    assert len(allowed) <= 4
    assert sizes <= set(allowed)
    assert min(sizes) <= max(1, rows // 4)


def test_a_frozen_value_is_bitwise_constant():
    z0 = torch.zeros(4, 3, dtype=torch.float64)
    alone = search(tolerance=1e-3, max_iterations=500)(lambda z: scaled(z, torch.arange(1)), z0[:1])
    together = search(tolerance=1e-3, max_iterations=500, compact=False)(Counted(scaled), z0)
    assert torch.equal(alone.z[0], together.z[0])


def test_the_residual_is_that_of_the_undamped_map():
    f, _ = contraction(0.5)
    z0 = torch.ones(4, 12, dtype=torch.float64)
    solution = search(solver=ib.Picard(damping=0.1), tolerance=0.0, max_iterations=1)(f, z0)
    expected = (f(z0) - z0).norm(dim=1) / (f(z0).norm(dim=1) + 1e-9)
    torch.testing.assert_close(solution.residual, expected)
    absolute = search(norm="absolute", tolerance=0.0, max_iterations=1)(f, z0)
    torch.testing.assert_close(absolute.residual, (f(z0) - z0).norm(dim=1))


def test_the_residual_of_bfloat16_is_float32():
    f, _ = contraction(0.5, dtype=torch.bfloat16)
    solution = search(tolerance=0.0, max_iterations=3)(f, torch.zeros(4, 12, dtype=torch.bfloat16))
    assert solution.z.dtype == torch.bfloat16
    assert solution.residual.dtype == torch.float32


def test_the_value_with_the_lowest_residual_is_returned_when_iterations_run_out():
    """The map first converges, then diverges, so that its best value is not the last."""
    values = iter([1.0, 1.5, 1.6, 3.0, 9.0])
    solution = search(tolerance=0.0, max_iterations=5, norm="absolute")(
        lambda z: torch.full_like(z, next(values)), torch.zeros(2, 1)
    )
    assert torch.equal(solution.z, torch.full((2, 1), 1.6))
    assert not solution.converged.any()
    assert not solution.diverged.any()
    torch.testing.assert_close(solution.residual, torch.full((2,), 0.1))


def test_the_last_call_counts_when_iterations_run_out():
    z0 = torch.zeros(2, 3, dtype=torch.float64)
    solution = search(tolerance=0.0, max_iterations=4)(lambda z: 0.5 * z + 1, z0)
    assert torch.equal(solution.z, torch.full_like(z0, 1 + 0.5 + 0.25 + 0.125))
    assert solution.iterations.tolist() == [4, 4]


class Counting(ib.Solver):
    """Picard that counts its steps; ``given`` is the state that it last received."""

    def init(self, z0_EF):
        return torch.zeros(len(z0_EF), dtype=torch.int64)

    def update(self, z_EF, fz_EF, state, f):
        self.given = state
        return fz_EF, state + 1


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_the_solver_state_of_frozen_elements_does_not_change(scope):
    solver = Counting()
    z0 = torch.zeros(4, 3, 2, dtype=torch.float64)
    options = {"tolerance": 1e-6, "max_iterations": 500, "scope": scope}
    solution = search(solver=solver, compact=False, **options)(Counted(scaled), z0)
    iterations = solution.iterations if scope == "sequence" else solution.token_iterations.flatten()
    # Before the last call, frozen elements have all their steps but the last, active ones all so far.
    assert torch.equal(solver.given, (iterations - 1).clamp(max=iterations.max() - 2))


@pytest.mark.parametrize("norm", ["relative", "absolute"])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_diverged_row_keeps_its_best_value_and_affects_no_other_row(norm, value):
    def f(z):
        fz = 0.5 * z + 1
        fz[1] = torch.where(z[1] > 1.4, value, fz[1])
        return fz

    solution = search(tolerance=1e-6, max_iterations=100, norm=norm)(f, torch.zeros(3, 2))
    assert solution.iterations[1] == 3 < solution.iterations[0]  # it leaves immediately
    assert solution.diverged.tolist() == [False, True, False]
    assert solution.converged.tolist() == [True, False, True]
    assert torch.equal(solution.z[1], torch.full((2,), 1.5))
    torch.testing.assert_close(solution.z[0], torch.full((2,), 2.0), atol=1e-4, rtol=0)


def test_a_row_that_diverges_in_the_first_call_returns_its_start():
    solution = search(max_iterations=4)(lambda z: z * torch.inf, torch.ones(2, 3))
    assert solution.diverged.all()
    assert torch.equal(solution.z, torch.ones(2, 3))
    assert solution.residual.isinf().all()


# ------------------------------------------------------------------------------------------- prefix scope


def causal_map(z):
    """Contract each token towards the mean of the tokens up to it, each at a different rate."""
    length = z.shape[1]
    mean = z.cumsum(1) / torch.arange(1, length + 1, dtype=z.dtype)[:, None]
    rate = torch.linspace(0.2, 0.8, length, dtype=z.dtype)[:, None]
    return rate * mean + (1 - rate) * torch.linspace(1, 2, length, dtype=z.dtype)[:, None]


def test_prefix_scope_freezes_tokens_in_order_and_reports_each():
    z0 = torch.zeros(2, 6, 3, dtype=torch.float64)
    solution = search(scope="prefix", tolerance=1e-6, max_iterations=200)(causal_map, z0)
    assert solution.token_converged.all()
    iterations = solution.token_iterations[0].tolist()
    assert iterations == sorted(iterations)
    assert iterations[0] < iterations[-1]
    assert torch.equal(solution.iterations, solution.token_iterations.amax(1))
    assert torch.equal(solution.residual, solution.token_residual.amax(1))


@given(cut=st.integers(1, 5), seed=st.integers(0, 50))
@settings(max_examples=20)
def test_prefix_scope_results_do_not_depend_on_later_tokens(cut, seed):
    z0 = torch.randn(2, 6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    options = {"scope": "prefix", "tolerance": 1e-3, "max_iterations": 100}

    def first(z):
        whole = torch.cat((z, torch.zeros(2, 6 - z.shape[1], 3, dtype=z.dtype)), dim=1)
        return causal_map(whole)[:, : z.shape[1]]

    whole, part = search(**options)(causal_map, z0), search(**options)(first, z0[:, :cut])
    assert torch.equal(whole.z[:, :cut], part.z)
    assert torch.equal(whole.token_iterations[:, :cut], part.token_iterations)


def test_prefix_scope_reports_one_unconverged_token_of_a_long_sequence():
    def f(z):
        fz = torch.ones_like(z)
        fz[:, 50] = -z[:, 50] + 1  # never converges
        return fz

    z0 = torch.full((1, 100, 4), 0.8)
    assert search(tolerance=0.1, max_iterations=20)(f, z0).converged.all()
    solution = search(tolerance=0.1, max_iterations=20, scope="prefix")(f, z0)
    assert not solution.converged.any()
    assert solution.token_converged[0, :50].all()
    assert not solution.token_converged[0, 50:].any()


def test_tokens_after_a_diverged_token_do_not_converge():
    def f(z):
        fz = 0.5 * z + 1
        fz[0, 2] = torch.where(z[0, 2] > 1, torch.nan, fz[0, 2])
        return fz

    solution = search(scope="prefix", tolerance=1e-6, max_iterations=60)(f, torch.zeros(2, 5, 2))
    assert solution.token_diverged.tolist() == [[False, False, True, False, False], [False] * 5]
    assert solution.token_converged.tolist() == [[True, True, False, False, False], [True] * 5]
    assert solution.z.isfinite().all()


@pytest.mark.parametrize("solver", [ib.Picard(), ib.Anderson(memory=2)])
@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_padding_enters_no_norm(scope, solver):
    valid = torch.ones(2, 6, dtype=torch.bool)
    valid[0, 4:] = False

    def f(z):
        fz = causal_map(z)
        fz[0, 4:] = -10 * z[0, 4:] + 7  # padding never converges
        return fz

    z0 = torch.zeros(2, 6, 3, dtype=torch.float64)
    z0[0, 4:] = 1e3  # must not enter the norm of the other tokens' residuals
    options = {"scope": scope, "tolerance": 1e-5, "max_iterations": 100, "solver": solver}
    padded = search(**options, valid=valid)(f, z0)
    alone = search(**options)(
        lambda z: causal_map(torch.nn.functional.pad(z, (0, 0, 0, 2)))[:, :4], z0[:1, :4]
    )
    assert padded.converged.all()
    # Sums over rows of another length may differ in their last digits.
    torch.testing.assert_close(padded.z[:1, :4], alone.z, atol=1e-12, rtol=0)
    assert padded.iterations[0] == alone.iterations[0]


def test_the_trace_contains_every_residual():
    solution = search(tolerance=1e-4, max_iterations=100, trace=True)(
        Counted(scaled), torch.zeros(4, 3).double()
    )
    assert solution.trace.shape == (solution.iterations.max(), 4)
    assert torch.equal((~solution.trace.isnan()).sum(0), solution.iterations)
    last = solution.trace[solution.iterations - 1, torch.arange(4)]
    torch.testing.assert_close(last, solution.residual)


def test_wrong_shapes_are_refused():
    with pytest.raises(ValueError, match="at least one more dimension"):
        search()(lambda z: z, torch.zeros(3))
    with pytest.raises(ValueError, match="use scope 'sequence'"):
        search(scope="prefix")(lambda z: z, torch.zeros(3, 4))
    with pytest.raises(ValueError, match="one flag per token"):
        search(valid=torch.ones(2, 2, dtype=torch.bool))(lambda z: z, torch.zeros(2, 3, 4))


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_a_residual_at_the_tolerance_has_converged(scope):
    stopping = ib.Stopping(tolerance=0.5, max_iterations=9, norm="absolute", scope=scope)
    solution = ib.Search(solver=ib.Picard(), stopping=stopping)(lambda z: z + 0.5, torch.zeros(2, 1, 1))
    assert solution.residual.tolist() == [0.5, 0.5]
    assert solution.converged.all()
    assert solution.iterations.tolist() == [1, 1]

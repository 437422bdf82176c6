"""Gradient ``last_loops`` against autograd in float64: all or the last loops, per batch, row and token."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks.gradients.last_loops import relative_change
from implicit_blocks.search.agreement import fixed_budget
from implicit_blocks.search.loops import LoopCounts
from implicit_blocks.search.search import solve_fixed_point
from implicit_blocks.search.windowed import WindowedSearch
from implicit_blocks.testing import GRADIENT_CONTRACTS

ROWS, LENGTH, WIDTH = 3, 4, 5


class Causal(nn.Module):
    """``f(z, e) = tanh(z W + mean of the tokens so far · V + e)``, (B, L, D); counts its calls."""

    def __init__(self, e):
        super().__init__()
        self.w, self.v = (
            nn.Parameter(0.4 * torch.linalg.qr(torch.randn(WIDTH, WIDTH).double())[0]) for _ in range(2)
        )
        self.e, self.calls, self.differentiated = e, 0, 0

    def forward(self, z):
        self.calls += 1
        self.differentiated += torch.is_grad_enabled()
        mean = z.cumsum(1) / torch.arange(1, z.shape[1] + 1).view(-1, 1)
        return torch.tanh(z @ self.w + mean @ self.v + self.e)


@pytest.fixture
def f() -> Causal:
    return Causal(torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, requires_grad=True))


def start(requires_grad=False):
    generator = torch.Generator().manual_seed(3)
    z = torch.randn(ROWS, LENGTH, WIDTH, dtype=torch.float64, generator=generator)
    return z.requires_grad_(requires_grad)


def solve(f, z0, gradient, *, loops=None, stopping=None, **options):
    return solve_fixed_point(
        f,
        z0,
        solver=ib.Picard(),
        gradient=gradient,
        stopping=stopping or ib.Stopping(max_iterations=5),
        loops=loops,
        **options,
    )


def gradients(f, z):
    weights = torch.linspace(-1, 1, z.numel(), dtype=z.dtype).view_as(z)
    return torch.autograd.grad((z * weights).sum(), (f.w, f.v, f.e))


def assert_same(f, found, expected):
    torch.testing.assert_close(found, expected)
    for one, other in zip(gradients(f, found), gradients(f, expected), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def by_hand(f, z, without, differentiated):
    """Take the loops of each element, (B, 1) or (B, L) counts: the two parts run to the batch's maximum."""
    with torch.no_grad():
        for t in range(int(without.max())):
            z = torch.where((without > t)[:, :, None], f(z), z)
    z = z.detach()
    for t in range(int(differentiated.max())):
        z = torch.where((differentiated > t)[:, :, None], f(z), z)
    return z


@pytest.mark.parametrize("last", [None, 1, 2, 5, 9])
def test_the_gradient_is_that_of_the_last_loops(f, last):
    found = solve(f, start(), ib.LastLoops(loops=last))
    assert (f.calls, f.differentiated) == (5, min(last or 5, 5))
    differentiated = torch.tensor([[min(last or 5, 5)]])
    assert_same(f, found.z, by_hand(f, start(), 5 - differentiated, differentiated))
    assert found.iterations.tolist() == [5] * ROWS


def test_the_penalty_is_the_squared_relative_residual_of_the_last_loop(f):
    assert solve(f, start(), ib.LastLoops(loops=2)).penalty is None
    found = solve(f, start(), ib.LastLoops(loops=2, residual_weight=0.5))
    z = start()
    with torch.no_grad():
        for _ in range(3):
            z = f(z)
    before = f(z.detach())
    after = f(before)
    ratio = (after - before).square().sum(-1) / after.square().sum(-1)
    expected = 0.5 * ratio.mean(1)
    torch.testing.assert_close(found.penalty.double(), expected, rtol=1e-5, atol=1e-7)
    (ours,) = torch.autograd.grad(found.penalty.sum(), f.w)
    (theirs,) = torch.autograd.grad(expected.sum(), f.w)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def test_padding_is_left_out_of_the_penalty():
    before, z = torch.ones(2, 3, 4), torch.full((2, 3, 4), 2.0)
    before[:, 2] = torch.nan
    valid = torch.tensor([[True, True, False]] * 2)
    torch.testing.assert_close(relative_change(before, z, valid=valid), torch.full((2,), 0.25))
    torch.testing.assert_close(
        relative_change(torch.ones(2, 4), torch.full((2, 4), 2.0)), torch.full((2,), 0.25)
    )


def test_a_negative_weight_of_the_penalty_is_refused():
    with pytest.raises(ValueError, match="residual_weight"):
        ib.LastLoops(residual_weight=-1.0)


def test_loops_of_the_search_precede_its_iterations(f):
    found = solve(f, start(), ib.LastLoops(loops=2), loops=LoopCounts(3))
    assert f.calls == 3
    assert_same(f, found.z, by_hand(f, start(), torch.tensor([[1]]), torch.tensor([[2]])))


def test_rows_take_their_own_numbers_of_loops(f):
    total = torch.tensor([1, 6, 3])
    found = solve(f, start(), ib.LastLoops(loops=2), loops=LoopCounts(total))
    differentiated = total.clamp(max=2)
    assert (f.calls, f.differentiated) == (4 + 2, 2)
    assert found.iterations.tolist() == total.tolist()
    assert_same(f, found.z, by_hand(f, start(), (total - differentiated)[:, None], differentiated[:, None]))


def test_a_row_is_independent_of_the_loops_of_its_batch_mates(f):
    z0 = start(requires_grad=True)
    found = solve(f, z0, ib.LastLoops(loops=2), loops=LoopCounts(torch.tensor([2, 6, 3])))
    (together,) = torch.autograd.grad(found.z[0].sum(), z0)
    alone = Causal(f.e[:1])
    alone.w, alone.v = f.w, f.v
    single = start()[:1].requires_grad_()
    z = solve(alone, single, ib.LastLoops(loops=2), loops=LoopCounts(2)).z
    torch.testing.assert_close(found.z[:1], z)
    torch.testing.assert_close(together[:1], torch.autograd.grad(z.sum(), single)[0])
    assert together[0].abs().sum() > 0
    assert not together[1:].any()


def test_tokens_take_their_own_numbers_and_are_read_at_their_frozen_value(f):
    total = torch.randint(1, 6, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))
    differentiated = total.clamp(max=2)
    found = solve(f, start(), ib.LastLoops(loops=2), loops=LoopCounts(total))
    assert_same(f, found.z, by_hand(f, start(), total - differentiated, differentiated))
    assert torch.equal(found.iterations, total.amax(1))
    prefix = ib.Stopping(scope="prefix")
    found = solve(f, start(), ib.LastLoops(loops=2), loops=LoopCounts(total), stopping=prefix)
    assert torch.equal(found.token_iterations, total)


def test_stated_numbers_of_differentiated_loops_override_the_gradients(f):
    total, differentiated = torch.tensor([4, 5, 3]), torch.tensor([0, 3, 1])
    counts = LoopCounts(total, differentiated)
    found = solve(f, start(), ib.LastLoops(loops=2), loops=counts)
    assert_same(f, found.z, by_hand(f, start(), (total - differentiated)[:, None], differentiated[:, None]))


def test_evaluation_takes_the_same_loops(f):
    counts = LoopCounts(torch.tensor([2, 6, 3]))
    trained = solve(f, start(), ib.LastLoops(loops=2), loops=counts)
    with torch.no_grad():
        evaluated = solve(f, start(), ib.LastLoops(loops=2), loops=counts)
    torch.testing.assert_close(evaluated.z, trained.z.detach())
    torch.testing.assert_close(evaluated.residual, trained.residual)
    assert torch.equal(evaluated.iterations, trained.iterations)


def test_the_residual_is_that_of_the_last_loop_of_each_row(f):
    total = torch.tensor([1, 6, 3])
    found = solve(f, start(), ib.LastLoops(loops=2), loops=LoopCounts(total))
    for row, loops in enumerate(total.tolist()):
        z = start()
        with torch.no_grad():
            for _ in range(loops - 1):
                z = f(z)
            step = (f(z) - z)[row].norm() / f(z)[row].norm()
        torch.testing.assert_close(found.residual[row], step)


@pytest.mark.parametrize("total", [6, torch.tensor([1, 6, 3])], ids=["all", "per-row"])
def test_the_trajectory_has_the_chosen_points_with_their_gradients(f, total):
    chosen = (1, 4, 5, 6, 7)
    found = solve(f, start(), ib.LastLoops(loops=2), loops=LoopCounts(total), trajectory=chosen)
    assert sorted(found.trajectory) == [1, 4, 5, 6]
    for t, value in found.trajectory.items():
        for row, loops in enumerate([total] * ROWS if isinstance(total, int) else total.tolist()):
            stop = min(t, loops)
            without = min(stop, max(loops - 2, 0))
            expected = by_hand(f, start(), torch.tensor([[without]]), torch.tensor([[stop - without]]))
            torch.testing.assert_close(value[row], expected[row])
            if stop > without:
                pair = torch.autograd.grad(value[row].sum(), f.w, retain_graph=True)
                torch.testing.assert_close(pair, torch.autograd.grad(expected[row].sum(), f.w))
    assert not found.trajectory[1].requires_grad or not isinstance(total, int)


class Stepping:
    """A map with its own damped steps, which are counted."""

    def __init__(self, f):
        self.f, self.counts = f, []

    def __call__(self, z):
        return self.f(z)

    def damped_steps(self, z, *, count, damping):
        assert damping == 1
        self.counts.append(count)
        for _ in range(count):
            z = self.f(z)
        return z


@pytest.mark.parametrize(("last", "counts"), [(None, [4]), (3, [2]), (1, [])])
def test_a_stepping_map_takes_all_differentiated_loops_but_one_at_once(f, last, counts):
    stepping = Stepping(f)
    found = solve(stepping, start(), ib.LastLoops(loops=last))
    assert stepping.counts == counts
    plain = solve(f, start(), ib.LastLoops(loops=last))
    torch.testing.assert_close(found.residual, plain.residual)
    assert_same(f, found.z, plain.z)


def test_equal_numbers_of_rows_are_one_number_for_a_stepping_map(f):
    stepping = Stepping(f)
    found = solve(stepping, start(), ib.LastLoops(loops=3), loops=LoopCounts(torch.full((ROWS,), 5)))
    assert stepping.counts == [2]
    assert found.iterations.tolist() == [5] * ROWS


@pytest.mark.parametrize("stepping", [False, True])
def test_padding_keeps_its_start(f, stepping):
    valid = torch.ones(ROWS, LENGTH, dtype=torch.bool)
    valid[1, :2] = False
    found = solve(Stepping(f) if stepping else f, start(), ib.LastLoops(loops=2), valid=valid)
    assert torch.equal(found.z[1, :2], start()[1, :2])
    assert not torch.equal(found.z[0], start()[0])


def test_a_row_that_diverges_keeps_its_start_and_the_others_their_gradient(f):
    class Breaking:
        def __init__(self, rows):
            self.rows = rows

        def __call__(self, z):
            scale = torch.where(self.rows == 1, torch.inf, 1.0).view(-1, 1, 1)
            e = f.e[self.rows]
            return torch.tanh(z @ f.w + e) * scale - torch.where(scale > 1, torch.inf, 0.0)

        def select_rows(self, rows):
            return Breaking(self.rows[rows])

    found = solve(Breaking(torch.arange(ROWS)), start(), ib.LastLoops(loops=2), trajectory=(5,))
    assert found.diverged.tolist() == [False, True, False]
    assert torch.equal(found.z[1], start()[1])
    assert torch.equal(found.trajectory[5], found.z)
    weight, e = torch.autograd.grad(found.z.sum(), (f.w, f.e))
    assert weight.isfinite().all()
    assert e[[0, 2]].abs().sum() > 0
    assert not e[1].any()
    with torch.no_grad():
        evaluated = solve(Breaking(torch.arange(ROWS)), start(), ib.LastLoops(loops=2), loops=LoopCounts(5))
    torch.testing.assert_close(evaluated.z, found.z.detach())


def test_processes_agree_on_the_number_of_loops_of_each_part(f):
    asked = []

    def agree(done):
        asked.append(done)
        return done and (len(asked) in (6, 10) or len(asked) > 10)

    total = torch.tensor([2, 2, 2])
    found = solve(f, start(), ib.LastLoops(loops=1), loops=LoopCounts(total), agree=agree)
    assert (f.calls, f.differentiated) == (5 + 3, 3)
    assert_same(f, found.z, by_hand(f, start(), torch.tensor([[1]]), torch.tensor([[1]])))


def test_a_process_takes_part_in_loops_that_only_others_have(f):
    asked = []

    def agree(done):
        asked.append(done)
        return done and len(asked) > 2

    z0 = start(requires_grad=True)
    found = solve(f, z0, ib.LastLoops(), loops=LoopCounts(torch.tensor([2, 2, 2])), agree=agree)
    assert asked == [True] * 3 + [False] * 2 + [True] * 2
    assert (f.calls, f.differentiated) == (4, 2)
    of_start = torch.autograd.grad(found.z.sum(), z0, retain_graph=True)
    expected = f(f(z0))
    torch.testing.assert_close(of_start, torch.autograd.grad(expected.sum(), z0, retain_graph=True))
    assert_same(f, found.z, expected)


def test_processes_that_do_not_communicate_take_one_number_for_all_rows(f):
    found = solve(f, start(), ib.LastLoops(loops=2), loops=LoopCounts(3), agree=fixed_budget)
    assert f.calls == 3
    assert found.z.requires_grad
    with pytest.raises(ValueError, match="give one number for all rows, or let processes agree"):
        solve(f, start(), ib.LastLoops(), loops=LoopCounts(torch.tensor([2, 1, 3])), agree=fixed_budget)


def test_loops_are_repeated_without_diverged_rows_on_all_processes_or_on_none(f):
    """Another process has a row that diverged: this one repeats its loops, with the same result."""
    found = solve(f, start(), ib.LastLoops(loops=2), agree=lambda done: False)
    assert f.calls == 10
    assert_same(f, found.z, solve(f, start(), ib.LastLoops(loops=2)).z)


def test_windows_take_the_counts_of_their_tokens():
    class Doubling:
        """A causal map of independent tokens, which can be cut."""

        def __call__(self, z):
            return 2 * z

        def first(self, tokens):
            return self

        def after(self, z):
            return self

    total = torch.tensor([[1, 2, 3, 4]])
    search = ib.Search(
        solver=ib.Picard(), stopping=ib.Stopping(), loops=LoopCounts(total), trajectory=(1, 2, 3)
    )
    found = WindowedSearch(search, 2)(Doubling(), torch.ones(1, 4, 1))
    assert found.z.flatten().tolist() == [2, 4, 8, 16]
    assert sorted(found.trajectory) == [1, 2]
    assert found.trajectory[2].flatten().tolist() == [2, 4, 4, 4]


@pytest.mark.parametrize("loops", [3, None])
@pytest.mark.parametrize("contract", [name for name in GRADIENT_CONTRACTS if name != "ddp"])
def test_the_gradient_satisfies_the_contract(loops, contract):
    def neumann(jacobian):
        eye = torch.eye(len(jacobian), dtype=jacobian.dtype)
        return eye + jacobian + jacobian @ jacobian

    oracle = "implicit" if loops is None else neumann
    GRADIENT_CONTRACTS[contract](ib.LastLoopsSpec(loops=loops), oracle=oracle)


@pytest.mark.parametrize("loops", [0, -1, 1.5])
def test_fewer_than_one_differentiated_loop_is_refused(loops):
    with pytest.raises(ValueError, match="loops is"):
        ib.LastLoops(loops=loops)


@pytest.mark.parametrize(("loops", "passes", "calls"), [(None, 24, 8), (3, 14, 3), (9, 24, 8)])
def test_the_spec_counts_the_differentiated_loops(loops, passes, calls):
    spec = ib.LastLoopsSpec(loops=loops)
    assert spec.forward_equivalents(8) == passes
    assert spec.differentiated_calls_of(8) == calls
    assert spec.differentiated_calls == (loops or 1)


@pytest.mark.parametrize("spec", [ib.LastLoopsSpec(), ib.UnrolledSpec(), ib.PhantomSpec()])
def test_spec_and_estimator_agree_whether_there_is_a_search(spec):
    assert ib.build(spec).searches == spec.searches
    if not spec.differentiates_solver:
        assert ib.build(ib.JacobianPenaltySpec(gradient=spec)).searches == spec.searches

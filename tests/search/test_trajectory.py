"""The trajectory of a search: the points after chosen calls of the map."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search.loop import Loop
from implicit_blocks.search.policies import MovingAverage, PrefixCommit
from implicit_blocks.search.state import RowCompaction
from implicit_blocks.testing.exits import ROWS, TOKENS, CausalMap


def run(f, trajectory, *, solver=None, scope="prefix", tolerance=1e-4, max_iterations=40, z0=None, **options):
    return Loop(
        f=f,
        z0=torch.zeros_like(f.offset) if z0 is None else z0,
        solver=solver or ib.Picard(),
        stopping=ib.Stopping(tolerance=tolerance, max_iterations=max_iterations, scope=scope),
        trajectory=trajectory,
        **options,
    ).run()


@pytest.fixture
def f():
    return CausalMap.random()


def iterates(f, calls, damping=1.0):
    z, found = torch.zeros_like(f.offset), []
    for _ in range(calls):
        z = torch.lerp(z, f(z), damping) if damping < 1 else f(z)
        found.append(z)
    return found


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("damping", [1.0, 0.7])
def test_the_trajectory_has_the_point_after_each_chosen_call_and_no_other(damping, scope, f):
    solution = run(
        f, (5, 1, 2, 5), solver=ib.Picard(damping=damping), scope=scope, tolerance=0.0, max_iterations=5
    )
    assert list(solution.trajectory) == [1, 2, 5]
    expected = iterates(f, 5, damping)
    for call, z in solution.trajectory.items():
        assert torch.equal(z, expected[call - 1])


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("solver", [ib.Picard(), ib.Picard(damping=0.8), ib.Anderson(memory=2)], ids=repr)
@pytest.mark.parametrize(
    "policies",
    [
        {"compaction": RowCompaction(bucket_sizes=False)},
        {"compaction": RowCompaction(bucket_sizes=True)},
        {"commit": PrefixCommit(1)},
        {"compaction": RowCompaction(bucket_sizes=False), "commit": PrefixCommit(2)},
    ],
    ids=["rows", "buckets", "prefix", "both"],
)
def test_rows_and_tokens_that_leave_are_in_the_trajectory(policies, solver, scope, f):
    if scope == "sequence":
        policies = {name: policy for name, policy in policies.items() if name != "commit"}
    calls = range(1, 41)
    whole = run(f, calls, solver=solver, scope=scope)
    found = run(f, calls, solver=solver, scope=scope, **policies)
    assert whole.iterations.unique().numel() > 1
    assert list(found.trajectory) == list(calls)
    for call in calls:
        assert found.trajectory[call].shape == (ROWS, TOKENS, f.offset.shape[-1])
        torch.testing.assert_close(found.trajectory[call], whole.trajectory[call], atol=1e-12, rtol=0)


def test_a_token_that_has_left_keeps_its_value_also_after_the_end(f):
    solution = run(f, range(1, 41), compaction=RowCompaction(bucket_sizes=False))
    assert solution.converged.all()
    assert solution.iterations.max() < 40
    for call, z in solution.trajectory.items():
        left = solution.token_iterations <= call
        assert torch.equal(z[left], solution.z[left])
    assert torch.equal(solution.trajectory[40], solution.z)


def test_a_trajectory_does_not_change_the_search(f):
    plain, traced = (run(f, calls, solver=ib.Anderson(), max_iterations=6) for calls in ((), (3, 6)))
    assert plain.trajectory is None
    assert torch.equal(plain.z, traced.z)
    assert torch.equal(plain.iterations, traced.iterations)


def test_calls_beyond_the_maximum_are_left_out(f):
    assert list(run(f, (2, 9), max_iterations=8).trajectory) == [2]
    assert run(f, (9,), max_iterations=8).trajectory == {}


def test_a_later_search_does_not_change_an_earlier_trajectory(f):
    first = run(f, (1, 2))
    kept = {call: z.clone() for call, z in first.trajectory.items()}
    run(f.select_rows(torch.tensor([3, 2, 1, 0])), (1, 2))
    assert all(torch.equal(first.trajectory[call], z) for call, z in kept.items())


@pytest.mark.parametrize("shape", [(3, 4), (3, 4, 2, 5)])
def test_points_have_the_shape_of_the_start(shape):
    def g(z):
        return 0.5 * z + 1

    g.offset = torch.zeros(shape)
    solution = run(g, (2,), scope="sequence")
    assert torch.equal(solution.trajectory[2], torch.full(shape, 1.5))


def test_padding_keeps_its_start_in_the_trajectory(f):
    valid = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    valid[:, :2] = False
    solution = run(f, (1, 3), valid=valid, z0=torch.full_like(f.offset, 7.0))
    assert all((z[~valid] == 7.0).all() for z in solution.trajectory.values())


def test_with_a_moving_average_the_trajectory_has_the_solver_s_points(f):
    solution = run(f, (1, 2), averaging=MovingAverage(0.5), tolerance=0.0, max_iterations=4)
    expected = iterates(f, 2)
    assert torch.equal(solution.trajectory[1], expected[0])
    assert torch.equal(solution.trajectory[2], expected[1])


def test_an_exit_criterion_and_a_trajectory_combine(f):
    solution = run(f, (1, 2, 3, 9), exit=ib.FixedExit(loops=3))
    expected = iterates(f, 3)
    for call, z in zip((1, 2, 3, 9), (*expected, expected[-1]), strict=True):
        assert torch.equal(solution.trajectory[call], z)


def test_a_call_below_1_is_refused(f):
    for calls, value in (((1, 0), "0"), ((2.5,), "2.5")):
        with pytest.raises(ValueError, match=f"trajectory is {value}.*at least 1"):
            run(f, calls)

"""``LoopCounts``, fixed numbers of loops without gradients, and trajectories of windows."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search.loops import LoopCounts, run_loops


def double(z):
    return 2 * z


def search(loops, **options):
    scope = options.pop("scope", "sequence")
    return ib.Search(solver=ib.Anderson(), stopping=ib.Stopping(scope=scope), loops=loops, **options)


@pytest.mark.parametrize(
    ("counts", "last", "parts"),
    [
        (LoopCounts(5), None, (0, 5)),
        (LoopCounts(5), 2, (3, 2)),
        (LoopCounts(5), 9, (0, 5)),
        (LoopCounts(5, 1), 3, (4, 1)),
        (LoopCounts(5, 0), None, (5, 0)),
        (LoopCounts(torch.tensor([1, 4])), 2, ([0, 2], [1, 2])),
        (LoopCounts(torch.tensor([1, 4]), torch.tensor([1, 0])), 2, ([0, 4], [1, 0])),
        (LoopCounts(torch.tensor([[1, 4]])), None, ([[0, 0]], [[1, 4]])),
        (LoopCounts(torch.tensor([2, 4]), 1), None, ([1, 3], 1)),
        (LoopCounts(4, torch.tensor([2, 4])), None, ([2, 0], [2, 4])),
    ],
)
def test_loops_are_split_into_those_without_and_with_gradients(counts, last, parts):
    found = [part.tolist() if isinstance(part, torch.Tensor) else part for part in counts.split(last)]
    assert tuple(found) == parts


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "total number of loops is 0; choose at least 1"),
        ((torch.tensor([3, 0]),), "total number of loops is 0"),
        ((2.0,), r"total is 2.0; give an integer"),
        ((True,), r"total is True; give an integer"),
        ((torch.tensor([1.0]),), r"shape \(1,\) of torch.float32; give an int64 tensor"),
        ((torch.tensor(3),), r"total is a tensor of shape \(\)"),
        ((torch.ones(1, 1, 1, dtype=torch.int64),), r"total is a tensor of shape \(1, 1, 1\)"),
        ((torch.ones(0, dtype=torch.int64),), r"total is a tensor of shape \(0,\)"),
        ((3, -1), "differentiated loops is -1; choose from 0"),
        ((3, 5), "exceeds the total number of loops by 2; choose from 0"),
        ((3, "2"), "differentiated is '2'"),
        ((torch.tensor([3, 3]), torch.tensor([[3]])), r"total has shape \(2,\) and differentiated \(1, 1\)"),
    ],
)
def test_wrong_counts_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        LoopCounts(*arguments)


def test_fewer_than_one_last_loop_is_refused():
    with pytest.raises(ValueError, match="last is 0"):
        LoopCounts(3).split(0)


@pytest.mark.parametrize("shape", [(2,), (3, 5), (3, 4, 1)])
def test_counts_of_another_batch_are_refused(shape):
    z = torch.ones(3, 4, 2) if len(shape) < 3 else torch.ones(3, 4)
    counts = torch.ones(shape[:2], dtype=torch.int64)
    with pytest.raises(ValueError, match=r"total of the loops has shape .* one number per row"):
        run_loops(double, z, LoopCounts(counts))


def test_rows_and_tokens_can_be_selected():
    counts = LoopCounts(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([[1, 1, 1], [2, 2, 2]]))
    assert counts.maximum == 6
    assert counts.select_rows(torch.tensor([1, 1])).total.tolist() == [[4, 5, 6]] * 2
    part = counts.cut(1, 3)
    assert (part.total.tolist(), part.differentiated.tolist()) == ([[2, 3], [5, 6]], [[1, 1], [2, 2]])
    per_row = LoopCounts(torch.tensor([1, 2]))
    assert per_row.cut(1, 3).total.tolist() == [1, 2]
    assert LoopCounts(3, 1).select_rows(torch.tensor([0])).split() == (2, 1)


def test_plain_numbers_of_loops_read_no_value(monkeypatch):
    def refuse(self, *_):
        raise AssertionError("a value was read from a tensor")

    for name in ("item", "__bool__", "__int__", "tolist"):
        monkeypatch.setattr(torch.Tensor, name, refuse)
    looped = run_loops(double, torch.ones(2, 3), LoopCounts(4, 2), trajectory=(1,))
    monkeypatch.undo()
    assert looped.z.unique().tolist() == [16]


def test_a_search_takes_a_fixed_number_of_loops_without_its_solver():
    calls = []

    def f(z):
        calls.append(z)
        return 2 * z

    found = search(LoopCounts(3), trace=True, trajectory=(2, 7))(f, torch.ones(2, 4))
    assert len(calls) == 3
    assert found.z.unique().tolist() == [8]
    assert found.iterations.tolist() == [3, 3]
    assert not found.converged.any()
    torch.testing.assert_close(found.trace, torch.full((3, 2), 0.5))
    assert {t: value.unique().tolist() for t, value in found.trajectory.items()} == {2: [4]}
    assert search(LoopCounts(3))(f, torch.ones(2, 4)).trajectory is None


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_the_trace_has_nan_where_an_element_takes_no_part(scope):
    total = torch.tensor([[1, 3], [2, 2]])
    found = search(LoopCounts(total), scope=scope, trace=True)(double, torch.ones(2, 2, 4))
    taken = found.trace.isfinite().sum(0)
    assert torch.equal(taken, total if scope == "prefix" else total.amax(1))
    assert torch.equal(found.z[..., 0], 2.0**total)
    rows = search(LoopCounts(torch.tensor([1, 3])), scope=scope, trace=True)(double, torch.ones(2, 2, 4))
    assert torch.equal(rows.trace.isfinite().sum(0).view(2, -1)[:, 0], torch.tensor([1, 3]))


def test_loops_refuse_a_moving_average_and_iterates_below_1():
    with pytest.raises(ValueError, match="a fixed number of loops has no average"):
        search(LoopCounts(3), moving_average=0.5)
    with pytest.raises(ValueError, match="an iterate of the trajectory is 0"):
        search(LoopCounts(3), trajectory=(0,))


def test_the_trajectory_of_windows_has_the_iterates_of_every_window():
    def window(*iterates):
        parts = {t: torch.full((2, 3, 1), float(t)) for t in iterates}
        flags = {name: torch.ones(2, dtype=torch.bool) for name in ("converged", "diverged")}
        return ib.Solution(
            torch.zeros(2, 3, 1),
            torch.ones(2, dtype=torch.int64),
            torch.zeros(2),
            **flags,
            trajectory=parts or None,
        )

    whole = ib.Solution.concatenate([window(1, 2, 4), window(1, 4)])
    assert sorted(whole.trajectory) == [1, 4]
    assert whole.trajectory[4].shape == (2, 6, 1)
    assert ib.Solution.concatenate([window(1), window()]).trajectory is None
    assert whole.with_value(torch.ones(2, 6, 1)).trajectory is whole.trajectory

"""Exit criteria in decoding slots: the same exits and values as in a search of all tokens together."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding.slots.search import SlotSearch
from implicit_blocks.testing.exits import FEATURES, ROWS, CausalMap, small_readout

READOUT = small_readout()
CRITERIA = {
    "residual": ib.ResidualExit(),
    "second_difference": ib.SecondDifferenceExit(tolerance=1e-3),
    "kl": ib.KLExit(tolerance=1e-4).bind(READOUT),
    "argmax_stability": ib.ArgmaxStabilityExit(calls=3).bind(READOUT),
    "gate": ib.GateExit(threshold=0.9).bind(READOUT),
    "fixed": ib.FixedExit(loops=6),
}
STOPPING = ib.Stopping(tolerance=1e-5, max_iterations=60, scope="prefix")


def slots(criterion, *, stopping=STOPPING, moving_average=None):
    return SlotSearch(
        ib.Picard(damping=0.9),
        stopping,
        slots=ROWS,
        width=FEATURES,
        device=torch.device("cpu"),
        dtype=torch.float64,
        moving_average=moving_average,
        exit=criterion,
    )


@pytest.mark.parametrize("average", [None, 0.8])
@pytest.mark.parametrize("kind", CRITERIA)
def test_slots_that_begin_at_different_times_leave_as_in_a_search(kind, average):
    """Slots are used a second time, with another token each, as soon as they are done."""
    criterion = CRITERIA[kind]
    maps = [CausalMap.random(seed=seed).first(1) for seed in (0, 5)]
    plain = ib.Search(
        solver=ib.Picard(damping=0.9), stopping=STOPPING, exit=criterion, moving_average=average
    )
    expected = [plain(f, torch.zeros_like(f.offset)) for f in maps]
    found = slots(criterion, moving_average=average)
    rows = torch.arange(ROWS)
    token = [-1] * ROWS
    checked = set()
    for step in range(200):
        for row in range(min(ROWS, step + 1)):
            if token[row] >= 0 and found.done[row]:
                solution = expected[token[row]]
                torch.testing.assert_close(found.z[row], solution.z[row, 0], atol=1e-12, rtol=0)
                assert found.iterations[row] == solution.iterations[row]
                assert found.converged[row] == solution.converged[row]
                torch.testing.assert_close(found.residual[row], solution.residual[row])
                checked.add((row, token[row]))
            if token[row] < 0 or (found.done[row] and token[row] == 0):
                token[row] += 1
                found.begin(rows[row : row + 1], torch.zeros(1, FEATURES, dtype=torch.float64))
        if len(checked) == 2 * ROWS:
            break
        active = ~found.done & (torch.tensor(token) >= 0)
        values = torch.stack([f(found.z[:, None])[:, 0] for f in maps])
        value = values[torch.tensor(token).clamp(min=0), rows]
        found.take(rows, value, active, lambda z: z)
    assert len(checked) == 2 * ROWS


def test_slots_without_a_criterion_report_the_residual_of_the_returned_value():
    found = slots(None)
    assert found.exit is None
    assert found.measure is found.residual


def test_slots_refuse_a_criterion_that_does_not_fit():
    with pytest.raises(ValueError, match="reads predictions"):
        slots(ib.KLExit())
    with pytest.raises(ValueError, match="takes 61 calls"):
        slots(ib.FixedExit(loops=61))
    with pytest.raises(ValueError, match="'sequence'"):
        slots(ib.SecondDifferenceExit(), stopping=ib.Stopping())

"""Exit criteria on a CUDA device: the exits and values of the CPU, also in a captured step of slots."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding.slots.search import SlotSearch
from implicit_blocks.testing.exits import FEATURES, ROWS, CausalMap, small_readout

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

CRITERIA = {
    "residual": ib.ResidualExit(),
    "second_difference": ib.SecondDifferenceExit(tolerance=1e-3),
    "kl": ib.KLExit(tolerance=1e-4),
    "argmax_stability": ib.ArgmaxStabilityExit(calls=3),
    "gate": ib.GateExit(threshold=0.9),
    "fixed": ib.FixedExit(loops=6),
}
STOPPING = ib.Stopping(tolerance=1e-5, max_iterations=60, scope="prefix")


def on(device, f):
    return CausalMap(*(part.to(device) for part in (f.weight, f.rate, f.offset, f.before)))


def bound(kind, device):
    """Return the criterion with a readout whose weights are on the device."""
    size = torch.eye(FEATURES, dtype=torch.float64)
    host = small_readout()
    head, gate = host.predict(size).to(device), host.gate(size).to(device)
    readout = ib.Readout(
        predict=lambda points: (points[..., None] * head).sum(-2),
        gate=lambda points: (points * gate).sum(-1),
    )
    return CRITERIA[kind].bind(readout)


@pytest.mark.parametrize("kind", CRITERIA)
def test_exits_and_trajectories_are_those_of_the_cpu(kind):
    f = CausalMap.random()
    found = {}
    for device in ("cpu", "cuda"):
        search = ib.Search(solver=ib.Picard(), stopping=STOPPING, exit=bound(kind, device), commit_prefix=2)
        found[device] = search(on(device, f), torch.zeros_like(f.offset, device=device))
    assert torch.equal(found["cuda"].token_iterations.cpu(), found["cpu"].token_iterations)
    torch.testing.assert_close(found["cuda"].z.cpu(), found["cpu"].z, atol=1e-10, rtol=0)
    torch.testing.assert_close(found["cuda"].residual.cpu(), found["cpu"].residual)


@pytest.mark.parametrize("kind", CRITERIA)
def test_a_captured_step_of_slots_equals_an_eager_one(kind):
    f = on("cuda", CausalMap.random().first(1))
    rows = torch.arange(ROWS, device="cuda")

    def slots():
        made = SlotSearch(
            ib.Picard(),
            STOPPING,
            slots=ROWS,
            width=FEATURES,
            device=torch.device("cuda"),
            dtype=torch.float64,
            exit=bound(kind, "cuda"),
        )
        made.begin(rows, torch.zeros(ROWS, FEATURES, device="cuda", dtype=torch.float64))
        return made

    def step(search):
        search.take(rows, f(search.z[:, None])[:, 0], ~search.done, lambda z: z)

    with torch.no_grad():
        eager, captured = slots(), slots()
        step(slots())  # warm up outside the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(captured)
        for _ in range(60):
            step(eager)
            graph.replay()
    assert eager.done.all()
    assert torch.equal(captured.iterations, eager.iterations)
    assert torch.equal(captured.z, eager.z)
    assert torch.equal(captured.residual, eager.residual)

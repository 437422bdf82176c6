"""The built-in exit criteria satisfy the contracts of the conformance kit, and broken ones do not."""

from __future__ import annotations

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.exits.exit import UNDECIDED
from implicit_blocks.testing import EXIT_CONTRACTS, ContractError

SPECS = {
    "residual": ib.ResidualExitSpec(),
    "second_difference": ib.SecondDifferenceExitSpec(tolerance=1e-4),
    "kl": ib.KLExitSpec(tolerance=1e-7),
    "argmax_stability": ib.ArgmaxStabilityExitSpec(calls=4),
    "gate": ib.GateExitSpec(threshold=0.9),
    "fixed": ib.FixedExitSpec(loops=7),
}


def test_every_registered_kind_is_tested():
    assert set(SPECS) == set(registry.kinds("exit"))


@pytest.mark.parametrize("contract", EXIT_CONTRACTS)
@pytest.mark.parametrize("kind", SPECS)
def test_a_built_in_criterion_keeps_the_contracts(kind, contract):
    EXIT_CONTRACTS[contract](SPECS[kind])
    assert ib.build(SPECS[kind]).readout is None  # binding leaves the criterion as it is


class Faulty(ib.Exit):
    """The residual as a measure, with one fault."""

    threshold = 1e-5

    def __init__(self, fault):
        self.fault = fault

    def init(self, z_EF):
        return 0 if self.fault == "number" else torch.zeros(len(z_EF), dtype=torch.int64)

    def measure(self, z_EF, fz_EF, residual_E1, state):
        if self.fault == "in place":
            state += 1
        if self.fault == "mean":
            residual_E1 = residual_E1.mean().expand_as(residual_E1)
        if self.fault == "shape":
            residual_E1 = residual_E1[:, 0]
        if self.fault == "later":
            residual_E1 = residual_E1.flip(0).cummax(0).values.flip(0)
        if self.fault == "size":
            residual_E1 = residual_E1 * len(z_EF)
        if self.fault == "never":
            residual_E1 = torch.full_like(residual_E1, UNDECIDED)
        return residual_E1, state


@pytest.mark.parametrize(
    ("fault", "contract"),
    [
        ("number", "state_layout"),
        ("in place", "state_layout"),
        ("shape", "state_layout"),
        ("mean", "elements_apart"),
        ("later", "causality"),
        ("mean", "batch_mates"),
        ("size", "compaction"),
        ("never", "met"),
    ],
)
def test_a_broken_criterion_fails_its_contract(fault, contract):
    with pytest.raises(ContractError, match=r"Faulty.*breaks the contract"):
        EXIT_CONTRACTS[contract](Faulty(fault))


@pytest.mark.parametrize("contract", EXIT_CONTRACTS)
def test_the_same_criterion_without_a_fault_keeps_every_contract(contract):
    EXIT_CONTRACTS[contract](Faulty("none"))


def test_a_search_names_a_broken_state_or_measure():
    stopping = ib.Stopping(scope="prefix")
    for fault, what in (("number", "state layout"), ("shape", "measure")):
        search = ib.Search(solver=ib.Picard(), stopping=stopping, exit=Faulty(fault))
        with pytest.raises(ContractError, match=f"Faulty.*{what}"):
            search(lambda z: 0.5 * z + 1, torch.zeros(2, 3, 4))

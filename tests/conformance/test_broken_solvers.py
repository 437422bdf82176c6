"""For every contract of solvers, a faulty solver is detected and named; the correct one passes."""

from __future__ import annotations

from typing import ClassVar, Literal

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.testing import SOLVER_CONTRACTS, ContractError, check_solver


class FaultySpec(ib.SolverSpec):
    """Damped steps with the last residual as state; each fault is a plausible mistake."""

    kind: Literal["test.faulty"] = "test.faulty"
    differentiable: ClassVar[bool] = True
    fault: str = ""

    def state_bytes(self, features: int, *, itemsize: int) -> int:
        return super().state_bytes(features, itemsize=itemsize) * (2 if self.fault == "claims" else 1)


class Faulty(ib.Solver):
    differentiable = True

    def __init__(self, *, fault: str = "") -> None:
        self.fault = fault
        self.memory = 0.0

    def init(self, z0):
        if self.fault == "moves the start":
            z0.mul_(0.5)
        if self.fault == "counter":
            return (torch.zeros_like(z0), torch.zeros(1))
        if self.fault == "number":
            return (torch.zeros_like(z0), 0)
        return (torch.zeros_like(z0),)

    def update(self, z, fz, state, f):
        residual = fz - z
        if self.fault == "wrong point":
            residual = residual + 0.01
        if self.fault == "batch":
            residual = residual - residual.mean(0) * 0.1
        if self.fault == "own memory":
            residual, self.memory = residual * (1 + 0.1 * self.memory), float(residual.norm())
        if self.fault == "half":
            weights = torch.eye(z.shape[1], dtype=torch.float32)
            residual = (residual.float() @ weights).double()
        if self.fault == "raises" and not bool(residual.isfinite().all()):
            raise FloatingPointError("NaN")
        if self.fault == "raises later" and bool((residual.abs() > 1e20).any()):
            raise OverflowError("too large")
        if self.fault == "writes z":
            z.add_(0.8 * residual)
            return z.clone(), (residual,)
        if self.fault == "writes state":
            state[0].copy_(residual)
            return z + 0.8 * residual, state
        after = (residual,)
        if self.fault == "no state":
            return z + 0.8 * residual
        if self.fault == "short":
            return fz[:, 1:], after
        if self.fault == "detaches":
            return z + 0.8 * residual.detach(), after
        if self.fault == "counter":
            after = (residual, state[1] + 1)
        if self.fault == "grows":
            after = (torch.cat((state[0], residual), dim=1),)
        return z + 0.8 * residual, after


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "none")
    with registry.isolated():
        registry.add("solver", FaultySpec, Faulty.from_spec, owner="acme-faulty", version="0.7")
        yield


BREAKS = {
    "wrong point": ("contractions", "contractions", "of 4 rows converged"),
    "moves the start": ("one_iteration", "one iteration", "first point"),
    "batch": ("elements_apart", "elements apart", "not over elements"),
    "counter": ("state_layout", "state layout", "counters included"),
    "number": ("state_layout", "state layout", "its state contains a int"),
    "short": ("state_layout", "next point", "a tensor (4, 11) of float64 for a point that is"),
    "writes state": ("state_layout", "state layout", "must not modify its arguments"),
    "writes z": ("state_layout", "state layout", "must not modify its arguments"),
    "own memory": ("selected_elements", "selected elements", "keep all memory in the state"),
    "half": ("low_precision", "next point", "float64 for a point that is a tensor (4, 12) of bfloat16"),
    "no state": ("contractions", "next point", "return a tuple of the next point and the state"),
    "detaches": ("differentiable", "differentiable", "detach nothing"),
    "raises": ("best_survives", "best survives", "it raised FloatingPointError"),
    "raises later": ("divergence", "divergence", "it raised OverflowError"),
    "grows": ("memory_claim", "memory claim", "the state grows"),
    "claims": ("memory_claim", "memory claim", "an element of the state takes"),
}


def test_the_correct_solver_passes():
    check_solver(FaultySpec())
    check_solver(Faulty())


@pytest.mark.parametrize("fault", BREAKS)
def test_a_fault_is_detected_and_named(fault):
    contract, name, remedy = BREAKS[fault]
    with pytest.raises(ContractError) as caught:
        SOLVER_CONTRACTS[contract](FaultySpec(fault=fault))
    message = str(caught.value)
    assert message.startswith("Faulty")
    assert f"breaks the contract '{name}'" in message
    assert remedy in message


def test_memory_outside_of_the_state_is_named_by_the_first_contract_that_detects_it():
    with pytest.raises(ContractError, match="keep all memory in the state"):
        check_solver(FaultySpec(fault="own memory"))


class TwoCalls(ib.Solver):
    def init(self, z0):
        return ()

    def update(self, z, fz, state, f):
        return f(fz), state


def test_a_solver_may_call_the_map_itself():
    check_solver(TwoCalls())


# The search guarantees these contracts unless a solver writes to its arguments.


class Corrupting(Faulty):
    """Keeps references to its arguments and writes to them later."""

    def __init__(self, *, after: int) -> None:
        super().__init__()
        self.after, self.given = after, []

    def update(self, z, fz, state, f):
        self.given.append((z, fz))
        if len(self.given) > self.after:
            for tensors in self.given:
                for tensor in tensors:
                    tensor.fill_(torch.nan)
        return super().update(z, fz, state, f)


def test_writing_to_arguments_is_detected():
    with pytest.raises(ContractError, match="'frozen elements'"):
        SOLVER_CONTRACTS["frozen_elements"](Corrupting(after=2))


def test_every_contract_has_a_fault():
    tested = {contract for contract, *_ in BREAKS.values()} | {"frozen_elements"}
    assert tested == set(SOLVER_CONTRACTS)


def test_a_spec_and_its_solver_must_agree_on_differentiable(monkeypatch):
    monkeypatch.setattr(Faulty, "differentiable", False)
    with pytest.raises(ContractError, match="differentiable is True in the spec, False in the solver"):
        SOLVER_CONTRACTS["differentiable"](FaultySpec())


@pytest.mark.parametrize("subject", ["picard", TwoCalls, ib.PhantomSpec()])
def test_an_object_of_another_type_is_refused(subject):
    with pytest.raises(
        ContractError, match="breaks the contract 'is a Solver': pass an instance of implicit_blocks"
    ):
        check_solver(subject)


def test_a_spec_of_an_unregistered_kind_is_not_blamed_for_a_contract() -> None:
    class NewSpec(ib.SolverSpec):
        kind: Literal["test.new"] = "test.new"

    with pytest.raises(ContractError, match=r"unknown solver 'test\.new'.* install its package") as caught:
        check_solver(NewSpec())
    assert "breaks the contract" not in str(caught.value)

"""For every contract of gradient estimators, a faulty estimator is detected and named."""

from __future__ import annotations

import importlib

import pytest

import implicit_blocks as ib
from implicit_blocks.testing import GRADIENT_CONTRACTS, ContractError, check_gradient

# Ranks import it by name, so it is written to an importable module.
SOURCE = '''
"""Exact gradients with plausible mistakes."""

import os

import torch

import implicit_blocks as ib


class Faulty(ib.GradientEstimator):
    def __init__(self, fault=""):
        self.fault = fault
        self.inner = ib.ImplicitFunction(stopping=ib.Stopping(tolerance=1e-13, max_iterations=500))
        self.kept = []

    def __call__(self, f, z0, search):
        if self.fault == "searches twice":
            search(f, z0)
        if self.fault == "biased":
            return ib.Phantom(steps=2)(f, z0, search)
        if self.fault == "no bfloat16":
            eye = torch.eye(3)
            torch.linalg.det(torch.nn.functional.linear(eye, eye))  # bfloat16 under autocast
        solution = self.inner(f, z0, search)
        z = solution.z
        if self.fault == "bare tensor":
            return z
        if self.fault == "detached":
            return solution.with_value(z.detach())
        if self.fault == "another point":
            return solution.with_value(z + 0.1)
        if self.fault == "batch mean":
            return solution.with_value(z + 0.1 * (z - z.mean(0)) - 0.1 * (z - z.mean(0)).detach())
        if self.fault == "one slot":
            self.kept.append(1)
            scale = float(len(self.kept))
            z.register_hook(lambda g: g * scale / len(self.kept))
        if self.fault == "looks at the rank" and torch.distributed.is_initialized():
            scale = 1.0 + torch.distributed.get_rank()
            return solution.with_value(z * scale + (1 - scale) * z.detach())
        if self.fault == "dies on a rank" and torch.distributed.is_initialized():
            raise RuntimeError("no ranks here")
        return solution.with_value(z)
'''


@pytest.fixture(scope="module")
def faulty(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faulty")
    (folder / "faulty_gradients.py").write_text(SOURCE, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield importlib.import_module("faulty_gradients").Faulty


BREAKS = {
    "bare tensor": ("value", "returns a Solution", "return the search's solution with your value"),
    "detached": ("value", "value", "must carry the gradient"),
    "another point": ("value", "value", "not the fixed point"),
    "biased": ("formula", "formula", "the oracle is 'implicit', and that of a biased estimator is its own"),
    "searches twice": ("budget", "budget", "10 more calls of f"),
    "batch mean": ("rows_apart", "rows apart", "alone differs"),
    "one slot": ("several_solves", "several solves", "keep nothing of a solve"),
    "no bfloat16": ("autocast", "autocast", "it raised"),
    "looks at the rank": ("ddp", "ddp", "do not depend on the rank"),
    "dies on a rank": ("ddp", "ddp", "rank 0 failed: RuntimeError: no ranks here"),
}


def test_every_contract_has_a_fault():
    assert {contract for contract, *_ in BREAKS.values()} == set(GRADIENT_CONTRACTS)


@pytest.mark.parametrize(
    "fault",
    [pytest.param(f, marks=pytest.mark.slow) if f == "looks at the rank" else f for f in BREAKS],
)
def test_a_fault_is_detected_and_named(faulty, fault):
    contract, name, remedy = BREAKS[fault]
    with pytest.raises(ContractError) as caught:
        GRADIENT_CONTRACTS[contract](faulty(fault))
    message = str(caught.value)
    assert message.startswith("Faulty")
    assert f"breaks the contract '{name}'" in message
    assert remedy in message


@pytest.mark.parametrize("contract", [name for name in GRADIENT_CONTRACTS if name != "ddp"])
def test_the_correct_estimator_passes(faulty, contract):
    GRADIENT_CONTRACTS[contract](faulty())


def test_a_class_that_cannot_be_pickled_is_named():
    class Local(ib.Phantom):
        pass

    with pytest.raises(ContractError, match="'ddp': cannot be pickled"):
        GRADIENT_CONTRACTS["ddp"](Local())


def test_the_gradient_of_the_computation_is_an_oracle():
    GRADIENT_CONTRACTS["formula"](ib.Unrolled(steps=2), oracle="computation")
    with pytest.raises(ContractError, match="'formula'"):
        GRADIENT_CONTRACTS["formula"](ib.Phantom(steps=2), oracle="computation")


def test_an_object_of_another_type_is_refused():
    with pytest.raises(ContractError, match=r"an instance of implicit_blocks\.GradientEstimator"):
        check_gradient("phantom")

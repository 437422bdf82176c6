"""Injections: contracts, values of the equations, widths, and faulty injections."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.testing import INJECTION_CONTRACTS, ContractError, check_injection

INJECTIONS = {
    "projection": ib.ProjectionSpec(),
    "none": ib.NoInjectionSpec(),
    "add": ib.AddInjectionSpec(),
    "concat": ib.ConcatSpec(),
    "concat-bias": ib.ConcatSpec(bias=True),
    "diagonal": ib.DiagonalSpec(),
    "diagonal-slow": ib.DiagonalSpec(decay=0.9),
    "attractor": ib.AttractorSpec(),
    "residual": ib.ResidualSpec(),
    "residual-gated": ib.ResidualSpec(gate_init=0.0),
}
X, Z, H = (torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(n)) for n in range(3))


@pytest.mark.parametrize("contract", INJECTION_CONTRACTS)
@pytest.mark.parametrize("name", INJECTIONS)
def test_an_injection_satisfies_the_contract(name, contract):
    INJECTION_CONTRACTS[contract](INJECTIONS[name])


def test_every_kind_is_tested():
    assert {spec.kind for spec in INJECTIONS.values()} == set(registry.kinds("injection"))


def values(spec: ib.InjectionSpec) -> tuple[torch.Tensor, torch.Tensor, ib.Injection]:
    """Return what enters and what leaves a core that returns ``H``."""
    injection = ib.build(spec, d_model=4, core_width=4, projected=6, norm_eps=1e-5)
    with torch.no_grad():
        e = injection.source(X)
        entered = injection.enter(Z, e)
        return entered, injection.leave(H, Z, entered, e), injection


@pytest.mark.parametrize(
    ("spec", "entered", "left"),
    [
        (ib.ProjectionSpec(), Z, H),
        (ib.NoInjectionSpec(), Z, H),
        (ib.AddInjectionSpec(), Z + X, H),
        (ib.AttractorSpec(), Z + X, H - Z),
        (ib.ResidualSpec(), Z, X + H - Z),
        (ib.ResidualSpec(gate_init=0.25), X + 0.25 * (Z - X), H - 0.25 * (Z - X)),
        (ib.ResidualSpec(gate_init=0.0), X, H),
        (ib.ResidualSpec(damping=0.8), Z, Z + 0.8 * (X + H - Z - Z)),
        (ib.DiagonalSpec(decay=0.5), 0.5 * Z + 0.69314718 * X, H),
    ],
    ids=["projection", "none", "add", "attractor", "residual", "gated", "closed", "damped", "diagonal"],
)
def test_the_initial_values_are_those_of_the_equations(spec, entered, left):
    found = values(spec)
    torch.testing.assert_close(found[0], entered)
    torch.testing.assert_close(found[1], left)


def test_concat_reads_the_state_and_the_prelude_s_output():
    entered, left, injection = values(ib.ConcatSpec(bias=True))
    of_z, of_e = injection.proj.weight.split(4, dim=1)
    torch.testing.assert_close(entered, Z @ of_z.T + X @ of_e.T + injection.proj.bias)
    assert torch.equal(left, H)


def test_the_diagonal_injection_is_stable_for_all_parameters():
    injection = values(ib.DiagonalSpec())[2]
    for size in (-20.0, 0.0, 20.0):
        with torch.no_grad():
            injection.A_log.fill_(size)
            injection.dt_bias.fill_(size)
            factor = injection.enter(torch.ones(1, 1, 4), torch.zeros(1, 1, 4))
        assert bool(((factor >= 0) & (factor <= 1)).all())


class ShiftedSpec(ib.InjectionSpec):
    """The core reads ``z + e + shift``; each fault is a plausible mistake."""

    z_init: ClassVar[str] = "prelude"

    kind: Literal["test.shifted_injection"] = "test.shifted_injection"
    fault: str = ""

    def check(self, d_model: int, core_width: int) -> None:
        if self.fault != "check":
            super().check(d_model, core_width)

    def parameter_shapes(self, d_model: int, core_width: int, projected: int | None) -> dict[str, Any]:
        return {} if self.fault == "count" else {"shift": (core_width,)}


class Shifted(ib.Injection):
    def __init__(self, spec, *, d_model, core_width, projected, norm_eps):
        super().__init__()
        if d_model != core_width:
            raise ValueError(f"widths {d_model} and {core_width}")
        self.fault = spec.fault
        where = "cpu" if spec.fault == "meta" else None
        self.shift = nn.Parameter(torch.zeros(core_width, device=where))
        self.calls = 0

    def reset_parameters(self):
        if self.fault != "reset":
            nn.init.zeros_(self.shift)

    @property
    def direct(self):
        return self.fault == "direct"

    def enter(self, z_BLC, e):
        self.calls += 1
        shift = self.shift.detach() if self.fault == "detaches" else self.shift
        entered = z_BLC + e + shift.to(z_BLC.dtype)
        match self.fault:
            case "tokens":
                return entered + 0.1 * z_BLC.mean(1, keepdim=True)
            case "rows":
                return entered + 0.1 * z_BLC.mean(0)
            case "type":
                return entered.bfloat16()
            case "counts":
                return entered + self.calls
            case "in place":
                return entered.add_(z_BLC.detach().mul_(1.5))
            case "random":
                return entered + torch.randn(entered.shape)
        return entered

    def leave(self, h_BLC, z_BLC, entered_BLC, e):
        return h_BLC[..., :-1] if self.fault == "shape" else h_BLC

    def projected(self, x_BLD):
        return x_BLD if self.fault == "projects" else None


@pytest.fixture
def faulty(monkeypatch):
    """Register the injection of these tests."""

    def build(spec, **sizes):
        return Shifted(spec, **sizes) if isinstance(spec, ShiftedSpec) else ib.build(spec, **sizes)

    monkeypatch.setattr("implicit_blocks.testing.injections.build", build)


def test_a_correct_injection_of_a_plugin_passes(faulty):
    check_injection(ShiftedSpec())
    assert ShiftedSpec().parameter_shapes(4, 4, None) == {"shift": (4,)}


@pytest.mark.parametrize(
    ("fault", "contract"),
    [
        ("check", "widths"),
        ("count", "parameters"),
        ("meta", "parameters"),
        ("reset", "parameters"),
        ("direct", "direct"),
        ("detaches", "gradients"),
        ("tokens", "positions apart"),
        ("rows", "positions apart"),
        ("type", "shapes and dtypes"),
        ("shape", "shapes and dtypes"),
        ("projects", "shapes and dtypes"),
        ("counts", "purity"),
        ("in place", "purity"),
        ("random", "purity"),
    ],
)
def test_a_faulty_injection_is_reported_with_its_contract(faulty, fault, contract):
    for check in (INJECTION_CONTRACTS[contract.replace(" ", "_")], check_injection):
        with pytest.raises(ContractError, match=contract):
            check(ShiftedSpec(fault=fault))


def test_widths_that_do_not_fit_are_refused_with_both_numbers_and_a_remedy():
    with pytest.raises(ValueError, match=r"width 8.*width 12.*core_d_model.*concat"):
        ib.AddInjectionSpec().check(8, 12)
    ib.ConcatSpec().check(8, 12)

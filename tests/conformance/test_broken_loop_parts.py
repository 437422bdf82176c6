"""Faulty initial states, depths and residual scalings are detected and named; the correct ones pass."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import pytest
import torch
from torch import nn

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.testing import (
    DEPTH_CONTRACTS,
    SCALING_CONTRACTS,
    START_CONTRACTS,
    ContractError,
    check_depth,
    check_scaling,
    check_start,
)


class ShiftedStartSpec(ib.StartSpec):
    """The embedded tokens plus a learned vector; each fault is a plausible mistake."""

    depends_on_tokens: ClassVar[bool] = True

    kind: Literal["test.shifted"] = "test.shifted"
    fault: str = ""

    def check(self, d_model: int, core_width: int) -> None:
        if d_model != core_width and self.fault != "check":
            raise ValueError(f"d_model {d_model} differs from the core's width {core_width}")

    def parameter_count(self, core_width: int) -> int:
        return 0 if self.fault == "count" else core_width


class TokenlessStartSpec(ShiftedStartSpec):
    """States wrongly that the tokens do not matter."""

    depends_on_tokens: ClassVar[bool] = False

    kind: Literal["test.tokenless"] = "test.tokenless"


class ShiftedStart(ib.Start):
    def __init__(self, spec: ShiftedStartSpec, *, width: int) -> None:
        super().__init__(spec, width=width)
        self.shift = nn.Parameter(torch.zeros(width))

    def point(self, *, x_BLD, e_BLD, positions_BL, dtype):
        fault = self.spec.fault
        if x_BLD.shape[-1] != self.width:
            raise ValueError(f"tokens of width {x_BLD.shape[-1]} for a core of width {self.width}")
        z = x_BLD.to(dtype) + self.shift
        if fault == "wide":
            z = z.double()
        if fault == "window":
            z = z + torch.arange(x_BLD.shape[1])[:, None] * 0.1
        if fault == "batch":
            z = z + 0.1 * z.mean(0)
        if fault == "random":
            z = z + torch.randn(z.shape)
        return z if fault == "wide" else z.to(dtype)

    def forward(self, *, width: int, **inputs: Any):
        noisy = self.spec.fault != "no noise"
        return super().forward(width=width, **inputs) if noisy else self.point(**inputs)


class SteppedDepthSpec(ib.DepthSpec):
    """One loop in the first step, two in the second, three in the third, then again."""

    kind: Literal["test.stepped"] = "test.stepped"
    fault: str = ""

    def expected_loops(self) -> float:
        return 2.5 if self.fault == "expects" else 2.0

    def maximum_loops(self) -> int:
        return 2 if self.fault == "maximum" else 3


class SteppedDepth(ib.Depth):
    def __init__(self, spec: SteppedDepthSpec) -> None:
        super().__init__(spec)
        if spec.fault == "unsaved":
            self.steps = 0
        else:
            self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def sample(self, batch_size, device):
        fault = self.spec.fault
        if not self.training and fault != "counts":
            return None
        if torch.is_tensor(self.steps) and self.steps.is_meta:
            return 1
        loops = int(self.steps) % 3 + 1
        self.steps += 1
        if fault == "random":
            return int(torch.randint(1, 4, ()))
        return torch.tensor(loops) if fault == "scalar" else loops


class HalvedSpec(ib.ScalingSpec):
    """The branch times a learned factor that starts at one half."""

    kind: Literal["test.halved"] = "test.halved"
    fault: str = ""

    def parameter_count(self, d_model: int) -> int:
        return d_model


class PlainHalvedSpec(HalvedSpec):
    """States wrongly that it adds the branch as it is."""

    plain: ClassVar[bool] = True

    kind: Literal["test.plain_halved"] = "test.plain_halved"


class Halved(ib.Scaling):
    def __init__(self, spec: HalvedSpec, *, d_model: int, n_layers: int) -> None:
        super().__init__(spec, d_model=d_model, n_layers=n_layers)
        shape = (1, d_model) if spec.fault == "matrix" else (d_model,)
        self.factor = nn.Parameter(torch.full(shape, 0.5))

    def reset_parameters(self) -> None:
        if self.spec.fault != "reset":
            nn.init.constant_(self.factor, 0.5)

    def forward(self, stream_BLD, branch_BLD):
        fault = self.spec.fault
        after = stream_BLD + self.factor * (branch_BLD.detach() if fault == "detaches" else branch_BLD)
        if fault == "tokens":
            after = after + 0.1 * branch_BLD.mean(1, keepdim=True)
        return after.bfloat16().to(branch_BLD.dtype) if fault == "type" else after


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "none")
    with registry.isolated():
        for family, spec, builder in (
            ("start", ShiftedStartSpec, ShiftedStart),
            ("start", TokenlessStartSpec, ShiftedStart),
            ("depth", SteppedDepthSpec, SteppedDepth),
            ("scaling", HalvedSpec, Halved),
            ("scaling", PlainHalvedSpec, Halved),
        ):
            registry.add(family, spec, builder, owner="acme-faulty", version="0.7")
        yield


CONTRACTS = {"start": START_CONTRACTS, "depth": DEPTH_CONTRACTS, "scaling": SCALING_CONTRACTS}
BREAKS = {
    "start-wide": (ShiftedStartSpec(fault="wide"), "shape_and_dtype", "requested type"),
    "start-window": (ShiftedStartSpec(fault="window"), "windows", "a function of the token, its position"),
    "start-batch": (ShiftedStartSpec(fault="batch"), "rows_apart", "use positions, not rows"),
    "start-random": (ShiftedStartSpec(fault="random"), "repeatable_evaluation", "use Start.noise"),
    "start-tokens": (TokenlessStartSpec(), "token_dependence", "depends_on_tokens is False"),
    "start-no-noise": (ShiftedStartSpec(fault="no noise"), "added_noise", "override point, not forward"),
    "start-check": (ShiftedStartSpec(fault="check"), "widths", "or refuse them and name both"),
    "start-count": (ShiftedStartSpec(fault="count"), "copies", "there are 16 parameters"),
    "depth-scalar": (SteppedDepthSpec(fault="scalar"), "type_and_bounds", "return None, an int"),
    "depth-maximum": (SteppedDepthSpec(fault="maximum"), "type_and_bounds", "maximum_loops is 2"),
    "depth-expects": (SteppedDepthSpec(fault="expects"), "mean", "expected_loops returns 2.500"),
    "depth-random": (SteppedDepthSpec(fault="random"), "equal_on_ranks", "from the seed and a counter"),
    "depth-unsaved": (SteppedDepthSpec(fault="unsaved"), "resumes", "in a persistent buffer"),
    "depth-counts": (SteppedDepthSpec(fault="counts"), "evaluation", "return None unless self.training"),
    "scaling-type": (HalvedSpec(fault="type"), "types", "keep the stream's shape and type"),
    "scaling-tokens": (HalvedSpec(fault="tokens"), "tokens_apart", "each token and channel separately"),
    "scaling-plain": (PlainHalvedSpec(), "plain", "plain is True"),
    "scaling-detaches": (HalvedSpec(fault="detaches"), "gradients", "detach nothing"),
    "scaling-matrix": (HalvedSpec(fault="matrix"), "parameters", "parameters must be vectors"),
    "scaling-reset": (HalvedSpec(fault="reset"), "parameters", "initialize every parameter"),
}


def test_the_correct_components_pass():
    assert check_start(ShiftedStartSpec()) is None
    assert check_depth(SteppedDepthSpec()) is None
    assert check_scaling(HalvedSpec()) is None


@pytest.mark.parametrize("fault", BREAKS)
def test_a_fault_is_detected_and_named(fault):
    spec, contract, remedy = BREAKS[fault]
    with pytest.raises(ContractError) as caught:
        CONTRACTS[spec.family][contract](spec)
    message = str(caught.value)
    # The builder of a depth may be a class of the library: the spec is named.
    assert spec.family != "depth" or message.startswith("SteppedDepthSpec (of plugin")
    assert f"breaks the contract '{contract.replace('_', ' ')}'" in message
    assert remedy in message


def test_every_contract_has_a_fault():
    tested = {(spec.family, contract) for spec, contract, _ in BREAKS.values()}
    assert tested == {(family, name) for family, contracts in CONTRACTS.items() for name in contracts}

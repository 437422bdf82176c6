"""For every contract of mixers, a faulty mixer is detected and named."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.layers import Linear
from implicit_blocks.mixers.slots import RecurrentSlots
from implicit_blocks.specs import Parameters
from implicit_blocks.testing import (
    CUTS,
    MIXER_CONTRACTS,
    PADDINGS,
    ContractError,
    check_backend,
    check_mixer,
    check_walk,
)


class FaultySpec(ib.MixerSpec):
    """A decaying sum; each fault is a plausible mistake."""

    kind: Literal["test.faulty"] = "test.faulty"
    fault: str = ""

    def injection_width(self, d_model: int) -> int:
        return d_model + (self.fault == "width")

    def parameter_shapes(self, d_model: int) -> dict[str, tuple[int, ...]] | None:
        return {"wrong": (d_model,)} if self.fault == "shapes" else None

    def parameter_count(self, d_model: int) -> Parameters:
        return Parameters(2 * d_model * d_model + d_model + (self.fault == "count"), 2 * d_model)

    def state_bytes(self, d_model: int, *, tokens: int, itemsize: int) -> int:
        return d_model * (itemsize if self.fault == "state size" else max(itemsize, 4))

    def flops_per_token(self, d_model: int, length: int) -> float:
        return -1.0 if self.fault == "operations" else 4.0 * d_model * d_model


class Faulty(ib.Mixer):
    """``h_t = a h_{t−1} + W z_t + u_t``, ``y = V tanh(h)``."""

    def __init__(self, spec: FaultySpec, *, d_model: int) -> None:
        super().__init__()
        self.fault, self.d_model = spec.fault, d_model
        self.in_proj = Linear(d_model, d_model, bias=False)
        self.out_proj = Linear(d_model, d_model, bias=False)
        device = "cpu" if self.fault == "own device" else None
        self.a = nn.Parameter(torch.empty(d_model, device=device))
        self.hidden = torch.randn(d_model).double() if self.fault == "unsaved" else None
        if self.fault == "unsaved buffer":
            self.register_buffer("table", torch.ones(d_model), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.fault != "uninitialized":
            nn.init.uniform_(self.a, -1, 1)

    @property
    def truncates(self) -> bool:
        return self.fault == "keeps what is taken back"

    def truncate(self, state, length):
        if self.truncates or self.fault == "truncates unsaid":
            return state
        return super().truncate(state, length)

    def slots(self, count, *, device, dtype, max_seq_len):
        if self.fault == "no slots":
            return super().slots(count, device=device, dtype=dtype, max_seq_len=max_seq_len)
        return FaultySlots(self, count, device=device, dtype=dtype)

    @property
    def injection_width(self) -> int:
        return self.d_model

    def initial_state(self, batch_size, *, device, dtype, max_seq_len=None):
        wide = torch.promote_types(dtype, torch.float32)
        value = 1.0 if self.fault == "max_seq_len" and max_seq_len else 0.0
        h = torch.full((batch_size, self.d_model), value, device=device, dtype=wide)
        return (h, torch.zeros(batch_size)) if self.fault == "counts windows" else (h,)

    def select_rows(self, state, rows):
        if self.fault == "rows":
            return tuple(part[torch.zeros_like(rows)] for part in state)
        return tuple(part[rows] for part in state)

    def prepare(self, window: ib.Window):
        if window.documents_BT is not None and not self.fault.endswith("documents"):
            raise ValueError("one document a row, please")
        if self.fault == "rejects padding" and window.valid_BT is not None:
            raise ValueError("no padding, please")
        first_only = self.fault == "padding later" and window.start
        return None if self.fault == "padding" or first_only else window.valid_BL

    def forward(self, z, u, state, context):
        if self.fault == "writes":
            state[0].add_(1e-3)
        if self.fault == "forward writes z":
            z.mul_(0.5)
        both = self.advance(z, u, state, context)
        return both if self.fault in ("no state", "two from forward") else both[0]

    def advance_prefix(self, z, u, state, context, prefix):
        if self.fault == "commits the whole window":
            return self.advance(z, u, state, context)
        return super().advance_prefix(z, u, state, context, prefix)

    def advance(self, z, u, state, context):
        if self.fault == "type":
            z = z @ torch.eye(self.d_model, dtype=torch.float64).to(self.a.dtype)
        if self.fault == "writes z":
            z.mul_(0.5)
        x = self.in_proj(z)
        if u is not None and self.fault != "no injection":
            x = x + u
        if u is not None and self.fault == "biased injection":
            x = x + 1
        if self.fault == "looks ahead":
            x = x + 0.01 * x.mean(1, keepdim=True)
        if self.fault == "batch mean":
            x = x - x.mean(0)
        if self.fault == "unsaved":
            x = x * self.hidden
        if self.fault == "unsaved buffer":
            x = x * self.table
        a = torch.sigmoid(self.a.to(state[0].dtype))
        a = a.detach() if self.fault == "detached" else a
        h = torch.zeros_like(state[0]) if self.fault == "forgets" else state[0]
        h = h.detach() if self.fault == "detached state" else h
        steps = []
        for t in range(x.shape[1]):
            new = a * h + x[:, t].to(h.dtype)
            h = new if context is None else torch.where(context[:, t, None], new, h)
            steps.append(h)
        y: Tensor = self.out_proj(torch.stack(steps, 1).tanh())
        if self.fault == "cut":
            y = y[:, :-1]
        if self.fault == "constant":
            y = y.detach()
        if self.fault == "remembers":
            y, self.hidden = y + (0 if self.hidden is None else self.hidden.mean()), y
        if self.fault == "no state":
            return y
        if self.fault == "counts windows":
            return y, (h, state[1] + 1)
        return y, (h.bfloat16() if self.fault == "narrow state" else h,)


class FaultySlots(RecurrentSlots):
    """Slots that lose or swap committed states."""

    def prefill(self, slot):
        if self.mixer.fault == "used slots":
            return self.mixer.select_rows(self.states, torch.tensor([slot]))
        return super().prefill(slot)

    def commit_rows(self, mixer, slots, slots_B, state):
        if self.mixer.fault != "slots unsettled":
            super().commit_rows(mixer, slots, slots_B, state)

    def gather(self, rows, lengths):
        if self.mixer.fault == "slots in order" and rows is not None:
            rows = torch.arange(len(rows))
        return super().gather(rows, lengths)

    def write(self, rows, after, committed):
        everything = self.mixer.fault == "writes all slots"
        super().write(rows, after, torch.ones_like(committed) if everything else committed)


@pytest.fixture(autouse=True)
def _registered(monkeypatch):
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "none")
    with registry.isolated():
        registry.add("mixer", FaultySpec, Faulty, owner="acme-faulty", version="0.7")
        yield


BREAKS = {
    "looks ahead": ("causality", "causality", "mask later tokens"),
    "forgets": ("window_splits", "window splits", "check the state"),
    "counts windows": ("window_splits", "window splits", "change the final state"),
    "cut": ("causality", "mixes a window", "(3, 8, 16) of float64 for a window that is"),
    "remembers": ("state_untouched", "state untouched by iteration", "keep nothing between calls"),
    "writes": ("state_untouched", "state untouched by iteration", "return new tensors"),
    "writes z": ("causality", "window untouched", "must not write to z"),
    "forward writes z": ("state_untouched", "window untouched", "must not write to z"),
    "no state": (
        "window_splits",
        "mixes a window",
        "return a tuple of the mixed window and the state after it",
    ),
    "two from forward": ("causality", "mixes a window", "forward returned a tuple"),
    "batch mean": ("batch_independence", "batch independence", "alone differs"),
    "rows": ("batch_independence", "select_rows", "of the state"),
    "padding": ("padding", "padding", "valid_BL"),
    "rejects padding": ("padding", "padding", "packed documents may be rejected"),
    "padding later": ("padded_windows", "padded windows", "only real tokens"),
    "documents": ("documents", "documents", "documents_BT"),
    "padded documents": ("padded_documents", "padded documents", "documents_before"),
    "max_seq_len": ("max_seq_len", "max_seq_len", "initial_state(max_seq_len="),
    "keeps what is taken back": ("truncate", "truncate", "as it was after those tokens"),
    "truncates unsaid": ("truncate", "truncate", "set truncates = True"),
    "slots unsettled": ("slots", "slots", "call 1: the token after 2 others in slot 0"),
    "slots in order": ("slots", "slots", "call 2"),
    "writes all slots": ("slots", "slots", "call 3: the token after 3 others in slot 0"),
    "used slots": ("slots", "slots", "call 6: the token after 3 others in slot 1"),
    "commits the whole window": ("slot_windows", "slot windows", "check gather, advance_prefix and write"),
    "detached": ("gradients", "gradients", "direction of a"),
    "constant": ("gradients", "gradients", "the gradient is 0, finite differences"),
    "detached state": ("gradients", "gradients", "advance, in windows"),
    "type": ("low_precision", "low precision", "it raised RuntimeError"),
    "unsaved": ("copies", "state dict", "parameters or persistent buffers"),
    "own device": ("meta_build", "meta build", "created on an explicit device"),
    "uninitialized": ("meta_build", "meta build", "must initialize every parameter"),
    "unsaved buffer": ("meta_build", "meta build", "was lost"),
    "width": ("injection_width", "injection width", "the spec's width is 17"),
    "biased injection": ("injection_width", "injection width", "zeros differs from no injection"),
    "no injection": ("injection_width", "injection width", "the injection has no effect"),
    "shapes": ("costs", "costs", "parameter_shapes"),
    "count": ("costs", "costs", "parameter_count"),
    "operations": ("costs", "costs", "flops_per_token"),
    "state size": ("costs", "costs", "itemsize=2) returns 32; the state of a sequence takes 64"),
}


def test_the_correct_mixer_passes():
    check_mixer(FaultySpec())


def test_memory_outside_of_the_state_is_named_by_the_first_contract_that_detects_it():
    with pytest.raises(ContractError, match="keep nothing between calls"):
        check_mixer(FaultySpec(fault="remembers"))


def test_slots_are_optional():
    MIXER_CONTRACTS["slots"](FaultySpec(fault="no slots"))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("cuts", CUTS)
def test_the_correct_mixer_passes_the_walk(cuts, padding):
    check_walk(FaultySpec(), padding=padding, cuts=cuts, d_model=8)


@pytest.mark.parametrize(
    ("fault", "options", "message"),
    [
        ("padding", {"padding": "left"}, "(left padding, one window) row 1 differs"),
        ("padding later", {"padding": "right", "cuts": "ragged windows"}, "row 1 differs"),
        ("documents", {"documents": True}, "(none padding, one window, documents) row"),
        ("forgets", {"cuts": "tokens"}, "row 0 differs"),
        ("detached state", {"cuts": "ragged windows"}, "the gradient of z differs"),
        ("unsaved", {"padding": "holes"}, None),
    ],
)
def test_a_walk_through_random_windows_detects_faults(fault, options, message):
    if message is None:
        check_walk(FaultySpec(fault=fault), **options)  # outside the scope of the walk
        return
    with pytest.raises(ContractError) as caught:
        check_walk(FaultySpec(fault=fault), d_model=8, **options)
    assert "breaks the contract 'rows as if alone'" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(("name", "what"), [("padding", "padding 'centre'"), ("cuts", "cuts 'centre'")])
def test_unknown_padding_and_cuts_are_refused(name, what):
    with pytest.raises(ValueError, match=f"unknown {what}; choose one of "):
        check_walk(FaultySpec(), d_model=8, **{name: "centre"})


def test_every_contract_has_a_fault():
    assert {contract for contract, *_ in BREAKS.values()} == set(MIXER_CONTRACTS)


@pytest.mark.parametrize("fault", BREAKS)
def test_a_fault_is_detected_and_named(fault):
    contract, name, remedy = BREAKS[fault]
    with pytest.raises(ContractError) as caught:
        MIXER_CONTRACTS[contract](FaultySpec(fault=fault))
    message = str(caught.value)
    assert message.startswith("Faulty")
    assert f"breaks the contract '{name}'" in message
    assert remedy in message


@pytest.mark.parametrize("length", [1, 9])
@pytest.mark.parametrize("precision", [None, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernels_that_agree_pass(precision, length):
    options = {"d_model": 8, "length": length, "device": "cpu", "precision": precision, "tolerance": 1e-5}
    check_backend(FaultySpec(), FaultySpec(), **options)


@pytest.mark.parametrize(
    ("fault", "messages"),
    [
        ("detached", ["for one window, the gradient of a has error 1.0e+00"]),
        ("forgets", ["for windows, the output has error"]),
        ("detached state", ["for windows, the gradient of"]),
        ("narrow state", ["tensor 0 of the final state has type torch.bfloat16, with plain operators"]),
        ("padding", ["for a padded window, "]),
        ("padding later", ["for padded windows, "]),
    ],
)
def test_kernels_that_disagree_are_named(fault, messages):
    with pytest.raises(ContractError) as caught:
        check_backend(FaultySpec(fault=fault), FaultySpec(), d_model=8, length=9, device="cpu")
    for message in ("Faulty", "breaks the contract 'backend'", *messages):
        assert message in str(caught.value)

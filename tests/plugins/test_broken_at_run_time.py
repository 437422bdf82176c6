"""Components that break contracts at run time: the error names plugin, contract and remedy."""

from __future__ import annotations

import sys
from typing import Literal

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks import registry
from implicit_blocks.registry.contracts import ContractError, describe_component
from implicit_blocks.testing import check_solver

TOKENS = torch.arange(12).view(2, 6) % 5


class BadSolverSpec(ib.SolverSpec):
    kind: Literal["acme.bad"] = "acme.bad"
    fault: str = ""


class BadSolver(ib.Solver):
    def __init__(self, *, fault: str = "") -> None:
        self.fault = fault

    def init(self, z0):
        if self.fault == "number":
            return (z0, 0)
        return (z0.sum(),) if self.fault == "scalar" else (z0,)

    def update(self, z, fz, state, f):
        if self.fault == "short":
            return fz[:, :-1], state
        if self.fault == "double":
            return fz.double(), state
        if self.fault == "none":
            return None, state
        if self.fault == "transposed":
            return fz, (fz.T,)
        if self.fault == "grows":
            return fz, (*state, fz)
        if self.fault == "grows wider":
            return fz, (torch.cat([state[0], fz], 1),)
        if self.fault == "exits":
            sys.exit(0)
        if self.fault == "NaN":
            return torch.full_like(fz, torch.nan), state
        return fz, state


class BadMixerSpec(ib.MixerSpec):
    kind: Literal["acme.bad"] = "acme.bad"
    fault: str = ""


class BadMixer(ib.Mixer):
    def __init__(self, spec: BadMixerSpec, *, d_model: int) -> None:
        super().__init__()
        self.fault, self.width = spec.fault, d_model

    @property
    def injection_width(self) -> int:
        return self.width

    def initial_state(self, batch_size, *, device, dtype, max_seq_len=None):
        return ()

    def select_rows(self, state, rows):
        return state

    def prepare(self, window):
        return None

    def forward(self, z, u, state, context):
        if self.fault == "row":
            return z[:1]  # would be broadcast
        if self.fault == "integers":
            return z.long()
        if self.fault == "double":
            return (z + u).double()
        return (z, state) if self.fault == "pair" else 0.1 * z

    def advance(self, z, u, state, context):
        if self.fault == "no state":
            return 0.1 * z
        return self.forward(z, u, state, context), state


class BadGradientSpec(ib.GradientSpec):
    kind: Literal["acme.bad"] = "acme.bad"
    fault: str = ""


class BadGradient(ib.GradientEstimator):
    def __init__(self, *, fault: str = "") -> None:
        self.fault = fault

    def __call__(self, f, z0, search):
        found = search(f, z0)
        return found.z if self.fault == "tensor" else found.with_value(f(found.z)[:, :1])


@pytest.fixture(autouse=True)
def _plugin(monkeypatch):
    monkeypatch.setenv(registry.PLUGINS_VARIABLE, "none")
    with registry.isolated():
        registry.add("solver", BadSolverSpec, BadSolver.from_spec, owner="acme-blocks", version="2.5.0")
        registry.add("mixer", BadMixerSpec, BadMixer, owner="acme-blocks", version="2.5.0")
        registry.add("gradient", BadGradientSpec, BadGradient.from_spec, owner="acme-blocks", version="2.5.0")
        yield


def model(**parts) -> ib.ImplicitLM:
    settings = {"mixer": ib.AttentionSpec(n_heads=2)} | parts
    return ib.build(ib.ImplicitLMSpec(vocab_size=5, d_model=8, n_layers=1, **settings))


BREAKS = [
    ({"solver": BadSolverSpec(fault="short")}, "next point", ["a tensor (2, 47) of float32", "(2, 48)"]),
    ({"solver": BadSolverSpec(fault="double")}, "next point", ["of float64", "must agree"]),
    ({"solver": BadSolverSpec(fault="none")}, "next point", ["a NoneType"]),
    ({"solver": BadSolverSpec(fault="number")}, "state layout", ["a int", "counters included"]),
    ({"solver": BadSolverSpec(fault="scalar")}, "state layout", ["a tensor ()", "2 elements"]),
    ({"solver": BadSolverSpec(fault="transposed")}, "state layout", ["a tensor (48, 2)"]),
    ({"solver": BadSolverSpec(fault="grows")}, "state layout", ["structure, shapes and types must stay"]),
    ({"solver": BadSolverSpec(fault="grows wider")}, "state layout", ["(2, 48)", "(2, 96)", "fixed size"]),
    ({"mixer": BadMixerSpec(fault="row")}, "mixes a window", ["(1, 6, 8)", "(2, 6, 8)"]),
    ({"mixer": BadMixerSpec(fault="integers")}, "mixes a window", ["of int64", "floating-point"]),
    ({"mixer": BadMixerSpec(fault="pair")}, "mixes a window", ["a tuple"]),
    ({"gradient": BadGradientSpec(fault="tensor")}, "returns a Solution", ["solution.with_value(z)"]),
    ({"gradient": BadGradientSpec(fault="short")}, "returns a Solution", ["(2, 1, 8)", "(2, 6, 8)"]),
]


@pytest.mark.parametrize(("parts", "contract", "words"), BREAKS)
def test_the_error_names_plugin_contract_and_remedy(parts, contract, words):
    broken = model(**parts, stopping=ib.Stopping(tolerance=0.0, max_iterations=3))
    with pytest.raises(ContractError) as caught:
        broken(TOKENS, labels=TOKENS)
    message = str(caught.value)
    assert message.startswith("Bad")
    assert "(of plugin acme-blocks 2.5.0)" in message
    assert f"breaks the contract '{contract}'" in message
    for word in words:
        assert word in message
    model()(TOKENS, labels=TOKENS).loss.backward()  # other models are not affected


@pytest.mark.parametrize("solver", [ib.PicardSpec(), ib.AndersonSpec(), ib.BroydenSpec()])
def test_a_mixer_that_widens_the_stream_is_not_blamed_on_the_solver(solver):
    stopping = ib.Stopping(tolerance=0.0, max_iterations=3)
    broken = model(mixer=BadMixerSpec(fault="double"), solver=solver, stopping=stopping)
    with pytest.raises(ValueError, match=r"mixers.*returned torch\.float64 for points of torch\.float32"):
        broken(TOKENS, labels=TOKENS)


def test_advance_must_return_a_pair():
    with pytest.raises(ContractError, match="tuple of the mixed window and the state"):
        model(mixer=BadMixerSpec(fault="no state")).eval()(TOKENS, return_state=True)


def test_a_solver_that_returns_nan_has_diverged():
    broken = model(solver=BadSolverSpec(fault="NaN"), stopping=ib.Stopping(tolerance=0.0, max_iterations=5))
    out = broken(TOKENS, labels=TOKENS)
    assert bool(out.solution.diverged.all())
    assert bool(out.solution.z.isfinite().all())
    out.loss.backward()


def test_the_trainer_reports_the_error_without_a_traceback(tmp_path, capsys):
    from trainer.cli.train import main

    arguments = ["--spec", "word_problem_s3", "--output", str(tmp_path / "run"), "training.max_steps=1"]
    changes = ["model.solver={kind: acme.bad, fault: short}", "training.batch_size=2", "phases=[]"]
    assert main([*arguments, *changes]) != 0
    message = capsys.readouterr().err
    assert "BadSolver (of plugin acme-blocks 2.5.0) breaks the contract 'next point'" in message
    assert "Traceback" not in message


def test_a_state_that_grows_in_a_later_update_is_reported():
    class Late(ib.Picard):
        def init(self, z0):
            return (torch.zeros_like(z0),)

        def update(self, z, fz, state, f):
            state = (state[0] + 1,)
            return fz, (*state, fz) if (state[0] > 1).any() else state

    f = 0.5 * torch.ones(3, 1)
    f[0] = 0.0  # a row that is done sooner, so that states are chosen element by element
    search = ib.Search(solver=Late(), stopping=ib.Stopping(tolerance=1e-3, max_iterations=9))
    with pytest.raises(ContractError, match=r"Late.*'state layout'.*must stay the same"):
        search(lambda z: f * z + 1, torch.zeros(3, 4))


def test_a_component_that_exits_the_program_is_an_error(tmp_path, capsys):
    from trainer.cli.train import main

    arguments = ["--spec", "word_problem_s3", "--output", str(tmp_path / "run"), "training.max_steps=1"]
    changes = ["model.solver={kind: acme.bad, fault: exits}", "training.batch_size=2", "phases=[]"]
    assert main([*arguments, *changes]) == 1
    message = capsys.readouterr().err
    assert "test_broken_at_run_time.py" in message
    assert "called sys.exit(0) during the run" in message


# -------------------------------------------------------------------------------------- builders


class OtherSpec(ib.SolverSpec):
    kind: Literal["acme.other"] = "acme.other"


@pytest.mark.parametrize(
    ("builder", "words"),
    [
        (
            lambda spec: "picard",
            ["returned a str", "return an instance of implicit_blocks.interfaces.Solver"],
        ),
        (lambda: None, ["cannot be called as builder(spec)"]),
        (lambda spec, d_model: None, ["cannot be called", "d_model"]),
    ],
)
def test_a_builder_that_breaks_its_contract_is_reported(builder, words):
    registry.add("solver", OtherSpec, builder, owner="acme-other", version="0.1")
    with pytest.raises(ContractError) as caught:
        ib.build(OtherSpec())
    for word in ["solver 'acme.other' of acme-other 0.1 breaks the contract 'builds its family'", *words]:
        assert word in str(caught.value)
    check_solver(ib.PicardSpec())


def test_a_type_error_inside_the_builder_is_raised_unchanged():
    def builder(spec):
        return len(3)

    registry.add("solver", OtherSpec, builder, owner="acme-other")
    with pytest.raises(TypeError, match="has no len"):
        ib.build(OtherSpec())


def test_components_without_plugin_are_described_by_name():
    assert describe_component(ib.Picard()) == "Picard"
    assert describe_component("a part") == "a part"
    assert describe_component(pytest.Class) == "Class (of module _pytest.python)"

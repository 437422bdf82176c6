"""The published solver of Attractor models: its rule, its stopping, and the values of its own code."""

from __future__ import annotations

import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear, rms_norm

import implicit_blocks as ib
from implicit_blocks.solvers.attractor_anderson import NonCausalSolverWarning
from implicit_blocks.specs import SpecError
from implicit_blocks.testing import SOLVER_CONTRACTS
from implicit_blocks.testing.contract import relative_error
from implicit_blocks.testing.solvers import contraction

REFERENCE = Path(__file__).resolve().parents[3] / "shared" / "fixtures" / "reference" / "attractor_tiny"


def solver(**options) -> ib.AttractorAnderson:
    with pytest.warns(NonCausalSolverWarning):
        return ib.AttractorAnderson(**options)


def search(solver, tolerance=1e-8, max_iterations=200, **options) -> ib.Search:
    return ib.Search(
        solver=solver, stopping=ib.Stopping(tolerance=tolerance, max_iterations=max_iterations), **options
    )


# ------------------------------------------------------------------------------------ the rule


def bordered(points, values, *, beta, lam):
    """Return the next point of one element by the bordered system as it is published."""
    residuals = torch.stack([v - p for p, v in zip(points, values, strict=True)])
    n = len(points)
    system = torch.zeros(n + 1, n + 1, dtype=torch.float64)
    system[0, 1:] = system[1:, 0] = 1
    system[1:, 1:] = residuals @ residuals.T + lam * torch.eye(n, dtype=torch.float64)
    rhs = torch.zeros(n + 1, dtype=torch.float64)
    rhs[0] = 1
    a = torch.linalg.solve(system, rhs)[1:]
    return beta * (a @ torch.stack(values)) + (1 - beta) * (a @ torch.stack(points))


@pytest.mark.parametrize("beta", [1.0, 0.6])
def test_the_points_solve_the_bordered_system(beta):
    f, expected = contraction(0.9)
    rule, memory, lam = solver(memory=3, beta=beta, lam=1e-3), 3, 1e-3
    z = torch.zeros_like(expected)
    state, points, values = rule.init(z), [], []
    for call in range(7):
        points, values = [*points, z][-memory:], [*values, f(z)][-memory:]
        z, state = rule.update(z, f(z), state, f)
        for row in range(z.shape[0]):
            wanted = (
                values[-1][row]
                if call == 0
                else bordered([p[row] for p in points], [v[row] for v in values], beta=beta, lam=lam)
            )
            torch.testing.assert_close(z[row], wanted, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize(
    "contract", ["state_layout", "one_iteration", "contractions", "low_precision", "memory_claim"]
)
def test_the_solver_satisfies_the_contracts_that_do_not_concern_stopping(contract):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonCausalSolverWarning)
        SOLVER_CONTRACTS[contract](ib.AttractorAndersonSpec(lam=1e-12))


def test_memory_1_is_plain_iteration():
    f, expected = contraction(0.5)
    found = search(solver(memory=1), 1e-30, 5)(f, torch.zeros_like(expected))
    z = torch.zeros_like(expected)
    for _ in range(5):
        z = f(z)
    torch.testing.assert_close(found.z, z)


# ------------------------------------------------------------------------------------ stopping


def test_the_batch_stops_as_a_whole_at_its_largest_residual():
    f, expected = contraction([0.05, 0.3, 0.6, 0.9])
    found = search(solver(lam=1e-12), 1e-8, trace=True)(f, torch.ones_like(expected))
    calls = found.iterations[0].item()
    assert (found.iterations == calls).all()
    assert found.converged.all()
    assert found.trace.shape == (calls, 4)
    assert (found.trace[:-1].amax(1)[6:] >= 1e-8).all()
    assert found.trace[-1].amax() < 1e-8
    torch.testing.assert_close(found.residual, found.trace[-1])


@pytest.mark.parametrize(("least", "calls"), [(0, 3), (2, 3), (6, 6)])
def test_the_first_two_calls_and_those_before_the_minimum_are_not_tested(least, calls):
    found = search(solver(min_iterations=least), 10.0)(lambda z: 0.5 * z + 1, torch.ones(2, 3))
    assert found.iterations.tolist() == [calls] * 2


def test_the_value_is_that_of_the_last_call():
    points = []

    def f(z):
        points.append(z)
        return torch.cos(z)

    found = search(solver(), 1e-3)(f, torch.ones(2, 3, 4))
    assert found.z.shape == (2, 3, 4)
    assert torch.equal(found.z, torch.cos(points[-1]))
    assert len(points) == found.iterations[0]


def test_the_trajectory_has_the_values_of_the_chosen_calls():
    f, expected = contraction(0.9)
    values = []

    def recorded(z):
        values.append(f(z))
        return values[-1]

    found = search(solver(), 0.0, 6, trajectory=(1, 4, 9))(recorded, torch.zeros_like(expected))
    assert sorted(found.trajectory) == [1, 4]
    assert torch.equal(found.trajectory[4], values[3])


def test_a_row_of_nan_does_not_keep_the_others_from_stopping():
    def f(z):
        return torch.cat((z[:1] * torch.nan, torch.cos(z[1:])))

    start = torch.ones(3, 4)
    found = search(solver(), 1e-3)(f, start)
    assert found.diverged.tolist() == [True, False, False]
    assert found.converged.tolist() == [False, True, True]
    assert torch.equal(found.z[0], start[0])
    assert found.iterations[0] < 50


def test_padding_does_not_change_a_row_s_answer():
    start = torch.linspace(0, 1, 2 * 5 * 3).view(2, 5, 3)
    valid = torch.ones(2, 5, dtype=torch.bool)
    valid[:, :2] = False
    padded = search(solver(), 1e-6, valid=valid)(torch.cos, start)
    alone = search(solver(), 1e-6)(torch.cos, start[:, 2:])
    assert torch.equal(padded.iterations, alone.iterations)
    torch.testing.assert_close(padded.z[:, 2:], alone.z)
    assert torch.equal(padded.z[:, :2], start[:, :2])


def test_processes_agree_on_the_number_of_calls():
    asked = []

    def agree(done):
        asked.append(done)
        return done and len(asked) >= 12

    found = search(solver(min_iterations=0), 10.0, agree=agree)(torch.cos, torch.ones(2, 3))
    assert found.iterations.tolist() == [12, 12]


# ------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory": 0}, "memory is 0"),
        ({"beta": 1.5}, r"beta is 1.5; choose a number in \(0, 1\]"),
        ({"lam": 0.0}, "lam must be positive and finite, got 0.0"),
        ({"min_iterations": -1}, "min_iterations must be at least 0, got -1"),
    ],
)
def test_numbers_out_of_range_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        ib.AttractorAnderson(**options)
    with pytest.raises(SpecError):
        ib.AttractorAndersonSpec(**options)


def test_prefix_scope_and_moving_averages_are_refused():
    rule, z = solver(), torch.ones(2, 3, 4)
    with pytest.raises(ValueError, match="scope 'prefix'; give it the scope 'sequence'"):
        ib.Search(solver=rule, stopping=ib.Stopping(scope="prefix"))(torch.cos, z)
    with pytest.raises(ValueError, match="AttractorAnderson has no average"):
        ib.Search(solver=rule, stopping=ib.Stopping(), moving_average=0.5)


def test_a_model_refuses_the_solver_with_prefix_scope():
    options = {"vocab_size": 8, "d_model": 8, "n_layers": 1, "mixer": {"kind": "attention", "n_heads": 2}}
    with pytest.raises(SpecError, match=r"set at_evaluation.stopping.scope to 'sequence'"):
        ib.ImplicitLMSpec(**options, at_evaluation={"solver": {"kind": "attractor_anderson"}})


# ------------------------------------------------------------------------------------ published values


class PublishedMap:
    """``f(y) = head(y + c) − y`` of the published tiny model with one head block, from its equations."""

    def __init__(self, folder: Path, dtype: torch.dtype) -> None:
        safetensors = pytest.importorskip("safetensors.torch")
        config = json.loads((folder / "config.json").read_text())
        self.config, self.derived = config["config"], config["derived"]
        block = "transformer.core_block.0."
        weights = safetensors.load_file(folder / "weights.safetensors")
        self.w = {k.removeprefix(block): v.to(dtype) for k, v in weights.items() if k.startswith(block)}
        self.rotation, self.dtype = weights["freqs_cis"].to(dtype), dtype
        expected = safetensors.load_file(folder / "expected.safetensors")
        self.c = expected["f64/prelude" if dtype == torch.float64 else "prelude"]
        self.expected = expected
        self.head = weights["transformer.wte.weight"].to(dtype), weights["transformer.ln_f.weight"].to(dtype)

    def __call__(self, y: Tensor) -> Tensor:
        h = y + self.c
        attention = self.gate("attn") * self.attention(self.norm(h, "norm_1"))
        hidden = linear(self.norm(h + attention, "norm_2"), self.w["mlp.fc.weight"])
        mlp = linear(0.5 * hidden.relu().square(), self.w["mlp.proj.weight"])
        return self.c + attention + self.gate("mlp") * mlp

    def loss(self, y: Tensor) -> Tensor:
        embedding, gain = self.head
        hidden = rms_norm(y, y.shape[-1:], gain, self.config["norm_eps"])
        logits = self.derived["logit_scale"] * linear(hidden, embedding)
        return cross_entropy(logits.flatten(0, 1), self.expected["labels"].flatten())

    def gate(self, branch: str) -> Tensor:
        return self.config["gamma_max"] * torch.sigmoid(self.w[f"raw_gamma_{branch}"])

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.config["norm_eps"])

    def attention(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        heads, size = self.config["num_attention_heads"], self.derived["head_size"]
        q, k, v = (
            linear(x, self.w[f"attn.c_{name}.weight"]).view(batch, length, heads, size) for name in "qkv"
        )
        cos, sin = self.rotation[:, :length].unbind(-1)

        def turned(x: Tensor) -> Tensor:
            even, odd = x[..., ::2], x[..., 1::2]
            x = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
            return rms_norm(x, (size,), eps=torch.finfo(self.dtype).eps).transpose(1, 2)

        scores = turned(q) @ turned(k).mT / math.sqrt(size)
        future = torch.ones(length, length, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(future, -torch.inf).softmax(-1) @ v.transpose(1, 2)
        return linear(mixed.transpose(1, 2).reshape(batch, length, width), self.w["attn.c_proj.weight"])


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def published(request) -> PublishedMap:
    if not REFERENCE.is_dir():
        pytest.skip(f"no published values at {REFERENCE}")
    return PublishedMap(REFERENCE, request.param)


def test_the_published_iterations_residuals_and_state_are_reproduced(published):
    config, expected = published.config, published.expected
    part = "f64/" if published.dtype == torch.float64 else ""
    rule = solver(
        memory=config["anderson_m"],
        beta=config["anderson_beta"],
        lam=published.derived["anderson_lam"],
        min_iterations=config["min_iter"],
    )
    found = search(rule, config["tol"], config["max_iter"], trace=True)(published, published.c)
    assert found.iterations.tolist() == [expected[f"{part}solver/iters"].item()] * 2
    close = {"rtol": 1e-9, "atol": 1e-12} if part else {"rtol": 1e-5, "atol": 2e-8}
    torch.testing.assert_close(found.trace.double(), expected[f"{part}solver/residual_history"], **close)
    torch.testing.assert_close(found.z, expected[f"{part}state_final"], rtol=1e-5, atol=1e-5)
    tight = (1e-12, 400) if part else (1e-6, 400)
    rule = solver(memory=config["anderson_m"], lam=published.derived["anderson_lam"], min_iterations=0)
    found = search(rule, *tight)(published, published.c)
    assert found.iterations.tolist() == [expected[f"{part}tight/iters"].item()] * 2
    torch.testing.assert_close(found.z, expected[f"{part}tight/state"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("published", [torch.float32], ids=["float32"], indirect=True)
def test_published_plain_iterations_are_those_of_memory_1(published):
    expected = published.expected
    chosen = (1, 2, 3, 4)
    found = search(solver(memory=1), 0.0, 4, trace=True, trajectory=chosen)(published, published.c)
    torch.testing.assert_close(
        found.trace.double(), expected["fpi/residual_history"].double(), rtol=2e-5, atol=1e-9
    )
    for t in chosen:
        torch.testing.assert_close(found.trajectory[t], expected[f"state_loop{t}"], rtol=1e-5, atol=1e-5)
    tight = search(solver(memory=1, min_iterations=0), 1e-6, 400)(published, published.c)
    assert tight.iterations.tolist() == [expected["tight/fpi_iters"].item()] * 2
    for calls in (1, 2, 4):
        found = search(solver(), 0.0, calls)(published, published.c)
        assert found.iterations.tolist() == [expected[f"solver/iters_loops{calls}"].item()] * 2


@pytest.mark.parametrize("published", [torch.float32], ids=["float32"], indirect=True)
def test_the_published_training_gradients_of_the_map_are_reproduced(published):
    """The one-step gradient at the solver's value, and the exact one at tight tolerances."""
    config, expected = published.config, published.expected
    weights = list(published.w.values())
    for weight in weights:
        weight.requires_grad_()
    adjoint = ib.Stopping(tolerance=1e-7, max_iterations=400)
    for prefix, gradient, tolerance, least in (
        ("", ib.OneStepAdjoint(), config["tol"], config["min_iter"]),
        ("tight/", ib.ImplicitFunction(stopping=adjoint), 1e-6, 0),
    ):
        solution = ib.solve_fixed_point(
            published,
            published.c,
            solver=solver(min_iterations=least),
            gradient=gradient,
            stopping=ib.Stopping(tolerance=tolerance, max_iterations=400),
        )
        loss = published.loss(solution.z)
        torch.testing.assert_close(loss, expected[f"{prefix}loss"], rtol=1e-6, atol=0)
        name = "grad_ift" if prefix else "grad"
        for key, found in zip(published.w, torch.autograd.grad(loss, weights), strict=True):
            wanted = expected[f"{name}/transformer.core_block.0.{key}"]
            assert relative_error(found, wanted) < 1e-4, (name, key)


def test_a_model_trains_and_evaluates_with_the_solver():
    spec = ib.ImplicitLMSpec(
        vocab_size=8,
        d_model=8,
        n_layers=1,
        mixer=ib.AttentionSpec(n_heads=2),
        solver=ib.AttractorAndersonSpec(),
        gradient=ib.OneStepAdjointSpec(),
        at_evaluation={"solver": {"kind": "attractor_anderson"}, "stopping": {"scope": "sequence"}},
    )
    with pytest.warns(NonCausalSolverWarning):
        model = ib.build(spec)
    ids = torch.arange(10).view(2, 5) % 8
    output = model(ids, labels=ids)
    output.loss.backward()
    assert output.solution.iterations.unique().numel() == 1
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    with torch.no_grad():
        assert model.eval()(ids).logits.isfinite().all()

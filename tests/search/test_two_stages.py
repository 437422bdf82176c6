"""Searches that begin with an approximation: their solutions, statuses and gradients are those of the map."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search import two_stages
from implicit_blocks.search.options import SearchOptions

SOLVERS = {"picard": ib.Picard(), "damped": ib.Picard(damping=0.7), "anderson": ib.Anderson(memory=3)}
KINDS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=16, head_dim=16)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4), "mlp": ib.SwiGLUSpec(d_ff=96)},
}


class Contraction:
    """A map whose rows converge at different rates; its approximation has a fixed point 3 % away."""

    def __init__(self, rate, goal, calls=None, kind="full"):
        self.rate, self.goal, self.kind = rate, goal, kind
        self.calls = [] if calls is None else calls
        self.begins_low = kind == "full"

    def __call__(self, z):
        self.calls.append(self.kind)
        return self.goal + self.rate * (z - self.goal)

    def low_precision(self):
        return Contraction(self.rate, 1.03 * self.goal, self.calls, "low")

    def select_rows(self, rows):
        return Contraction(self.rate[rows], self.goal[rows], self.calls, self.kind)


def contraction(scope="sequence"):
    torch.manual_seed(0)
    rate = torch.linspace(0.05, 0.8, 6 * 5).view(6, 5, 1).double()
    rate = rate if scope == "prefix" else rate[:, -1:]
    return Contraction(rate, torch.randn(6, 5, 3, dtype=torch.float64))


def search(f, scope="sequence", solver=ib.Picard(), tolerance=1e-5, most=90, **options):  # noqa: B008  # frozen
    stopping = ib.Stopping(tolerance=tolerance, max_iterations=most, scope=scope)
    return ib.Search(solver=solver, stopping=stopping, **options)(f, torch.zeros_like(f.goal))


@pytest.mark.parametrize("solver", SOLVERS.values(), ids=SOLVERS)
@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_the_solution_is_the_fixed_point_of_the_map(scope, solver):
    f = contraction(scope)
    found = search(f, scope, solver)
    assert found.converged.all()
    assert (found.residual <= 1e-5).all()
    torch.testing.assert_close(found.z, f.goal, rtol=0, atol=1e-4)
    low, full = f.calls.count("low"), f.calls.count("full")
    assert low > 1
    assert full > 1
    assert f.calls == ["low"] * low + ["full"] * full
    assert int(found.iterations.max()) <= low + full


def test_only_the_map_itself_decides_about_convergence():
    f = contraction()
    found = search(f, most=7, tolerance=1e-12)
    assert f.calls == ["low"] * (len(f.calls) - f.calls.count("full")) + ["full"] * f.calls.count("full")
    assert len(f.calls) == 7
    assert (found.iterations <= 7).all()
    assert not found.converged.any()
    exact = f.goal + f.rate * (found.z - f.goal)
    assert ((exact - found.z).flatten(1).norm(dim=1) > 0).all()


@pytest.mark.parametrize(("most", "low"), [(1, 0), (2, 1), (4, 3)])
def test_the_last_iteration_is_one_of_the_map_itself(most, low, monkeypatch):
    monkeypatch.setattr(two_stages, "BEGIN_FINE", 0.0)
    f = contraction()
    found = search(f, most=most, tolerance=0.0)
    assert f.calls == ["low"] * low + ["full"] * (most - low)
    assert (found.iterations == most).all()


def test_the_trace_has_the_residuals_of_both_stages():
    f = contraction()
    found = search(f, trace=True)
    assert found.trace.shape == (len(f.calls), 6)
    slowest = int(found.iterations.argmax())
    assert int(found.trace[:, slowest].isfinite().sum()) == int(found.iterations[slowest])


def test_rows_whose_approximation_diverges_start_anew():
    class Broken(Contraction):
        def low_precision(self):
            goal = self.goal.clone()
            goal[2] = torch.inf
            return Contraction(self.rate, goal, self.calls, "low")

    whole = contraction()
    f = Broken(whole.rate, whole.goal)
    found = search(f)
    assert found.converged.all()
    torch.testing.assert_close(found.z, f.goal, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "options", [{"trajectory": (1, 2)}, {"moving_average": 0.5}], ids=["trajectory", "moving_average"]
)
def test_options_that_observe_iterates_search_in_one_stage_with_the_reason(options, caplog):
    two_stages._report_once.cache_clear()
    f = contraction()
    with caplog.at_level(logging.WARNING):
        search(f, **options)
        search(f, **options)
    assert set(f.calls) == {"full"}
    assert [record.message for record in caplog.records] == [
        f"searches with {next(iter(options))} use full precision from their first call on"
    ]


def test_windows_are_searched_in_two_stages_each():
    model = built("mamba2")
    model.quantize_search()
    ids = tokens()
    whole = model(ids, labels=ids)
    cut = model(ids, labels=ids, window_length=5)
    assert cut.solution.converged.all()
    torch.testing.assert_close(cut.loss, whole.loss, rtol=1e-3, atol=0)


# ------------------------------------------------------------------------------------ models


def built(kind, **changes):
    torch.manual_seed(0)
    fields = {
        "vocab_size": 61,
        "d_model": 64,
        "n_layers": 2,
        "gradient": ib.PhantomSpec(steps=2),
        "stopping": ib.Stopping(tolerance=1e-6, max_iterations=200),
    }
    model = ib.build(ib.ImplicitLMSpec(**(fields | KINDS[kind] | changes))).train()
    with torch.no_grad():
        for block in model.backbone.blocks():  # so that the untrained map contracts
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(10.0)
    return model


def tokens(seed=0):
    return torch.randint(61, (3, 20), generator=torch.Generator().manual_seed(seed))


def step(model):
    ids = tokens()
    model.zero_grad()
    out = model(ids, labels=ids)
    out.loss.backward()
    return out, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_s_solution_and_gradients_are_those_of_full_precision(kind):
    model = built(kind)
    expected, expected_grads = step(model)
    model.quantize_search()
    found, grads = step(model)
    assert expected.solution.converged.all()
    assert found.solution.converged.all()
    torch.testing.assert_close(found.solution.z, expected.solution.z, rtol=0, atol=1e-4)
    torch.testing.assert_close(found.loss, expected.loss, rtol=1e-5, atol=0)
    for name, grad in expected_grads.items():
        torch.testing.assert_close(grads[name], grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_calls_of_a_model_differ_from_full_precision(kind):
    """Otherwise the test above would not show that the last calls correct the solution."""
    model = built(kind, stopping=ib.Stopping(tolerance=0.0, max_iterations=2))
    expected, _ = step(model)
    model.quantize_search()
    found, _ = step(model)
    error = (found.solution.z - expected.solution.z).detach()
    assert 0 < float(error.norm() / expected.solution.z.detach().norm()) < 0.1


def test_evaluation_is_in_full_precision():
    model = built("attention").eval()
    with torch.no_grad():
        expected = model(tokens()).logits
        model.quantize_search()
        assert torch.equal(model(tokens()).logits, expected)


def test_quantize_search_none_restores_full_precision():
    model = built("attention")
    expected, _ = step(model)
    model.quantize_search()
    step(model)
    model.quantize_search(None)
    found, _ = step(model)
    assert torch.equal(found.solution.z, expected.solution.z)


def test_other_dtypes_are_refused():
    with pytest.raises(ValueError, match=r"search_dtype is torch.int8; choose torch.float8_e4m3fn"):
        built("attention").quantize_search(torch.int8)


def test_a_call_that_keeps_iterates_is_in_full_precision():
    model = built("attention")
    ids = tokens()
    options = SearchOptions(trajectory=(2,))
    expected = model.encode(model.embedding(ids), search=options).solution.z
    model.quantize_search()
    assert torch.equal(model.encode(model.embedding(ids), search=options).solution.z, expected)


def test_a_bound_map_without_approximation_searches_in_one_stage():
    f = contraction()
    f.low_precision = lambda: None
    found = search(f)
    assert set(f.calls) == {"full"}
    assert found.converged.all()


def test_a_report_without_a_search_makes_no_calls():
    f = contraction()
    find = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(tolerance=1e-5, max_iterations=60))
    goal = f.goal
    assert replace(find).report(goal, goal, iterations=1).converged.all()
    assert f.calls == []

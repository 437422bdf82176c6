"""Search options of one call: warm start, moving average, and the contracts that hold with them."""

from __future__ import annotations

import dataclasses
import inspect
from typing import get_type_hints

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.decoding import generation
from implicit_blocks.search.options import SearchKwargs, SearchOptions

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=24)},
}
LENGTH = 11


@pytest.fixture(params=list(MIXERS))
def model(request):
    """Return a model in float64 that converges fast."""
    stopping = ib.StoppingOverrides(tolerance=1e-11, max_iterations=600)
    at_evaluation = ib.AtEvaluation(solver=ib.PicardSpec(damping=0.9), stopping=stopping)
    spec = ib.ImplicitLMSpec(
        vocab_size=19, d_model=16, n_layers=2, at_evaluation=at_evaluation, **MIXERS[request.param]
    )
    made = ib.build(spec)
    with torch.no_grad():
        for block in made.backbone.blocks():
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(40.0)
    return made.double().eval()


@pytest.fixture
def ids():
    return torch.randint(19, (3, LENGTH), generator=torch.Generator().manual_seed(5))


OPTIONS = {
    "warm": {"warm_start": True},
    "average": {"moving_average": 0.7},
    "both": {"warm_start": True, "moving_average": 0.5},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@torch.no_grad()
def test_search_options_find_the_same_fixed_point_in_any_windows(model, ids, options):
    ids = ids[:, :6]
    expected = model(ids)
    for window_length in (None, 1, 3):
        found = model(ids, window_length=window_length, **options)
        assert found.solution.converged.all()
        torch.testing.assert_close(found.logits, expected.logits, atol=1e-8, rtol=0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("window_length", [None, 1, 4])
@torch.no_grad()
def test_a_rows_answer_is_independent_of_others_with_any_search_option(model, ids, options, window_length):
    """At a loose tolerance, where any difference in the search changes the answer."""
    options = options | {"tolerance": 1e-2, "window_length": window_length}
    together = model(ids, **options)
    alone = model(ids[1:2], **options)
    torch.testing.assert_close(alone.logits[0], together.logits[1], atol=1e-9, rtol=0)
    assert torch.equal(alone.solution.token_iterations[0], together.solution.token_iterations[1])
    later = ids.clone()
    later[:, 8:] = 3
    found = model(later, **options).logits
    torch.testing.assert_close(found[:, :8], together.logits[:, :8], atol=1e-9, rtol=0)
    if window_length != 4:  # padding shifts the windows, which changes a warm start
        padded = torch.full((3, LENGTH + 3), 7)
        for real in (slice(3, None), slice(0, LENGTH)):
            mask = torch.zeros_like(padded)
            padded[:, real], mask[:, real] = ids, 1
            found = model(padded, attention_mask=mask, **options)
            torch.testing.assert_close(found.logits[:, real], together.logits, atol=1e-9, rtol=0)


@torch.no_grad()
def test_a_warm_start_begins_at_the_previous_token_of_the_same_document(model, ids):
    state = model(ids, return_state=True).state
    z = model.encode(model.embedding(ids)).hidden_BLD
    torch.testing.assert_close(state.last_BD, z[:, -1], atol=1e-9, rtol=0)
    once = {"max_iterations": 1, "tolerance": 0.0, "return_state": True}
    again = model(ids[:, -1:], state=state, warm_start=True, **once)
    cold = model(ids[:, -1:], state=state, **once)
    assert (again.logits - cold.logits).abs().max() > 1e-6
    # The first token of another document begins at the spec's z_init.
    documents = torch.zeros_like(ids)
    of_first = model(ids, documents=documents, return_state=True).state
    new = documents[:, :1] + 1
    fresh = model(ids[:, -1:], state=of_first, documents=new, warm_start=True, **once)
    plain = model(ids[:, -1:], state=of_first, documents=new, **once)
    assert torch.equal(fresh.logits, plain.logits)
    # A row with padding only has no warm start; the others keep the value of their last real token.
    mask = torch.ones_like(ids)
    mask[0] = 0
    mask[1, 6:] = 0
    half = model(ids, attention_mask=mask, return_state=True).state
    assert half.last_BD[0].eq(0).all()
    torch.testing.assert_close(half.last_BD[1], z[1, 5], atol=1e-9, rtol=0)
    found = model(ids[:, :1], state=half, warm_start=True, **once).logits[0]
    torch.testing.assert_close(found, model(ids[:1, :1], **once).logits[0], atol=1e-12, rtol=0)


def test_the_moving_average_and_its_residual_match_the_formula():
    generator = torch.Generator().manual_seed(0)
    A = 0.1 * torch.randn(6, 6, generator=generator, dtype=torch.float64)
    b = torch.randn(4, 6, generator=generator, dtype=torch.float64)

    def f(z):
        return z @ A + b

    alpha, steps = 0.3, 7
    search = ib.Search(
        solver=ib.Picard(damping=0.6),
        stopping=ib.Stopping(tolerance=0.0, max_iterations=steps),
        moving_average=alpha,
        trace=True,
    )
    found = search(f, torch.zeros(4, 6, dtype=torch.float64))
    z = point = m = torch.zeros(4, 6, dtype=torch.float64)
    residuals, averages = [], []
    for step in range(steps):
        m = f(z) if step == 0 else (1 - alpha) * m + alpha * f(z)
        point = z if step == 0 else (1 - alpha) * point + alpha * z
        residuals.append((m - point).norm(dim=1) / (m.norm(dim=1) + 1e-9))
        averages.append(m)
        z = 0.4 * z + 0.6 * f(z)
    torch.testing.assert_close(found.trace, torch.stack(residuals))
    best = torch.stack(residuals).argmin(0)
    torch.testing.assert_close(found.z, torch.stack(averages)[best, torch.arange(4)])


def test_a_moving_average_reduces_the_error_of_a_noisy_map():
    def noisy(z):
        return 0.3 * z + 1.0 + 0.05 * torch.randn(z.shape, generator=generator, dtype=z.dtype)

    error = {}
    for alpha in (None, 0.05):
        generator = torch.Generator().manual_seed(2)
        stopping = ib.Stopping(tolerance=0.0, max_iterations=200)
        search = ib.Search(solver=ib.Picard(), stopping=stopping, moving_average=alpha)
        z = search(noisy, torch.zeros(8, 500, dtype=torch.float64)).z
        error[alpha] = ((z - 1 / 0.7).norm() / (0 * z + 1 / 0.7).norm()).item()
    assert error[0.05] < 0.3 * error[None]


@torch.no_grad()
def test_row_compaction_does_not_change_a_moving_average(model, ids):
    from implicit_blocks.search.search import Search

    state = model.initial_state(3)
    f, start = model.bind(
        model.embedding(ids),
        state,
        weights=model.cache_weights(),
        warm_start=False,
        valid_BL=None,
        documents_BL=None,
    )
    start = start.clone()
    start[1] = model.encode(model.embedding(ids[1:2])).hidden_BLD[0]  # converged at the start
    start[2] = start[1]
    options = {
        "solver": ib.Picard(damping=0.8),
        "stopping": ib.Stopping(tolerance=1e-6, max_iterations=200, scope="prefix"),
        "moving_average": 0.6,
    }
    compacted, whole = (Search(**options, compact=compact)(f, start) for compact in (True, False))
    assert torch.equal(compacted.token_iterations, whole.token_iterations)
    torch.testing.assert_close(compacted.z, whole.z, atol=1e-12, rtol=0)


def test_search_options_out_of_range_are_refused(model, ids):
    for alpha in (0.0, 1.5, -1.0):
        with pytest.raises(ValueError, match=r"moving_average is .*\(0, 1\]"):
            model(ids, moving_average=alpha)
    invalid = {"tolerance": -1, "max_iterations": 0, "damping": 2.0}
    for name, value in invalid.items():
        with pytest.raises(ValueError, match=f"{name}.*{value}"):
            model(ids, **{name: value})
    assert SearchOptions.names() == (
        "tolerance",
        "max_iterations",
        "damping",
        "warm_start",
        "moving_average",
        "loops",
        "start",
        "trajectory",
        "exit",
    )


@pytest.mark.parametrize(
    "option", [{"damping": 0.7}, {"max_iterations": 5}, {"moving_average": 0.7}], ids=str
)
@torch.no_grad()
def test_a_fixed_number_of_loops_refuses_options_of_a_search(model, ids, option):
    name, value = next(iter(option.items()))
    refusal = f"{name} is {value}, but a fixed number of loops is no search"
    fixed = {"loops": 3}, {"exit": ib.FixedExitSpec(loops=3)}
    for loops in fixed:
        with pytest.raises(ValueError, match=refusal):
            model(ids, **loops, **option)
        with pytest.raises(ValueError, match=refusal):
            ib.generate(model, ids, max_new_tokens=2, **loops, **option)
        with pytest.raises(ValueError, match=refusal):
            ib.decoding.ContinuousDecoder(model, max_batch_size=1, max_seq_len=20, **loops, **option)
    with pytest.raises(ValueError, match=refusal):
        model.train()(ids, loops=3, **option)


def reconfigured(model, **changes):
    model.reconfigure(model.spec.model_copy(update=changes))
    return model.train()


@pytest.mark.parametrize("gradient", [ib.LastLoopsSpec(), ib.PhantomSpec()], ids=["last_loops", "phantom"])
@pytest.mark.parametrize(
    "option", [{"damping": 0.7}, {"max_iterations": 5}, {"moving_average": 0.7}], ids=str
)
def test_a_depth_of_training_refuses_options_of_a_search(model, ids, option, gradient):
    model = reconfigured(model, depth=ib.FixedDepthSpec(loops=3), gradient=gradient)
    for enabled in (False, True):
        with torch.set_grad_enabled(enabled):
            assert model(ids).solution.iterations.tolist() == [3, 3, 3]
            with pytest.raises(ValueError, match=r"loops is no search|has no effect in training"):
                model(ids, **option)


@pytest.mark.parametrize(
    ("gradient", "option"),
    [(ib.LastLoopsSpec(), {"damping": 0.7}), (ib.UnrolledSpec(steps=3), {"max_iterations": 5})],
    ids=["last_loops", "unrolled"],
)
def test_training_without_a_search_refuses_options_of_a_search(model, ids, gradient, option):
    model = reconfigured(model, gradient=gradient)
    for refused in (option, {"moving_average": 0.7}, {"exit": ib.FixedExitSpec(loops=1)}):
        with pytest.raises(ValueError, match="has no effect in training with gradient"):
            model(ids, **refused)


def test_a_call_with_loops_does_not_drop_the_penalty_of_the_jacobian(model, ids):
    model = reconfigured(model, gradient=ib.JacobianPenaltySpec())
    with pytest.raises(ValueError, match=r"loops is 3, which drops the penalty .*'jacobian_penalty'.*depth"):
        model(ids, loops=3)
    with torch.no_grad():
        assert model(ids, loops=3).solution.iterations.tolist() == [3] * 3
    model = reconfigured(model, depth=ib.FixedDepthSpec(loops=3))
    found = model(ids).solution
    assert found.iterations.tolist() == [3] * 3
    assert (found.penalty > 0).all()


def test_the_unrolled_gradient_takes_the_damping_of_the_call(model, ids):
    model = reconfigured(model, gradient=ib.UnrolledSpec(steps=3))
    found = model(ids, damping=0.5)
    model = reconfigured(model, solver=ib.PicardSpec(damping=0.5))
    torch.testing.assert_close(found.logits, model(ids).logits)


def test_the_unrolled_gradient_refuses_iterates(model, ids):
    model = reconfigured(model, gradient=ib.UnrolledSpec(steps=3))
    with pytest.raises(ValueError, match=r"trajectory is \(1, 2\), but the unrolled gradient .*last_loops"):
        model(ids, trajectory=(1, 2))
    with torch.no_grad():
        assert sorted(model(ids, trajectory=(1, 2)).trajectory) == [1, 2]


def test_last_loops_takes_the_same_loops_without_gradients(model, ids):
    model = reconfigured(
        model, gradient=ib.LastLoopsSpec(), stopping=ib.Stopping(max_iterations=4, tolerance=1)
    )
    expected = model(ids)
    for options in ({}, {"return_state": True}, {"window_length": LENGTH}):
        with torch.no_grad():
            found = model(ids, **options)
            assert model(ids, max_iterations=6).solution.iterations.tolist() == [6] * 3
            with pytest.raises(ValueError, match=r"damping is 0\.7, which has no effect in training"):
                model(ids, damping=0.7)
        assert found.solution.iterations.tolist() == [4] * 3
        torch.testing.assert_close(found.logits, expected.logits)


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("gradient", [ib.PhantomSpec(), ib.OneStepAdjointSpec()], ids=["phantom", "adjoint"])
def test_a_depth_reports_what_has_converged_by_the_tolerance(model, ids, gradient, scope):
    stopping, depth = ib.Stopping(tolerance=0.0, scope=scope), ib.FixedDepthSpec(loops=6)
    model = reconfigured(model, gradient=gradient, stopping=stopping, depth=depth)
    expected = model(ids).solution
    middle = expected.residual.median().item()
    for tolerance in (0.0, middle, 1.0):
        found = model(ids, tolerance=tolerance).solution
        assert found.iterations.tolist() == [6] * 3
        torch.testing.assert_close(found.z, expected.z)
        assert torch.equal(found.converged, expected.residual <= tolerance)
        if scope == "prefix":
            assert torch.equal(found.token_converged, expected.token_residual.cummax(1).values <= tolerance)
        again = reconfigured(model, stopping=stopping.model_copy(update={"tolerance": tolerance}))
        assert torch.equal(again(ids).solution.converged, found.converged)
    assert 0 < (expected.residual <= middle).sum() < 3


def test_nothing_converges_at_or_after_a_token_that_diverged():
    search = ib.Search(solver=ib.Picard(), stopping=ib.Stopping(scope="prefix"))
    z = torch.ones(2, 3, 4)
    fz = z.clone()
    fz[0, 1] = torch.nan
    found = search.report(z, fz, iterations=1).with_tolerance(0.1)
    assert found.token_converged.tolist() == [[True, False, False], [True] * 3]
    assert found.converged.tolist() == [False, True]


@pytest.mark.parametrize("exit", [ib.KLExitSpec(), ib.SecondDifferenceExitSpec()], ids=["kl", "difference"])
@torch.no_grad()
def test_exit_criteria_with_a_threshold_refuse_a_tolerance(model, ids, exit):
    refusal = f"tolerance is 0.01, but exit criterion '{exit.kind}' has a threshold of its own"
    calls = (
        lambda **options: model(ids, **options),
        lambda **options: ib.generate(model, ids, max_new_tokens=2, **options),
        lambda **options: ib.decoding.ContinuousDecoder(model, max_batch_size=1, max_seq_len=9, **options),
    )
    for call in calls:
        with pytest.raises(ValueError, match=refusal):
            call(exit=exit, tolerance=0.01)
        call(exit=ib.ResidualExitSpec(), tolerance=0.01)
    model = reconfigured(model, at_evaluation=ib.AtEvaluation(exit=exit)).eval()
    model(ids)
    with pytest.raises(ValueError, match=refusal):
        model(ids, tolerance=0.01)


TRACED = {
    "all loops": ib.LastLoopsSpec(),
    "last loop": ib.LastLoopsSpec(loops=1),
    "unrolled": ib.UnrolledSpec(steps=4),
    "checkpointing": ib.UnrolledSpec(steps=4, checkpointing=True),
}


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("gradient", TRACED.values(), ids=TRACED)
def test_training_traces_the_steps_of_gradients_without_a_search(model, ids, gradient, scope):
    stopping = ib.Stopping(max_iterations=4, scope=scope)
    model = reconfigured(model, gradient=gradient, stopping=stopping)
    expected = model(ids, loops=4).solution
    with torch.no_grad():
        trace = model(ids, loops=4, trace=True).solution.trace
    found = model(ids, trace=True).solution
    assert expected.trace is None
    assert trace.shape == (4, *ids.shape[: 2 if scope == "prefix" else 1])
    torch.testing.assert_close(found.trace, trace)
    torch.testing.assert_close(found.z, expected.z)
    if isinstance(gradient, ib.LastLoopsSpec):  # the caller takes the last loop
        kept = model(ids, loops=4, trace=True, return_state=True).solution
        torch.testing.assert_close(kept.trace, trace)


def test_a_trace_is_nan_where_a_sequence_takes_fewer_loops(model, ids):
    model = reconfigured(model, gradient=ib.LastLoopsSpec(loops=2))
    counts = ib.LoopCounts(torch.tensor([2, 3, 4]))
    trace = model(ids, loops=counts, trace=True).solution.trace
    assert trace.isnan().int().sum(0).tolist() == [2, 1, 0]  # of 4 calls


@torch.no_grad()
def test_the_trace_of_a_single_loop_that_commits_has_its_residual(model, ids):
    expected = model(ids, loops=1, trace=True).solution.trace
    found = model(ids, loops=1, trace=True, return_state=True).solution.trace
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("loops", [1, 2, 5])
@torch.no_grad()
def test_a_window_that_commits_reports_the_last_of_its_loops(model, ids, loops):
    expected = model(ids, loops=loops, tolerance=0.01).solution
    found = ib.generate(model, ids, max_new_tokens=1, loops=loops, tolerance=0.01)
    torch.testing.assert_close(found.residual[:, 0], expected.token_residual[:, -1], rtol=1e-6, atol=1e-12)
    assert (found.iterations == loops).all()
    assert torch.equal(found.converged[:, 0], expected.token_converged[:, -1])
    windows = model(ids, loops=loops, window_length=LENGTH - 1).solution
    first = model(ids[:, :-1], loops=loops).solution
    torch.testing.assert_close(windows.token_residual[:, :-1], first.token_residual, rtol=1e-6, atol=1e-12)


TYPING_ONLY = {"Tensor": torch.Tensor, "LoopCounts": type("LoopCounts", (), {})}
NOT_IN_TRANSFORMERS = {"loops", "start", "trajectory", "exit"}


def test_search_kwargs_are_the_fields_of_search_options():
    hints = (get_type_hints(kind, localns=TYPING_ONLY) for kind in (SearchKwargs, SearchOptions))
    assert next(hints) == next(hints)


def test_every_public_call_that_searches_accepts_search_kwargs():
    calls = [
        *(kind.forward for kind in (ib.ImplicitLM, ib.ExplicitLM)),
        *(ib.generate, ib.score, ib.decoding.ContinuousDecoder.__init__),
    ]
    for call in calls:
        parameters = inspect.signature(call).parameters
        assert parameters["search"].annotation == "Unpack[SearchKwargs]", call.__qualname__
        assert "window_length" in parameters
    assert {*SearchOptions.names(), "window_length"} < {
        *get_type_hints(generation.Options, localns=TYPING_ONLY)
    }  # stream's


def test_transformers_classes_name_the_search_options():
    """Transformers validates the keyword arguments of ``generate`` by the parameters of ``forward``."""
    modeling = pytest.importorskip("implicit_blocks.hf.modeling", reason="transformers is not installed")
    options = [field for field in dataclasses.fields(SearchOptions) if field.name not in NOT_IN_TRANSFORMERS]
    fields = {field.name: (field.default, field.type) for field in options}
    for kind in (modeling.ImplicitMamba2Model, modeling.ImplicitMamba2ForCausalLM):
        parameters = inspect.signature(kind.forward).parameters
        found = {name: (p.default, p.annotation) for name, p in parameters.items() if name in fields}
        assert list(found.items()) == list(fields.items()), kind.__qualname__
        assert "window_length" in parameters


def test_explicit_models_ignore_search_options(ids):
    spec = ib.ExplicitLMSpec(vocab_size=19, d_model=16, n_layers=2, **MIXERS["mamba2"])
    twin = ib.build(spec).eval()
    with torch.no_grad():
        expected = twin(ids, window_length=1).logits
        found = twin(ids, window_length=1, warm_start=True, moving_average=0.5, tolerance=1.0).logits
    assert torch.equal(found, expected)

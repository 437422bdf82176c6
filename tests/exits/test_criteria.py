"""Exit criteria in a search: what each measures, when tokens leave, and what is reported."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.exits import exit_distribution, first_exit
from implicit_blocks.search.windowed import WindowedSearch
from implicit_blocks.testing.exits import ROWS, TOKENS, CausalMap, small_readout

READOUT = small_readout()
CRITERIA = {
    "second_difference": ib.SecondDifferenceExit(tolerance=1e-3),
    "kl": ib.KLExit(tolerance=1e-4).bind(READOUT),
    "argmax_stability": ib.ArgmaxStabilityExit(calls=3).bind(READOUT),
    "gate": ib.GateExit(threshold=0.9).bind(READOUT),
}


def search(criterion=None, *, scope="prefix", solver=None, max_iterations=60, tolerance=1e-5, **options):
    stopping = ib.Stopping(tolerance=tolerance, max_iterations=max_iterations, scope=scope)
    return ib.Search(solver=solver or ib.Picard(), stopping=stopping, exit=criterion, **options)


@pytest.fixture
def f():
    return CausalMap.random()


def start(f):
    return torch.zeros_like(f.offset)


def path(f, calls):
    """Return the start and the points after each call, without a search."""
    points = [start(f)]
    for _ in range(calls):
        points.append(f(points[-1]))
    return points


# ------------------------------------------------------------------------------------ the measures


def second_differences(points):
    found = [None]
    for before, z, fz in zip(points, points[1:], points[2:], strict=False):
        found.append(((fz - z) - (z - before)).norm(dim=-1) / fz.norm(dim=-1))
    return [value is not None and value <= 1e-3 for value in found]


def divergences(points):
    logits = [READOUT.predict(z).log_softmax(-1) for z in points[1:]]
    found = [False]
    for before, now in pairwise(logits):
        found.append(
            torch.nn.functional.kl_div(now, before, log_target=True, reduction="none").sum(-1) <= 1e-4
        )
    return found


def unchanged(points):
    tokens = [READOUT.predict(z).argmax(-1) for z in points[1:]]
    return [
        number >= 3 and torch.stack([tokens[number] == tokens[number - back] for back in (1, 2, 3)]).all(0)
        for number in range(len(tokens))
    ]


def exits_of_gate(points):
    logits = torch.stack([READOUT.gate(z) for z in points[1:]])
    distribution = exit_distribution(torch.cat((logits, logits[:1])))  # the last loop is never reached
    first = first_exit(distribution, 0.9)
    return [first <= number for number in range(len(logits))]


REFERENCES = {
    "second_difference": second_differences,
    "kl": divergences,
    "argmax_stability": unchanged,
    "gate": exits_of_gate,
}


@pytest.mark.parametrize("kind", CRITERIA)
def test_a_single_token_leaves_at_the_first_call_that_meets_the_criterion(kind, f):
    f = f.first(1)
    points = path(f, 40)
    solution = search(CRITERIA[kind])(f, start(f))
    held = [torch.as_tensor(met).expand(ROWS, 1) for met in REFERENCES[kind](points)]
    first = torch.stack(held).to(torch.uint8).argmax(0) + 1
    assert torch.stack(held).any(0).all()
    assert torch.equal(solution.token_iterations, first)
    expected = torch.stack(points)[first[:, 0], torch.arange(ROWS)]
    torch.testing.assert_close(solution.z, expected, atol=1e-12, rtol=0)
    assert solution.converged.all()


@pytest.mark.parametrize("kind", CRITERIA)
def test_a_token_waits_for_those_before_it(kind, f):
    solution = search(CRITERIA[kind])(f, start(f))
    iterations = solution.token_iterations
    assert (iterations.diff(dim=1) >= 0).all()
    assert iterations.unique().numel() > 1
    assert solution.token_converged.all()


@pytest.mark.parametrize("kind", CRITERIA)
def test_the_reported_residual_is_that_of_the_returned_value(kind, f):
    solution = search(CRITERIA[kind], trace=True)(f, start(f))
    last = solution.trace.gather(0, solution.token_iterations[None] - 1)[0]
    assert torch.equal(solution.token_residual, last)
    assert (solution.token_residual > 1e-9).any()


# ------------------------------------------------------------------------------------ residual and fixed


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("solver", [ib.Picard(), ib.Picard(damping=0.7), ib.Anderson(memory=2)], ids=repr)
def test_the_residual_as_a_criterion_equals_no_criterion_bit_for_bit(solver, scope, f):
    plain, named = (search(e, solver=solver, scope=scope)(f, start(f)) for e in (None, ib.ResidualExit()))
    assert torch.equal(plain.z, named.z)
    assert torch.equal(plain.iterations, named.iterations)
    assert torch.equal(plain.residual, named.residual)


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@pytest.mark.parametrize("loops", [1, 2, 9])
def test_a_fixed_criterion_takes_exactly_its_calls_and_returns_the_last_value(loops, scope, f):
    calls = []

    def counted(z):
        calls.append(len(z))
        return f(z)

    solution = search(ib.FixedExit(loops=loops), scope=scope, max_iterations=9)(counted, start(f))
    points = path(f, loops)
    assert len(calls) == loops
    assert torch.equal(solution.z, points[-1])
    assert solution.iterations.tolist() == [loops] * ROWS
    assert solution.converged.all()
    step, value = points[-1] - points[-2], points[-1]
    if scope == "prefix":
        torch.testing.assert_close(solution.token_residual, step.norm(dim=-1) / value.norm(dim=-1))
    else:
        torch.testing.assert_close(
            solution.residual, step.flatten(1).norm(dim=1) / value.flatten(1).norm(dim=1)
        )


def test_a_fixed_criterion_returns_the_last_value_of_a_map_whose_residual_grows():
    z0 = torch.ones(2, 3, 4, dtype=torch.float64)
    grown = search(ib.FixedExit(loops=5))(lambda z: -2.0 * z, z0)
    assert torch.equal(grown.z, -32.0 * z0)
    assert grown.converged.all()


# ------------------------------------------------------------------------------------ without an exit


def test_a_criterion_that_is_not_met_returns_the_last_of_equal_measures(f):
    """No call leaves the most likely of two alternating words unchanged."""
    f = f.first(2)

    def alternating(z):
        return torch.where(z > 0, -1.0, 1.0) * torch.arange(1, 9, dtype=z.dtype)

    criterion = ib.ArgmaxStabilityExit(calls=1).bind(READOUT)
    solution = search(criterion, max_iterations=6)(alternating, start(f))
    assert torch.equal(solution.z, path_of(alternating, start(f), 6))
    assert not solution.converged.any()
    assert not solution.diverged.any()


def path_of(function, z, calls):
    for _ in range(calls):
        z = function(z)
    return z


@pytest.mark.parametrize("kind", [*CRITERIA, "fixed"])
def test_a_token_that_diverges_leaves_with_its_best_value(kind, f):
    """Token 2 of row 0 is NaN from the third call on; the tokens before it are not affected."""
    criterion = ib.FixedExit(loops=5) if kind == "fixed" else CRITERIA[kind]
    calls = []

    def breaks(z):
        calls.append(1)
        fz = f(z).clone()
        if len(calls) > 2:
            fz[0, 2] = torch.nan
        return fz

    found = search(criterion, compact=False)(breaks, start(f))
    clean = search(criterion, compact=False)(f, start(f))
    assert found.token_diverged[0, 2]
    assert not found.token_converged[0, 2:].any()
    assert not found.token_diverged[1:].any()
    assert found.z.isfinite().all()
    assert torch.equal(found.z[0, 2], path(f, 2)[-1][0, 2])
    assert torch.equal(found.z[1:], clean.z[1:])
    assert torch.equal(found.z[0, :2], clean.z[0, :2])


@pytest.mark.parametrize("kind", CRITERIA)
def test_padding_keeps_its_start_and_does_not_hold_later_tokens_back(kind, f):
    valid = torch.ones(ROWS, TOKENS, dtype=torch.bool)
    valid[:, 0] = False
    valid[1, -1] = False
    solution = search(CRITERIA[kind], valid=valid)(f, start(f))
    assert torch.equal(solution.z[~valid], start(f)[~valid])
    assert solution.converged.all()
    rest = search(CRITERIA[kind])(f.after(start(f)[:, :1]), start(f)[:, 1:])
    torch.testing.assert_close(solution.z[valid], rest.z[valid[:, 1:]], atol=1e-12, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", CRITERIA)
def test_a_criterion_measures_points_of_lower_precision(kind, dtype, f):
    low = CausalMap(*(part.to(dtype) for part in (f.weight, f.rate, f.offset, f.before)))
    rough = ib.SecondDifferenceExit(tolerance=0.02)
    solution = search(rough if kind == "second_difference" else CRITERIA[kind])(low, start(low))
    assert solution.z.dtype == dtype
    assert solution.token_converged.float().mean() > 0.5


# ------------------------------------------------------------------------------------ further policies


def test_each_window_takes_a_fixed_number_of_calls(f):
    windows = WindowedSearch(search(ib.FixedExit(loops=3)), 2)
    solution = windows(f, start(f))
    assert solution.token_iterations.tolist() == [[3] * TOKENS] * ROWS
    first = f.first(2)
    assert torch.equal(solution.z[:, :2], path(first, 3)[-1])


class Recorded:
    """Predictions that know their rows and tokens, as a coda's do."""

    def __init__(self, log, rows=ROWS, tokens=TOKENS):
        self.log, self.rows, self.tokens = log, rows, tokens

    def __call__(self, points):
        assert len(points) == self.rows * self.tokens
        return READOUT.predict(points)

    def select_rows(self, rows):
        self.log.append("select_rows")
        return Recorded(self.log, len(rows), self.tokens)

    def first(self, tokens):
        self.log.append("first")
        return Recorded(self.log, self.rows, tokens)

    def after(self, z):
        self.log.append("after")
        assert z.ndim == 3
        return Recorded(self.log, self.rows, self.tokens - z.shape[1])


@pytest.mark.parametrize("kind", ["kl", "argmax_stability"])
def test_predictions_that_know_their_rows_and_tokens_leave_with_them(kind, f):
    log = []
    criterion = CRITERIA[kind].bind(ib.Readout(Recorded(log)))
    expected = search(CRITERIA[kind])(f, start(f))
    found = search(criterion, commit_prefix=1)(f, start(f))
    assert "select_rows" in log
    assert "after" in log or kind != "kl"
    torch.testing.assert_close(found.z, expected.z, atol=1e-12, rtol=0)
    log.clear()
    WindowedSearch(search(criterion), 4)(f, start(f))
    assert {"first", "after"} <= set(log)


def test_predictions_of_many_points_are_read_in_parts(monkeypatch, f):
    from implicit_blocks.exits import predictions

    whole = search(CRITERIA["kl"])(f, start(f))
    sizes = []

    def predict(points):
        sizes.append(len(points))
        return READOUT.predict(points)

    monkeypatch.setattr(predictions, "PART", 5)
    found = search(CRITERIA["kl"].bind(ib.Readout(predict)))(f, start(f))
    assert max(sizes) == 5
    assert torch.equal(found.z, whole.z)


def test_a_word_of_probability_0_does_not_make_the_divergence_nan(f):
    def predict(points):
        logits = READOUT.predict(points)
        logits[:, 0] = -torch.inf
        return logits

    solution = search(ib.KLExit().bind(ib.Readout(predict)))(f, start(f))
    assert solution.converged.all()


# ------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize("kind", CRITERIA)
def test_a_criterion_per_token_refuses_scope_sequence(kind, f):
    with pytest.raises(ValueError, match=r"scope.*'sequence'.*'prefix'"):
        search(CRITERIA[kind], scope="sequence")(f, start(f))


def test_a_criterion_that_reads_the_model_refuses_a_search_without_it(f):
    for criterion in (ib.KLExit(), ib.ArgmaxStabilityExit()):
        with pytest.raises(ValueError, match=r"reads predictions.*predict="):
            search(criterion)(f, start(f))
    for criterion in (ib.GateExit(), ib.GateExit().bind(ib.Readout(READOUT.predict))):
        with pytest.raises(ValueError, match=r"reads an exit gate.*exit_gate"):
            search(criterion)(f, start(f))


def test_more_fixed_calls_than_iterations_are_refused(f):
    with pytest.raises(ValueError, match=r"takes 9 calls.*max_iterations is 8.*at least 9"):
        search(ib.FixedExit(loops=9), max_iterations=8)(f, start(f))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ib.FixedExit(loops=0), "loops .*0.*at least 1"),
        (lambda: ib.ArgmaxStabilityExit(calls=0), "calls .*0.*at least 1"),
        (lambda: ib.GateExit(threshold=1.5), r"threshold .*1.5.*\(0, 1\]"),
        (lambda: ib.KLExit(tolerance=0.0), "tolerance .*0.0.*above 0"),
        (lambda: ib.SecondDifferenceExit(tolerance=-1.0), "tolerance .*-1.0.*above 0"),
        (lambda: ib.SecondDifferenceExit(tolerance=float("nan")), "tolerance .*nan"),
        (lambda: ib.GateExitSpec(threshold=0.0), "threshold.*0"),
        (lambda: ib.FixedExitSpec(loops=0), "loops.*0"),
        (lambda: ib.KLExitSpec(tolerance=-1.0), "tolerance.*-1"),
    ],
)
def test_an_argument_out_of_range_is_refused_with_its_value(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_criterion_s_defaults_equal_its_spec_s_defaults():
    for kind in ("residual", "second_difference", "kl", "argmax_stability", "gate"):
        of_spec = ib.build(ib.registry.entry("exit", kind).spec())
        assert repr(type(of_spec)()) == repr(of_spec)

"""Windowed search and prefix commit: the same points for fewer calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import implicit_blocks as ib
from implicit_blocks.search.windowed import WindowedSearch

MIXERS = {
    "mamba2": {"mixer": ib.Mamba2Spec(d_state=8, head_dim=8, chunk_size=4)},
    "attention": {"mixer": ib.AttentionSpec(n_heads=4, n_kv_heads=2), "mlp": ib.SwiGLUSpec(d_ff=24)},
}
LENGTH = 10


def made(mixer: str, **changes) -> ib.ImplicitLM:
    """Return a model in float64 that converges fast."""
    stopping = ib.StoppingOverrides(tolerance=1e-10, max_iterations=300)
    at_evaluation = ib.AtEvaluation(solver=ib.PicardSpec(damping=0.9), stopping=stopping)
    spec = ib.ImplicitLMSpec(
        vocab_size=19, d_model=16, n_layers=1, at_evaluation=at_evaluation, **MIXERS[mixer], **changes
    )
    torch.manual_seed(0)
    model = ib.ImplicitLM(spec)
    with torch.no_grad():
        for block in model.backbone.blocks():
            block.mixer.in_proj.parametrizations.weight.original0.mul_(0.15)
            block.mixer.out_proj.parametrizations.weight.original0.mul_(40.0)
    return model.double().eval()


def at_evaluation(model: ib.ImplicitLM, **changes) -> None:
    spec = model.spec.at_evaluation.model_copy(update=changes)
    model.reconfigure(model.spec.model_copy(update={"at_evaluation": spec}))


@pytest.fixture(params=list(MIXERS))
def model(request):
    return made(request.param)


@pytest.fixture
def ids():
    return torch.randint(19, (3, LENGTH), generator=torch.Generator().manual_seed(5))


def contexts(ids):
    """Return contexts without padding, with padding before and after the tokens, and with documents."""
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    mask[1, 7:] = 0
    documents = (torch.arange(LENGTH) // 4).expand_as(ids)
    return {"plain": {}, "padding": {"attention_mask": mask}, "documents": {"documents": documents}}


def bound(model, ids, **context):
    """Return the map of a window and where its search begins."""
    mask = context.get("attention_mask")
    return model.bind(
        model.embedding(ids),
        model.initial_state(len(ids)),
        weights=model.cache_weights(),
        valid_BL=None if mask is None else mask.bool(),
        documents_BL=context.get("documents"),
    )


@pytest.mark.parametrize("context", ["plain", "padding", "documents"])
@torch.no_grad()
def test_windows_and_prefix_commit_find_the_point_of_the_whole_sequence(model, ids, context):
    context = contexts(ids)[context]
    real = context.get("attention_mask", torch.ones_like(ids)).bool()
    expected = model(ids, **context)
    for changes in ({"window_length": 3}, {"window_length": 5, "commit_prefix": 2}, {"commit_prefix": 2}):
        at_evaluation(model, **{"window_length": None, "commit_prefix": None} | changes)
        found = model(ids, **context)
        assert found.solution.converged.all()
        torch.testing.assert_close(found.logits[real], expected.logits[real], atol=1e-8, rtol=0)
        assert found.solution.token_iterations.shape == ids.shape


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
def test_windows_have_the_gradient_of_the_whole_sequence(model, ids, scope):
    gradients = {}
    for window_length in (None, 4):
        stopping = ib.Stopping(tolerance=1e-10, max_iterations=300, scope=scope)
        model.reconfigure(
            model.spec.model_copy(update={"stopping": stopping, "window_length": window_length})
        )
        model.train().zero_grad()
        output = model(ids, labels=ids)
        assert output.solution.converged.all()
        assert output.solution.iterations.shape == (3,)
        output.loss.backward()
        gradients[window_length] = torch.cat([p.grad.flatten() for p in model.parameters()])
    torch.testing.assert_close(gradients[4], gradients[None], atol=1e-9, rtol=1e-7)


@pytest.mark.parametrize(
    "gradient",
    [
        ib.PhantomSpec(steps=2),
        ib.ImplicitFunctionSpec(stopping=ib.Stopping(tolerance=1e-10, max_iterations=200)),
        ib.JacobianPenaltySpec(weight=0.1),
        ib.UnrolledSpec(steps=3),
        ib.OneStepAdjointSpec(),
    ],
    ids=lambda spec: spec.kind,
)
def test_gradients_with_windows_are_those_without(gradient, ids):
    spec = {"gradient": gradient, "stopping": ib.Stopping(tolerance=1e-9, max_iterations=300)}
    gradients = []
    for window_length in (None, 5):
        model = made("mamba2", window_length=window_length, **spec).train()
        torch.manual_seed(1)
        output = model(ids, labels=ids)
        penalty = output.solution.penalty
        (output.loss if penalty is None else output.loss + penalty.mean()).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(*gradients, atol=1e-7, rtol=1e-5)


def test_dropout_uses_one_mask_for_all_windows(ids):
    stopping = ib.Stopping(tolerance=1e-10, max_iterations=300)
    outputs = []
    for window_length in (None, 4):
        model = made("attention", dropout=0.2, stopping=stopping, window_length=window_length).train()
        torch.manual_seed(3)
        outputs.append(model(ids).logits)
    torch.testing.assert_close(*outputs, atol=1e-8, rtol=0)


@torch.no_grad()
def test_each_window_has_max_iterations_and_one_call_for_its_commit(model, ids):
    """The last window needs no commit."""
    calls = []
    f, start = bound(model, ids)
    compute, commit = type(f).compute, type(f).commit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            type(f), "compute", lambda self, z, *steps: calls.append(z.shape[1]) or compute(self, z)
        )
        patch.setattr(type(f), "commit", lambda self, z: calls.append(-z.shape[1]) or commit(self, z))
        stopping = ib.Stopping(tolerance=0.0, max_iterations=3, scope="prefix")
        search = WindowedSearch(ib.Search(solver=ib.Picard(), stopping=stopping), 6)
        solution = search(f, start)
    assert calls == [6, 6, 6, -6, 4, 4, 4]
    assert (solution.token_iterations == 3).all()
    assert solution.z.shape == start.shape


def test_windows_refuse_a_map_that_cannot_be_cut():
    search = WindowedSearch(ib.Search(solver=ib.Picard(), stopping=ib.Stopping()), 2)
    with pytest.raises(ValueError, match="methods first and after"):
        search(lambda z: 0.5 * z, torch.ones(1, 4, 2))


# ---------------------------------------------------------------------------------------- prefix commit

SOLVERS = [ib.Picard(), ib.Picard(damping=0.7), ib.Anderson(memory=2), ib.Broyden(memory=3)]


def prefix_search(solver, **options) -> ib.Search:
    stopping = ib.Stopping(tolerance=1e-7, max_iterations=300, scope="prefix")
    return ib.Search(solver=solver, stopping=stopping, trace=True, **options)


def slow_to_the_right(model, ids, **context):
    """Return a map whose tokens converge one after the other, and a start."""
    f, start = bound(model, ids, **context)
    generator = torch.Generator().manual_seed(1)
    return f, start + torch.randn(start.shape, generator=generator, dtype=start.dtype)


@pytest.mark.parametrize("solver", SOLVERS, ids=["picard", "damped", "anderson", "broyden"])
@pytest.mark.parametrize("context", ["padding"])
@torch.no_grad()
def test_committed_tokens_are_bitwise_constant_and_the_others_agree(model, ids, solver, context, monkeypatch):
    f, start = slow_to_the_right(model, ids, **contexts(ids)[context])
    valid = f.window.valid_BL
    committed = []
    after = type(f).after
    monkeypatch.setattr(type(f), "after", lambda self, z: committed.append(z.clone()) or after(self, z))
    plain = prefix_search(solver, valid=valid, compact=False)(f, start)
    assert not committed
    found = prefix_search(solver, valid=valid, compact=False, commit_prefix=2)(f, start)
    assert committed
    assert all(z.shape[1] % 2 == 0 for z in committed)
    prefix = torch.cat(committed, dim=1)
    assert torch.equal(found.z[:, : prefix.shape[1]], prefix)  # bitwise
    assert torch.equal(found.z[:, : committed[0].shape[1]], plain.z[:, : committed[0].shape[1]])
    torch.testing.assert_close(found.z, plain.z, atol=1e-5, rtol=0)
    # The solver keeps the state of the right tokens.
    assert torch.equal(found.token_iterations, plain.token_iterations)
    assert torch.equal(found.token_converged, plain.token_converged)
    assert found.converged.all()
    assert found.trace.shape[1:] == ids.shape
    assert torch.equal((~found.trace.isnan()).sum(0), found.token_iterations)


@torch.no_grad()
def test_rows_and_prefixes_can_leave_in_any_order(model, ids):
    f, start = slow_to_the_right(model, ids)
    start[1] = prefix_search(ib.Picard())(f, start).z[1]  # converged from the start
    start[2] = start[1]
    options = {"commit_prefix": 2, "moving_average": 0.9}
    both, neither = prefix_search(ib.Picard(), **options), prefix_search(ib.Picard(), moving_average=0.9)
    found, expected = both(f, start), replace(neither, compact=False)(f, start)
    assert found.iterations[1] < found.iterations[0]
    torch.testing.assert_close(found.z, expected.z, atol=1e-9, rtol=0)
    assert torch.equal(found.token_iterations, expected.token_iterations)


@pytest.mark.parametrize("scope", ["sequence", "prefix"])
@torch.no_grad()
def test_compaction_in_float32_keeps_converged_rows_bitwise_and_the_others_agree(model, scope, monkeypatch):
    """Products of fewer rows may add their terms in another order."""
    model.float()
    ids = torch.randint(19, (8, LENGTH), generator=torch.Generator().manual_seed(5))
    f, start = bound(model, ids)
    stopping = ib.Stopping(tolerance=1e-5, max_iterations=300, scope=scope)
    search = ib.Search(solver=ib.Picard(damping=0.7), stopping=stopping)
    start[:5] = search(f, start).z[:5]  # converged from the start
    left = []
    select = type(f).select_rows
    monkeypatch.setattr(type(f), "select_rows", lambda self, rows: left.append(rows) or select(self, rows))
    found, expected = search(f, start), replace(search, compact=False)(f, start)
    assert left
    first = left[0].tolist()
    assert 0 < len(first) <= 4
    done = [row for row in range(8) if row not in first]
    assert torch.equal(found.z[done], expected.z[done])
    torch.testing.assert_close(found.z, expected.z, atol=1e-5, rtol=0)
    assert found.converged.all()


@torch.no_grad()
def test_prefix_commit_is_not_blocked_by_a_diverged_row(ids):
    model = made("mamba2")
    f, start = slow_to_the_right(model, ids)
    poisoned = f.u_BLU.clone()
    poisoned[1, 5] = torch.inf
    f = replace(f, u_BLU=poisoned)
    found = prefix_search(ib.Picard(), commit_prefix=2)(f, start)
    assert found.diverged.tolist() == [False, True, False]
    assert found.z.isfinite().all()
    alone = prefix_search(ib.Picard())(f.select_rows(torch.tensor([0, 2])), start[[0, 2]])
    torch.testing.assert_close(found.z[[0, 2]], alone.z, atol=1e-9, rtol=0)


class Chain:
    """A chain of rotations: token t converges after t iterations; it is NaN at ``poison``, (row, token)."""

    def __init__(self, work, before=None, *, poison=None):
        self.work, self.before, self.poison = work, before, poison

    def __call__(self, z):
        self.work.append(z.shape[1])
        first = torch.ones_like(z[:, :1]) if self.before is None else self.before
        fz = torch.cat((first, z[:, :-1]), dim=1).roll(1, 2) * 0.999 + 0.001
        if self.poison is not None and self.poison[1] >= 0:
            fz[self.poison[0], self.poison[1]] = torch.nan
        return fz

    def first(self, tokens):
        return self

    def after(self, z):
        poison = None if self.poison is None else (self.poison[0], self.poison[1] - z.shape[1])
        return Chain(self.work, z[:, -1:], poison=poison)


@torch.no_grad()
def test_divergence_is_known_after_any_number_of_commits():
    found = {}
    for name, changes in (("plain", {}), ("prefix", {"commit_prefix": 4})):
        chain = Chain([], poison=(1, 2))
        search = replace(prefix_search(ib.Picard()), **changes)
        found[name] = search(chain, torch.zeros(2, 32, 3).double())
        commits = len(set(chain.work)) - 1
    assert commits >= 3
    for field in ("z", "token_iterations", "token_converged", "token_diverged"):
        assert torch.equal(getattr(found["prefix"], field), getattr(found["plain"], field)), field
    assert found["prefix"].token_converged[0].all()
    assert not found["prefix"].token_converged[1, 2:].any()


EASY, LOST = 1, 2


class Rows(Chain):
    """Chains with ``select_rows``; ``left`` records the rows that stay and the number of remaining tokens."""

    def __init__(self, left, before=None, *, kind):
        super().__init__([], before)
        self.left, self.kind = left, kind  # (rows, remaining tokens): 0 for a link of the chain, EASY or LOST

    def __call__(self, z):
        fz = torch.where(self.kind[:, :, None] == EASY, 0.5, super().__call__(z))
        return torch.where(self.kind[:, :, None] == LOST, torch.nan, fz)

    def after(self, z):
        return Rows(self.left, z[:, -1:], kind=self.kind[:, z.shape[1] :])

    def select_rows(self, rows):
        self.left.append((rows.tolist(), self.kind.shape[1]))
        return Rows(self.left, None if self.before is None else self.before[rows], kind=self.kind[rows])


@torch.no_grad()
def test_rows_that_leave_after_a_commit_keep_the_divergence_before_it():
    kind = torch.zeros(6, 32, dtype=torch.int8)
    kind[0, 2] = LOST
    kind[1:3, 12:] = EASY  # converged early, but after a committed prefix
    search, start, left = prefix_search(ib.Picard()), torch.zeros(6, 32, 3).double(), []
    found = replace(search, commit_prefix=4)(Rows(left, kind=kind), start)
    expected = replace(search, compact=False)(Rows([], kind=kind), start)
    (rows, tokens) = left[0]
    assert rows == [3, 4, 5]
    assert tokens < 32
    for field in ("z", "token_iterations", "token_converged", "token_diverged"):
        assert torch.equal(getattr(found, field), getattr(expected, field)), field
    assert found.converged.tolist() == [False] + [True] * 5


@torch.no_grad()
def test_prefix_commit_and_windows_save_work_if_tokens_converge_one_after_the_other():
    work, values = {}, {}
    for name, changes in (("plain", {}), ("prefix", {"commit_prefix": 4})):
        chain = Chain([])
        search = replace(prefix_search(ib.Picard()), **changes)
        values[name], work[name] = search(chain, torch.zeros(2, 32, 3).double()).z, sum(chain.work)
    chain = Chain([])
    windowed = WindowedSearch(prefix_search(ib.Picard()), 4)
    values["windows"], work["windows"] = windowed(chain, torch.zeros(2, 32, 3).double()).z, sum(chain.work)
    assert torch.equal(values["plain"], values["prefix"])
    assert torch.equal(values["plain"], values["windows"])
    assert work["prefix"] < 0.7 * work["plain"]
    assert work["windows"] < 0.25 * work["plain"]


# ------------------------------------------------------------------------------------------------- specs


def test_the_spec_refuses_prefix_commit_with_scope_sequence_and_empty_windows():
    with pytest.raises(ValueError, match="scope 'sequence' does not determine"):
        ib.ImplicitLMSpec(
            vocab_size=19,
            d_model=16,
            n_layers=1,
            mixer=ib.Mamba2Spec(head_dim=8),
            at_evaluation=ib.AtEvaluation(stopping=ib.StoppingOverrides(scope="sequence"), commit_prefix=4),
        )
    with pytest.raises(ValueError, match="greater than 0"):
        made("mamba2", window_length=0)


def test_a_phase_can_set_the_window_length(tmp_path):
    from trainer.run.build import build
    from trainer.specs.run import RunSpec

    spec = RunSpec.model_validate(
        {
            "model": {
                "kind": "implicit_lm",
                "d_model": 16,
                "n_layers": 1,
                "mixer": {"kind": "mamba2", "d_state": 4, "head_dim": 8},
                "stopping": {"max_iterations": 16},
                "at_evaluation": {"window_length": 4, "commit_prefix": 2},
            },
            "data": {"kind": "word_problem", "group": "Z2", "identity_probability": 0.5, "seq_len": 12},
            "training": {
                "max_steps": 4,
                "batch_size": 8,
                "optimizer": {"kind": "adamw", "learning_rate": 1e-2},
                "schedule": {"kind": "warmup_linear", "warmup": 0},
                "threads": 1,
            },
            "phases": [{"name": "whole", "until": 0.5}, {"name": "windows", "model": {"window_length": 4}}],
            "evaluation": {"sequences": 4, "batch_size": 4},
        }
    )
    run = build(spec, output=tmp_path / "run", device="cpu")
    run.train()
    assert run.model.spec.window_length == 4
